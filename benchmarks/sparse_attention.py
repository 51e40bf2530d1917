"""Fits attention of prompts to chosen keys to times of FlashMLA's kernels.

    python benchmarks/sparse_attention.py ../shared/truth/ops           # prints fits and errors; --write keeps them

    t = overhead_s + block_s * blocks / compute units + FLOPs / (compute_fraction * peak)

A block is a query and 64 heads. Rows are those of 2 to 8,192 new tokens in up to 8 prompts: single tokens are decodes,
and more prompts are launched in turn, 4 at a time under vLLM; of 576 elements those that see more than the 2,048 keys
which an indexer keeps, as others run densely. As these take all of them, a time per block cannot be told from that per
key: theirs is that of 512 elements on the architecture. Fits to 576 elements are printed and not kept: servers with
such models run other kernels on Blackwell, where TTFT of GLM-5 under SGLang became worse.

Printed are median errors of the fit, of fits without the device and without prompts of the row's length, of the fit to
the other architecture, and of what went before: 0.65 of the peak and 2.2 us a launch.
"""

__all__ = ["fit_kernels"]

import argparse
import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from perfmodel.cost.calibrations.for_all import SparseAttentionFits
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.fits import Domain, Residuals
from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.evidence.sources.kernels import engine_and_version, read_table
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import save_fitted
from perfmodel.models import load_model
from perfmodel.ops.attention.compressed import compressed_prefill
from perfmodel.ops.attention.latent import latent_heads, sparse_prefill
from perfmodel.ops.attention.prefill import Heads
from perfmodel.ops.work import Work
from perfmodel.specs import load_hardware
from perfmodel.specs.engine.formats import sparse_heads_per_tile
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec

_TABLES = {512: "dsv4_hca_attn_module", 576: "glm5_dsa_attn_module"}
_MAX_PROMPTS, _TOP_K = 8, 2048
_BEFORE = np.array((2.2, 0.0, 1 / 0.65))
Floats = NDArray[np.float64]


class Rows(NamedTuple):
    """Rows of one kernel. features: (1, blocks a compute unit, microseconds of the FLOPs at the peak); us: measured"""

    devices: NDArray[np.str_]
    lengths: NDArray[np.int64]
    features: Floats
    us: Floats

    def take(self, rows: NDArray[np.bool_]) -> "Rows":
        return Rows(*(column[rows] for column in self))

    def errors(self, times: Floats) -> Floats:
        predicted: Floats = self.features @ times
        return np.abs(predicted / self.us - 1)


def _work(head_dim: int, row: Mapping[str, Any], tile: int) -> Work:
    prefills = ((int(row["isl"]), int(row["step"])),) * int(row["batch_size"])
    if head_dim == 512:
        model = load_model("deepseek-v4-flash")
        mixer: Any = next(layer.mixer for layer, _ in model.layers if getattr(layer.mixer, "ratio", 0) == 128)
        return compressed_prefill(prefills, mixer, Heads(int(row["num_heads"]), 1, 512, 512, "bf16", 2, 2), 584)
    mixer = load_model("glm-5").layers[0][0].mixer
    return sparse_prefill(prefills, latent_heads(mixer, max(tile, int(row["num_heads"])), "bf16", 2, 2), _TOP_K)


def _tables(path: Path) -> Iterator[tuple[HardwareSpec, int, Any]]:
    for head_dim, op in _TABLES.items():
        for file in sorted(path.glob(f"*/{op}.parquet")):
            table = read_table(file)
            yield load_hardware(table.system), head_dim, table


def _rows(path: Path) -> dict[str, Rows]:
    """The rows by architecture, engine and head size."""
    columns: dict[str, list[tuple[Any, ...]]] = {}
    for hardware, head_dim, table in _tables(path):
        facts = DeviceFacts.of(hardware)
        for i in range(len(table)):
            row = {name: table[name][i] for name in table.columns}
            if int(row["isl"]) < 2 or int(row["batch_size"]) > _MAX_PROMPTS:
                continue
            if head_dim == 576 and int(row["isl"]) + int(row["step"]) <= _TOP_K:
                continue
            engine, _ = engine_and_version(str(row["engine_version"]))
            work = _work(head_dim, row, sparse_heads_per_tile(EngineSpec(profile=engine), hardware))
            items: Any = work.problem
            features = (1.0, items.num_items / facts.compute_units, work.flops / facts.peak(work.rate) * 1e6)
            key = f"{hardware.declared.architecture}/{engine}/hd{head_dim}"
            columns.setdefault(key, []).append((hardware.name, row["isl"], features, table.seconds[i] * 1e6))
    return {key: Rows(*map(np.array, zip(*rows, strict=True))) for key, rows in columns.items()}


def _fitted(rows: Rows, block_us: float | None = None) -> Floats:
    """(overhead, time of a block, 1 / compute_fraction) of least relative errors, few large ones counting less.
    block_us: given instead of fitted"""
    known = np.zeros(len(rows.us)) if block_us is None else rows.features[:, 1] * block_us
    free, weights, times = rows.features * [1, block_us is None, 1], 1 / rows.us, np.empty(3)
    for _ in range(30):
        times = lsq_linear(free * weights[:, None], (rows.us - known) * weights, ([0, 0, 1], [100, 100, 100])).x
        times[1] = times[1] if block_us is None else block_us
        weights = 1 / rows.us / np.sqrt(np.maximum(rows.errors(times), 0.01))
    return times


def _held_out(rows: Rows, groups: NDArray[Any], block_us: float | None) -> Floats:
    """The error of each row under a fit without its group."""
    errors = np.empty(len(rows.us))
    for group in np.unique(groups):
        errors[groups == group] = rows.take(groups == group).errors(_fitted(rows.take(groups != group), block_us))
    return errors


def fit_kernels(path: Path) -> dict[str, FamilyFit]:
    """The fits by architecture, engine and head size, to the tables under `path`."""
    all_rows, fits, times = _rows(path), dict[str, FamilyFit](), dict[str, Floats]()
    for key, rows in all_rows.items():
        architecture, _, size = key.split("/")
        block_us = None if size == "hd512" else float(times[f"{architecture}/vllm/hd512"][1])
        times[key] = _fitted(rows, block_us)
        overhead_us, per_block_us, slowness = times[key].tolist()
        logs = np.log(rows.us / (rows.features @ times[key]))
        low, middle, high = np.quantile(logs, (0.1, 0.5, 0.9)).round(4).tolist()
        fits[key] = FamilyFit(
            domain=Domain(head_dim=int(size[2:])),
            compute_fraction=round(1 / slowness, 4),
            overhead_s=round(overhead_us * 1e-6, 9),
            overhead_per_item_s=round(per_block_us * 1e-6, 9),
            residuals=Residuals(num_rows=len(logs), p10=low, p50=middle, p90=high),
        )
        errors = {"before": rows.errors(_BEFORE), "fit": rows.errors(times[key])}
        if len(set(rows.devices)) > 1:
            errors["device left out"] = _held_out(rows, rows.devices, block_us)
        errors["length left out"] = _held_out(rows, rows.lengths, block_us)
        print(f"{key}: {overhead_us:.1f} us, {per_block_us:.2f} us a block, {1 / slowness:.3f} of the peak; ", end="")
        shown = ", ".join(
            f"{name} {np.median(one):.1%} (p90 {np.quantile(one, 0.9):.0%})" for name, one in errors.items()
        )
        print(f"{len(logs)} rows on {len(set(rows.devices))} devices; median errors: {shown}")
        bias = [np.median(rows.features @ np.array(one) / rows.us) - 1 for one in (_BEFORE, times[key])]
        print(f"    bias before {bias[0]:+.1%}, fit {bias[1]:+.1%}")
    for key, rows in all_rows.items():
        others = {other: np.median(rows.errors(one)) for other, one in times.items() if other != key}
        print(f"{key} under the fit of " + ", ".join(f"{other} {error:.1%}" for other, error in others.items()))
    return fits


def main() -> None:
    """Print the fits and their errors; keep them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--write", action="store_true", help="keep the fits")
    asked = parser.parse_args()
    fits = {key[:-6]: fit for key, fit in fit_kernels(asked.path).items() if key.endswith("/hd512")}
    if asked.write:
        num_rows = sum(fit.residuals.num_rows for fit in fits.values())
        about: dict[str, Any] = {
            "source": f"{num_rows:,} times of FlashMLA's kernels published by ai-dynamo/aiconfigurator (Apache-2.0)",
            "date": datetime.datetime.now(datetime.UTC).date(),
            "command": "python benchmarks/sparse_attention.py <kernel tables> --write",
        }
        save_fitted(SparseAttentionFits(kernels=fits, **about), data_dir("calibrations") / "sparse_attention.yaml")


if __name__ == "__main__":
    main()

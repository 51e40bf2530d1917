"""Fits what LoRA adapters cost steps and loads to published runs (hardware_specs/calibrations/adapters.yaml).

    python benchmarks/adapters.py           # prints the fit and its errors; --write keeps it

Of each run the median gap between tokens is a step that decodes; batch and adapters follow from the run's rates
(Little's law). What a step takes besides adapters is the weights and KV at the device's bandwidth, which is not
published (2.0 TB/s assumed), and one constant. A run is also predicted by a fit without all runs of its model and rank.
Loads: copies of the matrices to a slot, and reading a file that is in the host's file cache.
"""

__all__ = ["fit_loads", "fit_steps"]

import argparse
import csv
import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from perfmodel.cost import step_costs
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.cost.memory.adapters import AdapterFits, load_adapter_fits, slot_bytes, targets_of
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import save_fitted
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import decode_shape
from perfmodel.specs import load_hardware, load_scenario

_HERE = Path(__file__).resolve().parents[1] / "measurements" / "adapters"
_BANDWIDTH_BYTES_PER_S = 2.0e12  # of the H100 with 64 GB [assumed]
_MIN_SHARE = 0.15  # of a step, from which on the error of its adapters is told from that of the rest
_OVERHEAD_S = 2.3e-6  # of a kernel in a CUDA graph, as of elementwise ones in h100-sxm-80gb@vllm


def _rows(name: str) -> list[dict[str, str]]:
    with (_HERE / f"{name}.csv").open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def _features(row: dict[str, str]) -> tuple[float, float, float]:
    """(seconds besides adapters, thread blocks, seconds of the adapters' bytes) of a step of `row`."""
    count, third = int(row["adapters"]), int(row["adapters"]) / 3
    first, second, last = row["rates"].split()
    rates = [first] * round(third) + [second] * round(third) + [last] * (count - 2 * round(third))
    batch = float(row["output_tokens"]) / float(row["duration_s"]) * float(row["mean_tpot_ms"]) / 1e3
    mean = (float(row["input_tokens"]) + float(row["output_tokens"]) / 2) / float(row["requests"])
    adapters = f"traffic.adapters={{count: {count}, shares: [{', '.join(rates)}]}}"
    engine = [f"engine.max_loras={row['max_loras']}", f"engine.max_lora_rank={row['rank']}", "engine.enable_lora=true"]
    scenario = load_scenario("llama-3.1-8b-h100-2048-256", [f"model={row['model']}", *engine, adapters])
    estimate = step_costs(scenario).estimate(decode_shape(max(1, round(batch)), round(mean)))
    ours = [one for one in estimate.rows if one.work.family == "lora"]
    blocks = sum(one.count * one.work.problem.num_items for one in ours)  # type: ignore[union-attr]
    moved = sum(one.count * one.work.hbm_bytes for one in ours) / _BANDWIDTH_BYTES_PER_S
    return estimate.device_s - sum(one.duration_s for one in ours), blocks, moved


class StepsFit(NamedTuple):
    """The kernels' fit, and per row (run, predicted, held-out prediction, measured) seconds of a step.

    Held out are all runs of the row's model and rank."""

    kernels: FamilyFit
    rows: list[tuple[str, float, float, float]]


def fit_steps() -> StepsFit:
    """Fit constant, seconds a block and slowness of bytes to relative errors of all runs."""
    rows = _rows("steps")
    others, blocks, moved = np.array([_features(row) for row in rows]).T
    others *= load_hardware("h100-sxm-80gb").memory_bandwidth / _BANDWIDTH_BYTES_PER_S
    measured = np.array([float(row["median_itl_ms"]) / 1e3 for row in rows])
    columns, groups = (
        np.stack([np.ones(len(rows)), blocks, moved], axis=1),
        [(row["model"], row["rank"]) for row in rows],
    )

    def solved(is_kept: NDArray[np.bool_]) -> NDArray[np.float64]:
        coefficients, _ = nnls((columns / measured[:, None])[is_kept], (1 - others / measured)[is_kept])
        return coefficients

    coefficients, held_out = solved(np.ones(len(rows), dtype=bool)), np.empty(len(rows))
    for group in set(groups):
        is_held = np.array([own == group for own in groups])
        held_out[is_held] = (columns @ solved(~is_held) + others)[is_held]
    constant, block_s, slowness = coefficients
    # The error of a step is that of its adapters alone, as nothing else is predicted here.
    ours = columns[:, 1:] @ coefficients[1:]
    logs = np.log(np.maximum(ours + measured - (columns @ coefficients + others), 1e-6) / ours)[
        ours > _MIN_SHARE * measured
    ]
    low, middle, high = np.quantile(logs, (0.1, 0.5, 0.9)).tolist()
    fit = FamilyFit(
        overhead_s=_OVERHEAD_S,
        overhead_per_item_s=float(block_s),
        memory_fraction=min(1.0, float(1 / slowness)),
        residuals=Residuals(num_rows=len(logs), p10=low, p50=middle, p90=high),
    )
    print(f"besides adapters {constant * 1e3:.2f} ms a step, and what the device's bandwidth makes of weights and KV")
    predicted = columns @ coefficients + others
    values = zip(predicted.tolist(), held_out.tolist(), measured.tolist(), strict=True)
    return StepsFit(fit, [(row["run"], *value) for row, value in zip(rows, values, strict=True)])


def fit_loads() -> tuple[float, float, float]:
    """(seconds of a matrix to a slot, seconds to read a file, bytes per second of it)."""
    model = load_scenario("llama-2-7b-a100-batch1", ["engine.enable_lora=true"])
    engine, layers = model.engine, list(model.model.iter_layers())
    targets = targets_of(model.model, engine, layers, has_vocabulary=False, shard=Sharding())
    num_copies = 2 * sum(len(target.widths) for target in targets)
    per_rank = 2 * sum(target.elements_per_rank for target in targets)
    rows = _rows("loads")
    copy_s = float(np.median([float(row["activate_s"]) for row in rows])) / num_copies
    cached = [row for row in rows if row["is_first"] == "0"]
    sizes = np.array([float(row["rank"]) * per_rank for row in cached])
    seconds = np.array([float(row["load_s"]) for row in cached])
    slope, start = np.polyfit(sizes, seconds, 1)
    return copy_s, float(start), float(1 / slope)


def _blocks() -> tuple[int, int]:
    """How many more KV blocks the second server of blocks.csv had, (predicted, measured)."""
    first, second = _rows("blocks")
    sides: list[float] = []
    for row in (first, second):
        lora = [f"engine.max_loras={row['max_loras']}", f"engine.max_lora_rank={row['max_lora_rank']}"]
        own = load_scenario("llama-2-7b-a100-batch1", ["engine.enable_lora=true", *lora])
        slot = slot_bytes(own.model, own.engine, list(own.model.iter_layers()), has_vocabulary=True)
        sides.append(slot * own.engine.max_loras)
    block_bytes = 16 * 2 * 32 * 4096 * 2
    return round((sides[0] - sides[1]) / block_bytes), int(second["num_gpu_blocks"]) - int(first["num_gpu_blocks"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--write", action="store_true", help="keep the fit")
    kernels, steps = fit_steps()
    copy_s, file_s, file_bytes_per_s = fit_loads()
    print(f"{kernels.overhead_per_item_s * 1e9:.3g} ns a thread block, {kernels.memory_fraction:.3g} of the bandwidth")
    print(f"{copy_s * 1e6:.3g} us a matrix, {file_s * 1e3:.3g} ms a file, {file_bytes_per_s / 1e9:.3g} GB/s")
    for run, predicted, held_out, measured in steps:
        errors = f"{predicted / measured - 1:+.1%}, held out {held_out / measured - 1:+.1%}"
        print(f"{run}: {predicted * 1e3:.2f} ms, measured {measured * 1e3:.2f} ms ({errors})")
    mean = np.mean([abs(held_out / measured - 1) for _, _, held_out, measured in steps])
    print(f"mean error of runs whose model and rank are held out: {mean:.1%}")
    print("KV blocks: {} more, measured {}".format(*_blocks()))
    if parser.parse_args().write:
        about: dict[str, Any] = {
            "source": f"{len(steps)} runs and 12 loads of FerranAgulloLopez/GPULLMAdapterOptimization (Apache-2.0)",
            "date": datetime.datetime.now(datetime.UTC).date(),
            "command": "python benchmarks/adapters.py --write",
        }
        fits = AdapterFits(kernels=kernels, copy_s=copy_s, file_s=file_s, file_bytes_per_s=file_bytes_per_s, **about)
        save_fitted(fits, data_dir("calibrations") / "adapters.yaml")


if __name__ == "__main__":
    load_adapter_fits()
    main()

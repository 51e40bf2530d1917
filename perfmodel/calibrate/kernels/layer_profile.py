"""Layer-by-layer kernel profiles of one card: `<run>/ops/meta.yaml` and, per tensor-parallel degree, CSV files.

`dense.csv` has microseconds per layer and number of tokens, `per_sequence.csv` per number of sequences (LM head,
sampler). GEMM layers become rows of a GEMM table; the small kernels fit the roofline form of their family.
"""

__all__ = ["LayerProfile", "fit_small_kernels", "read_layer_profile"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perfmodel.calibrate.kernels.tables import KernelTable
from perfmodel.calibrate.robust import residuals_of
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.roofline import FamilyFit, roofline_time
from perfmodel.errors import SpecError
from perfmodel.files.reach import read_rows
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.ops import BatchShape, StepGraph, Work, build_graph
from perfmodel.ops.extents import GemmExtent
from perfmodel.specs import EngineSpec, HardwareSpec, Sampling, load_hardware, load_model

# The profile's layers -> operators of the step graph, and what their size counts.
_GEMMS = {"qkv_proj": "qkv_proj", "o_proj": "o_proj", "gate_up_proj": "gate_up_proj", "down_proj": "down_proj"}
_SMALL = {
    "layernorm": "input_norm",
    "rotary_emb": "rope",
    "act_fn": "activation",
    "final_layernorm": "final_norm",
}


@dataclass(frozen=True)
class LayerProfile:
    """What a profile measured: a table of GEMMs, and the work and seconds of each run of a small kernel."""

    hardware: HardwareSpec
    engine: str
    gemms: KernelTable
    small: tuple[tuple[Work, float], ...]


def read_layer_profile(folder: str | Path) -> LayerProfile:
    """Read `<folder>/ops`. Raises SpecError for what is missing or not as described above."""
    root = Path(folder) / "ops"
    meta = load_yaml(root / "meta.yaml").data
    hardware, model = load_hardware(str(meta["gpu"])), load_model(str(meta["model"]))
    gemms: list[tuple[float, float, float, float]] = []
    small: list[tuple[Work, float]] = []
    for degree in sorted(root.glob("tp*")):
        engine = EngineSpec(tensor_parallel_size=int(degree.name.removeprefix("tp")))
        graph = build_graph(model, engine, sampling=Sampling(method="greedy").method)
        for name, work, seconds in _runs(degree, graph):
            if name in _SMALL:
                small.append((work, seconds))
            else:
                gemms.append((*work.extent_as(GemmExtent)[:3], seconds * 1e3))
    if not gemms:
        raise SpecError(f"{root}: no folder tp<degree> with a dense.csv")
    version = f"vllm {meta.get('vllm_version', '')}"
    return LayerProfile(hardware, "vllm", _table(hardware.name, version, gemms), tuple(small))


def fit_small_kernels(hardware: HardwareSpec, timed: Sequence[tuple[Work, float]]) -> FamilyFit:
    """Overhead per kernel and achieved share of the bandwidth of elementwise kernels, in log least squares.

    timed: the work and the seconds of each run
    """
    from scipy.optimize import least_squares

    device = DeviceFacts.of(hardware)
    measured = np.array([seconds for _, seconds in timed])

    def fit_of(logs: np.ndarray) -> FamilyFit:
        return FamilyFit(
            overhead_s=float(np.exp(logs[0])),
            memory_fraction=float(np.exp(logs[1])),
            knee=1.0,
            cached_speedup=float(np.exp(logs[2])),
        )

    def predicted(fit: FamilyFit) -> np.ndarray:
        return np.array([roofline_time(work, fit, device).duration_s for work, _ in timed])

    found = least_squares(
        lambda logs: np.log(predicted(fit_of(logs)) / measured),
        np.log([2e-6, 0.8, 2.0]),
        bounds=(np.log([2e-7, 0.05, 1.0]), np.log([5e-5, 1.0, 8.0])),
        loss="soft_l1",
        f_scale=0.1,
    )
    fit = fit_of(found.x)
    return fit.model_copy(update={"residuals": residuals_of(predicted(fit), measured)})


def _runs(folder: Path, graph: StepGraph) -> Iterator[tuple[str, Work, float]]:
    """(layer, work, seconds) of each row that an operator of the graph stands for."""
    nodes = {node.name: node for node in graph.nodes}
    for file, size in (("dense.csv", "tokens"), ("per_sequence.csv", "sequences")):
        for row in _rows(folder / file):
            name, count = row["layer"], int(row[size])
            operator = _GEMMS.get(name) or _SMALL.get(name) or ("lm_head" if name == "lm_head" else None)
            if operator is not None:
                yield name, nodes[operator].work(BatchShape(count, count)), float(row["time_us"]) * 1e-6


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        return read_rows(path)
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _table(system: str, version: str, rows: list[tuple[float, float, float, float]]) -> KernelTable:
    columns = dict(zip(("m", "n", "k", "latency_ms"), np.array(rows).T, strict=True))
    texts = {"engine_version": version, "gemm_dtype": "bfloat16", "kernel_source": "layer_profile"}
    return KernelTable(system, "gemm", columns | {name: np.array([text] * len(rows)) for name, text in texts.items()})

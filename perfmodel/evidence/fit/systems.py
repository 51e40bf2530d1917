"""From a folder of measurements to calibrations: every kernel table of every system, fitted group by group.

A folder is either of kernel tables, `<system>/<op>`, or a run with a layer profile of one card: `ops/meta.yaml` and,
per tensor-parallel degree, `dense.csv` (microseconds per layer and number of tokens) and `per_sequence.csv` (LM head,
sampler). A profile's GEMM layers become rows of a GEMM table; its small kernels fit the roofline form of their family.
To add a kind of kernel, write its module (`groups`, `fit`, `predict`) and enter its tables in MODULES.

Calibration errors are correlated within a run. Residuals of kernel tables fall into shapes, which a model has few of,
and sizes within a shape, which its steps go through. With the residual of a row the sum of its shape's and its size's,
independent of each other (one-way random effects; Searle, Casella and McCulloch, Variance Components, 1992, chapter 3),
the variance of shapes is that of their means less what sizes leave in a mean. Products of a layer with its four
matrices (q, k and v in one, output, gate and up in one, down) have four shapes: their mean has half the standard
deviation of one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import load_calibration
from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.calibrations.for_all import KernelErrors
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.roofline import FamilyFit, roofline_time
from perfmodel.dates import today
from perfmodel.errors import SpecError
from perfmodel.evidence.fit import attention_mixed as mixed_attention
from perfmodel.evidence.fit.forms import residuals_of
from perfmodel.evidence.observation import KERNEL_TABLES, LAYER_PROFILE, table_rows
from perfmodel.evidence.sources.kernels import Column, Group, KernelTable, op_of, read_table, table_files, understood
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.ops import BatchShape, StepGraph, Work, build_graph
from perfmodel.ops.extents import GemmExtent
from perfmodel.specs import EngineSpec, HardwareSpec, Sampling, load_hardware, load_model
from perfmodel.specs.engine.description import describe_engine

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

    result = least_squares(
        lambda logs: np.log(predicted(fit_of(logs)) / measured),
        np.log([2e-6, 0.8, 2.0]),
        bounds=(np.log([2e-7, 0.05, 1.0]), np.log([5e-5, 1.0, 8.0])),
        loss="soft_l1",
        f_scale=0.1,
    )
    fit = fit_of(result.x)
    return fit.model_copy(update={"residuals": residuals_of(predicted(fit), measured)})


def _runs(folder: Path, graph: StepGraph) -> Iterator[tuple[str, Work, float]]:
    """(layer, work, seconds) of each row that an operator of the graph stands for."""
    nodes = {node.name: node for node in graph.nodes}
    for file, size in (("dense.csv", "tokens"), ("per_sequence.csv", "sequences")):
        for row in table_rows(folder / file):
            name, count = row["layer"], int(row[size])
            operator = _GEMMS.get(name) or _SMALL.get(name) or ("lm_head" if name == "lm_head" else None)
            if operator is not None:
                yield name, nodes[operator].work(BatchShape(count, count)), float(row["time_us"]) * 1e-6


def _table(system: str, version: str, rows: list[tuple[float, float, float, float]]) -> KernelTable:
    columns = dict(zip(("m", "n", "k", "latency_ms"), np.array(rows).T, strict=True))
    texts = {"engine_version": version, "gemm_dtype": "bfloat16", "kernel_source": "layer_profile"}
    return KernelTable(system, "gemm", columns | {name: np.array([text] * len(rows)) for name, text in texts.items()})


Progress = Callable[[int, int], None]


class KernelModule(Protocol):
    """What the module of a kind of kernel offers."""

    def groups(self, table: KernelTable, device: DeviceFacts) -> list[Group]:
        """The rows of each kernel."""
        ...

    def fit(self, group: Group, device: DeviceFacts) -> Any:
        """The parameters of one kernel's form."""
        ...

    def predict(self, group: Group, fit: Any, device: DeviceFacts) -> NDArray[np.float64]:
        """Seconds of each row under a fit."""
        ...


# Table name -> the module that knows its kernels.
MODULES = {
    "context_attention": "attention_prefill",
    "context_mla": "attention_latent",
    "custom_allreduce": "collectives",
    "gemm": "gemm",
    "generation_attention": "attention_decode",
    "generation_mla": "attention_latent",
    "mla_context_module": "attention_latent",
    "mla_generation_module": "attention_latent",
    "moe": "moe",
    "nccl": "collectives",
}

# Norms, rotations, activations, cache writes of a device whose small kernels were not timed: between those of the two
# cards whose layer profiles were (2.0 and 2.3 us a kernel; activations in L2 at 2.7 and 3.2 times main memory).
GENERIC_SMALL = FamilyFit(overhead_s=2.2e-6, memory_fraction=0.85, knee=1.0, cached_speedup=3.0)

_EVERY_ENGINE = "nccl"  # a library that all engines call


@dataclass(frozen=True)
class FittedGroup:
    """A kernel with its fit; `ape`: |predicted / measured - 1| of each of its rows."""

    hardware: HardwareSpec
    group: Group
    fit: Any
    ape: NDArray[np.float64]


def calibrate_folder(path: str | Path, engine: str, progress: Progress | None = None) -> list[Calibration]:
    """Calibrations under `engine` of every device measured in `path`.

    Raises SpecError for a folder without measurements of that engine.
    """
    path = Path(path)
    if (path / "ops" / "meta.yaml").is_file():
        return [_from_profile(path, engine)]
    fitted: dict[str, list[FittedGroup]] = {}
    for result in _fit_folder(path, engine, progress):
        fitted.setdefault(result.hardware.name, []).append(result)
    own = {name: members for name, members in fitted.items() if any(m.group.engine == engine for m in members)}
    if not own:
        raise SpecError(f"{path}: has no measurements of engine {engine!r}")
    return [_calibration(name, engine, members) for name, members in own.items()]


def _fit_folder(path: Path, engine: str, progress: Progress | None = None) -> Iterator[FittedGroup]:
    """Fit every kernel of `engine`, and of libraries that all engines call."""
    files = [(file, module) for file in table_files(path) if (module := module_of(op_of(file)))]
    for done, (file, module) in enumerate(files, 1):
        table, hardware = read_table(file), load_hardware(file.parent.name)
        with understood(file):
            result = list(_fit_table(table, hardware, module, engine))
        yield from result
        if progress is not None:
            progress(done, len(files))


def _fit_table(table: KernelTable, hardware: HardwareSpec, module: KernelModule, engine: str) -> Iterator[FittedGroup]:
    device = DeviceFacts.of(hardware)
    for group in module.groups(table, device):
        if group.engine in (engine, _EVERY_ENGINE):
            fit = module.fit(group, device)
            yield FittedGroup(hardware, group, fit, np.abs(module.predict(group, fit, device) / group.seconds - 1))


def module_of(table: str) -> KernelModule | None:
    """The module that knows the kernels of a table, or None."""
    name = MODULES.get(table)
    return cast(KernelModule, import_module(f"perfmodel.evidence.fit.{name}")) if name else None


def _calibration(device: str, engine: str, members: Sequence[FittedGroup]) -> Calibration:
    families = _with_static_scales({result.group.key: result.fit for result in members})
    num_rows = sum(len(result.ape) for result in members)
    return Calibration(
        device=device,
        engine=engine,
        source=KERNEL_TABLES.source(f"{num_rows:,} kernel times of {len(members)} kernels"),
        date=today(),
        command=KERNEL_TABLES.command(engine),
        families=dict(sorted(families.items())),
        default=GENERIC_SMALL,
        contained=_contained(engine, families),
    )


def _with_static_scales(families: dict[str, Any]) -> dict[str, Any]:
    """`families` with the FP8 multiplication whose input comes quantized: measured ones include the kernels that
    quantize it, and differ from BF16's in launches by them."""
    if "gemm/fp8" not in families or "gemm/bf16" not in families:
        return families
    launch_s = min(families["gemm/bf16"].launch_s, families["gemm/fp8"].launch_s)
    return families | {"gemm/fp8_static": families["gemm/fp8"].model_copy(update={"launch_s": launch_s})}


def _contained(engine: str, families: Mapping[str, Any]) -> tuple[str, ...]:
    has_attention = any(key.startswith("attention_decode/") for key in families)
    return describe_engine(engine).facts.attention_contains if has_attention else ()


def _from_profile(path: Path, engine: str) -> Calibration:
    profile = read_layer_profile(path)
    if profile.engine != engine:
        raise SpecError(f"{path}: profiles engine {profile.engine!r}, not {engine!r}")
    device = DeviceFacts.of(profile.hardware)
    gemm = module_of("gemm")
    assert gemm is not None
    families = {group.key: gemm.fit(group, device) for group in gemm.groups(profile.gemms, device)}
    attention = mixed_attention.groups(mixed_attention.read_profiles(path))
    families |= {group.key: mixed_attention.fit(group, device) for group in attention}
    small = fit_small_kernels(profile.hardware, profile.small)
    num_rows = len(profile.gemms) + len(profile.small) + sum(len(group.seconds) for group in attention)
    return Calibration(
        device=profile.hardware.name,
        engine=engine,
        source=LAYER_PROFILE.source(f"{num_rows:,} kernel times of a layer profile"),
        date=today(),
        command=LAYER_PROFILE.command(engine),
        families=families | {"elementwise": small},
        contained=_contained(engine, families),
        default=small,
    )


Floats = NDArray[np.float64]

# What a model and its shards fix of a table's rows; batches, lengths and tokens vary in a run.
_SHAPES = {
    "context_attention": ("num_heads", "num_key_value_heads", "window_size"),
    "context_mla": ("num_heads", "tp_size"),
    "gemm": ("n", "k"),
    "generation_attention": ("num_heads", "num_key_value_heads", "window_size"),
    "generation_mla": ("num_heads", "tp_size"),
    "mla_context_module": ("model", "num_heads", "tp_size"),
    "mla_generation_module": ("model", "num_heads", "tp_size"),
    "moe": ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "distribution"),
}
_SHAPES_IN_A_LAYER = {"gemm": 4}
_LEAST_SHAPES = 5


def fit_kernel_errors(folder: str | Path) -> KernelErrors:
    """The share of each family: the mean over the kernels that the calibrations have a fit of.

    folder: of kernel tables `<system>/<op>`. Raises SpecError for one without such kernels.
    """
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for file in table_files(folder):
        if op_of(file) in _SHAPES:
            with understood(file):
                for family, share in _shares(read_table(file)):
                    shares[family].append(share)
    if not shares:
        raise SpecError(f"{folder}: has no table of kernels with a fit and {_LEAST_SHAPES} shapes or more.")
    return KernelErrors(common={family: round(float(np.mean(result)), 3) for family, result in sorted(shares.items())})


def _shares(table: KernelTable) -> list[tuple[str, float]]:
    """(family, share) of each kernel of a table with a fit of its own and enough shapes."""
    hardware, module = load_hardware(table.system), module_of(table.op)
    assert module is not None
    device, result = DeviceFacts.of(hardware), []
    for group in module.groups(table, device):
        fit = load_calibration(hardware, group.engine).families.get(group.key)
        shapes = _shape_numbers(table.take(group.rows))
        if fit is None or len(np.unique(shapes)) < _LEAST_SHAPES:
            continue
        share = common_share(np.log(module.predict(group, fit, device) / group.seconds), shapes)
        family = group.key.split("/")[0]
        result.append((family, share / _SHAPES_IN_A_LAYER.get(family, 1) ** 0.5))
    return result


def _shape_numbers(table: KernelTable) -> Column:
    """A number for each row, equal where shapes are."""
    names = [name for name in _SHAPES[table.op] if name in table.columns]
    numbered = np.stack([np.unique(table[name], return_inverse=True)[1] for name in names])
    return np.asarray(np.unique(numbered, axis=1, return_inverse=True)[1])


def common_share(residuals: Floats, shapes: Column) -> float:
    """Standard deviation of what shapes err by over that of all residuals, from 0 to 1.

    residuals: log(predicted / measured) of rows; shapes: the shape of each, as a number
    """
    _, number, counts = np.unique(shapes, return_inverse=True, return_counts=True)
    means = np.bincount(number, residuals) / counts
    within = float(np.sum((residuals - means[number]) ** 2)) / max(1, len(residuals) - len(counts))
    between = max(0.0, float(np.var(means, ddof=1)) - within * float(np.mean(1 / counts)))
    return float((between / (between + within)) ** 0.5) if between else 0.0

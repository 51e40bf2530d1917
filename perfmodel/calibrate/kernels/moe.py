"""Measured mixtures of experts (`moe`): which kernel a row ran, the load of its rank, its sizes, the fit of its form.

Columns: num_tokens (of all ranks), hidden_size, inter_size (per expert, before sharding), topk, num_experts,
moe_tp_size, moe_ep_size, distribution, moe_dtype, kernel_source, engine_version. Rows of one engine, number format and
kernel are fitted together. The tables do not say whether experts have a gate: see `_num_gates`.
"""

__all__ = ["OP", "fit", "fit_start", "groups", "is_too_fast", "predict", "sizes_of"]

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.kernels.expert_load import rank_load
from perfmodel.calibrate.kernels.tables import WEIGHT_FORMATS, Group, KernelTable, WeightFormat, engine_name, numbers
from perfmodel.calibrate.robust import fit_form, residuals_of
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.experts import ExpertSizes, GroupedExpertsFit, expert_seconds
from perfmodel.cost.forms.fits import Domain, take
from perfmodel.cost.forms.gemm import TileStep
from perfmodel.errors import SpecError
from perfmodel.ops.extents import ExpertsExtent
from perfmodel.ops.routing import TILE_ROWS

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

OP = "moe"

# Triton's fused_moe without a tuned configuration: by tokens per expert in older versions, by tokens in newer ones.
_DEFAULT_OLD = (TileStep(1, 16, 32), TileStep(0, 64, 64))
_DEFAULT_NEW = (TileStep(32, 16, 64), TileStep(96, 32, 64), TileStep(512, 64, 128), TileStep(0, 128, 128))
_DEFAULT_FP8_BLOCK = (TileStep(64, 16, 128), TileStep(0, 64, 128))


@dataclass(frozen=True)
class _Kernel:
    """What is known of a kernel from its code or from how it was timed.

    variant:       a suffix of the calibration key, where an engine runs several kernels for one format
    family:        how the calibration key begins
    computes_masked: the collector's call computes slots of other ranks' experts, too (serving does not)
    has_gate:      of the collector's experts; None: as the model has it
    expert_parallel: the engine picks this kernel where ranks share out whole experts, or where they do not
    """

    source: str  # a part of `kernel_source`; "" matches all
    engine: str
    format: str = ""  # "" matches all
    tile_rule: tuple[TileStep, ...] = ()
    rule_counts: Literal["tokens", "tokens_per_expert"] = "tokens"
    moves_all_slots: bool = False
    computes_masked: bool = False
    has_gate: bool | None = None
    expert_parallel: bool | None = None
    variant: str = ""
    family: str = "moe"

    @property
    def domain(self) -> Domain:
        """The works that run this kernel."""
        gates = None if self.has_gate is None or self.engine != "trtllm" else 1 + self.has_gate
        return Domain(gates=gates, expert_parallel=self.expert_parallel)


# The first match counts.
_KERNELS = (
    _Kernel("nongated", "trtllm", has_gate=False, variant="nongated"),
    _Kernel("", "trtllm", has_gate=True),
    _Kernel("fused_moe_triton", "sglang", "bf16", _DEFAULT_OLD, "tokens_per_expert", False, True, True),
    _Kernel("", "sglang", computes_masked=True, has_gate=True),
    _Kernel(
        "vllm_fused_moe", "vllm", "bf16", _DEFAULT_OLD, "tokens_per_expert", True, has_gate=True, variant="fused_moe"
    ),
    _Kernel("unquantizedfusedmoe_triton", "vllm", "bf16", _DEFAULT_NEW, moves_all_slots=True),
    _Kernel(
        "fp8moe_triton",
        "vllm",
        "fp8_block",
        _DEFAULT_FP8_BLOCK,
        moves_all_slots=True,
        expert_parallel=False,
        variant="triton",
    ),
    _Kernel("flashinfer", "vllm", "fp8_block", expert_parallel=True),
    # As it was timed, per-tensor FP8 fell back to a slow tactic (a fifth of the tensor rate and of the bandwidth) that
    # servers of FP8 checkpoints do not run: a family of its own, which they never find.
    _Kernel("modeloptfp8moe_flashinfer", "vllm", "fp8", family="moe_untuned"),
    _Kernel("marlin", "vllm", "int4_wo", moves_all_slots=True),
    _Kernel("marlin", "vllm", "mxfp4_wo", moves_all_slots=True, variant="marlin"),
    _Kernel("", ""),
)
_FREE = (
    *("launch_s", "compute_fraction", "memory_fraction", "feed_edge", "knee", "tile_s", "wave_quantization"),
    *("passes", "expert_s"),
)
_STARTS: tuple[dict[str, float], ...] = (
    {},
    {"feed_edge": 20.0, "compute_fraction": 0.8, "tile_s": 5e-7, "knee": 2.0},
    {"feed_edge": 90.0, "compute_fraction": 0.5, "tile_s": 4e-6, "knee": 1.5},
    {"compute_fraction": 0.6, "passes": 3.0, "knee": 1.3, "memory_fraction": 0.95},
    {"compute_fraction": 0.5, "feed_edge": 80.0, "tile_s": 4e-6, "knee": 4.4, "memory_fraction": 0.95},
)
_MOST_ROWS = 3000  # of a fit
_TOO_FAST = 1.1  # times the declared peaks: the draws of expert loads are not the collector's own
_ONE_CALL = ("tokens", "top_k", "num_experts", "local_experts", "width", "inner", "distinct", "assignments")
_LEAST_MISALIGNED = 50  # rows with odd shards that it takes to fit what they cost


def sizes_of(table: KernelTable, form: WeightFormat, kernel: _Kernel, gates: Floats) -> ExpertSizes:
    """The sizes of the rows of `table` for one kernel, with the load of the rank that was timed.

    form: the weights' format; gates: matrices of the first product (2 where it is gated)
    """
    tokens, top_k, experts = (numbers(table, name) for name in ("num_tokens", "topk", "num_experts"))
    ranks, width = numbers(table, "moe_ep_size"), numbers(table, "hidden_size")
    inner = numbers(table, "inter_size") / numbers(table, "moe_tp_size")
    keys = zip(tokens, experts, top_k, ranks, table["distribution"], strict=True)
    loads = [rank_load(int(m), int(e), int(k), int(r), str(name)) for m, e, k, r, name in keys]
    distinct, assignments = np.array([load.distinct for load in loads]), np.array([load.assignments for load in loads])
    tiles = np.array([load.tiles for load in loads])
    if kernel.computes_masked:
        local_tokens = np.array([load.tokens for load in loads])
        masked = np.maximum(local_tokens * top_k - assignments, 0.0)
        distinct, assignments = distinct + (masked > 0), assignments + masked
        tiles, tokens = tiles + np.ceil(masked[:, None] / np.array(TILE_ROWS)), local_tokens
    a = form.input_bytes
    row_bytes = (width * a + gates * inner * 2) + (gates * inner * 2 + inner * a) + (inner * a + width * 2) + width * 2
    extent = ExpertsExtent(
        tokens=tokens,
        top_k=top_k,
        num_experts=experts,
        local_experts=experts / ranks,
        width=width,
        inner=inner,
        gates=gates,
        distinct=distinct,
        assignments=assignments,
        sum_bytes=tokens * width * 2,
        tiles=tiles,
        weight_bytes=form.weight_bytes,
        input_bytes=form.input_bytes,
    )
    return ExpertSizes(extent, row_bytes, form.rate)


def is_too_fast(group: Group, device: DeviceFacts) -> NDArray[np.bool_]:
    """Rows that beat the declared tensor rate, or the bandwidth with the weights of the experts that are hit."""
    sizes: ExpertSizes = group.sizes
    extent = sizes.extent
    weights = (extent.gates + 1) * extent.width * extent.inner
    flops = 2.0 * extent.assignments * weights
    read = extent.distinct * weights * extent.weight_bytes
    fastest = np.maximum(flops / device.peak(sizes.rate), read / device.bandwidth)
    return np.asarray(group.seconds * _TOO_FAST < fastest)


def groups(table: KernelTable, device: DeviceFacts) -> list[Group]:
    """One group per engine, number format and kernel. Rows of formats without a known meaning are in none."""
    found: dict[tuple[str, str], list[tuple[WeightFormat, _Kernel, Rows]]] = {}
    for (version, dtype, source), rows in table.groups(("engine_version", "moe_dtype", "kernel_source")):
        if dtype in WEIGHT_FORMATS:
            form, engine = WEIGHT_FORMATS[dtype], engine_name(version)
            kernel = _kernel(source, engine, form.name)
            key = "/".join(filter(None, (kernel.family, form.name, kernel.variant)))
            found.setdefault((engine, key), []).append((form, kernel, rows))
    known = _num_gates(table)
    result = []
    for (engine, key), parts in found.items():
        form, kernel, _ = parts[0]
        rows = np.concatenate([each for _, _, each in parts])
        part = table.take(rows)
        gates = known[rows] if kernel.has_gate is None else np.full(len(rows), 1.0 + kernel.has_gate)
        result.append(Group(engine, key, sizes_of(part, form, kernel, gates), part.seconds, rows))
    return result


def fit(group: Group, device: DeviceFacts) -> GroupedExpertsFit:
    """The parameters of one kernel, from the rows that do not beat the hardware; a call measured twice counts once."""
    usable = np.flatnonzero(~is_too_fast(group, device))
    if not len(usable):
        raise SpecError(f"{group.key}: all {len(group.rows)} rows are faster than the device's memory allows.")
    calls = np.column_stack([getattr(group.sizes.extent, name) for name in _ONE_CALL])[usable]
    usable = usable[np.sort(np.unique(calls, axis=0, return_index=True)[1])]
    sizes: ExpertSizes = take(group.sizes, usable)
    measured = group.seconds[usable]
    start = fit_start(group.key, group.engine)
    free: tuple[str, ...] = _FREE
    if np.count_nonzero(sizes.extent.inner % 16) >= _LEAST_MISALIGNED:
        free = (*free, "misaligned")
        start = start.model_copy(update={"misaligned": 1.3})
    launch = max(4e-6, 0.7 * float(np.quantile(measured, 0.01)))

    def seconds(candidate: GroupedExpertsFit, rows: Rows) -> Floats:
        duration: Floats = expert_seconds(take(sizes, rows), candidate, device).duration
        return duration

    starts = tuple({"launch_s": launch, **each} for each in _STARTS)
    found = fit_form(seconds, start, measured, free=free, starts=starts, most_rows=_MOST_ROWS)
    return found.model_copy(update={"residuals": residuals_of(seconds(found, np.arange(len(measured))), measured)})


def fit_start(key: str, engine: str) -> GroupedExpertsFit:
    """What is known of a kernel before any row: its rules, and which works run it."""
    _, format, *variant = key.split("/")
    kernel = next(
        each
        for each in _KERNELS
        if each.engine in ("", engine) and each.format in ("", format) and each.variant == "".join(variant)
    )
    return GroupedExpertsFit(
        tile_rule=kernel.tile_rule,
        rule_counts=kernel.rule_counts,
        moves_all_slots=kernel.moves_all_slots,
        domain=kernel.domain,
    )


def predict(group: Group, fit: GroupedExpertsFit, device: DeviceFacts) -> Floats:
    """Seconds of each row."""
    duration: Floats = expert_seconds(group.sizes, fit, device).duration
    return duration


def _kernel(source: str, engine: str, format: str) -> _Kernel:
    return next(
        kernel
        for kernel in _KERNELS
        if kernel.source in source and kernel.engine in ("", engine) and kernel.format in ("", format)
    )


def _num_gates(table: KernelTable) -> Floats:
    """2 for experts with a gate, else 1: as a published model of that shape has it, or a kernel in the table says."""
    names = ("hidden_size", "inter_size", "topk", "num_experts")
    shapes = list(zip(*(table[name].tolist() for name in names), strict=True))
    ungated = {shape for shape, gated in _known_gates().items() if not gated}
    is_named = np.char.find(table["kernel_source"].astype(str), "nongated") >= 0
    ungated |= {shape for shape, named in zip(shapes, is_named, strict=True) if named}
    return np.array([1.0 if shape in ungated else 2.0 for shape in shapes])


@lru_cache(maxsize=1)
def _known_gates() -> Mapping[tuple[Any, ...], bool]:
    """Whether experts have a gate, by (width, intermediate size, top k, number of experts), of all model cards."""
    from perfmodel.models.architecture import MoEFFN
    from perfmodel.models.cards import list_models, load_model

    found = {}
    for name in list_models():
        model = load_model(name)
        for layer, _ in model.layers:
            ffn = layer.ffn
            if isinstance(ffn, MoEFFN):
                width = ffn.latent_size or model.hidden_size
                found[(width, ffn.intermediate_size, ffn.top_k, ffn.num_experts)] = ffn.gated
    return found

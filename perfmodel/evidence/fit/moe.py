"""Measured mixtures of experts (`moe`): which kernel a row ran, the load of its rank, its sizes, the fit of its form.

Columns: num_tokens (of all ranks), hidden_size, inter_size (per expert, before sharding), topk, num_experts,
moe_tp_size, moe_ep_size, distribution, moe_dtype, kernel_source, engine_version. Rows of one engine, number format and
kernel are fitted together. The tables do not say whether experts have a gate: see `_num_gates`.

The tables name a distribution of the collectors' synthetic routing: `balanced`, or `power_law_a` (experts drawn with
density x^-a). M tokens of all ranks together choose k of E experts each; of R ranks with E / R experts each, the one
with the most assignments is timed. Source: the synthetic routing of ai-dynamo/aiconfigurator's MoE collectors
(Apache-2.0), rebuilt from its description; its draws are not known, so averages over `_DRAWS` seeded ones stand for
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.experts import ExpertSizes, GroupedExpertsFit, expert_seconds
from perfmodel.cost.forms.fits import Domain
from perfmodel.cost.forms.gemm import TileStep
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.forms import fit_group
from perfmodel.evidence.sources.kernels import WEIGHT_FORMATS, Group, KernelTable, WeightFormat, engine_name, numbers
from perfmodel.ops.extents import ExpertsExtent
from perfmodel.ops.routing import TILE_ROWS

Counts = NDArray[np.int64]

_DRAWS = 8


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What the timed rank is sent: distinct experts, assignments, tokens with any local expert, tiles by tile rows."""

    distinct: float
    assignments: float
    tokens: float
    tiles: tuple[float, ...]


@lru_cache(maxsize=65536)
def rank_load(num_tokens: int, num_experts: int, top_k: int, num_ranks: int, distribution: str) -> RankLoad:
    """The load of the timed rank when `num_tokens` tokens choose `top_k` of `num_experts` experts on `num_ranks` ranks.

    distribution: "balanced" or "power_law_<a>"
    """
    if distribution == "balanced":
        return _balanced(num_tokens, num_experts, top_k, num_ranks)
    exponent = float(distribution.rpartition("_")[2])
    rng = np.random.default_rng((num_tokens, num_experts, top_k, num_ranks))
    drawn = np.zeros(3 + len(TILE_ROWS))
    for _ in range(_DRAWS):
        counts = _power_law(num_tokens, num_experts, top_k, exponent, rng, num_ranks)
        heaviest = counts[counts.sum(axis=1).argmax()]
        share = min(1.0, heaviest.sum() / (num_tokens * top_k))
        drawn += _numbers(heaviest, num_tokens * (1.0 - (1.0 - share) ** top_k))
    return _load(drawn / _DRAWS)


def _balanced(num_tokens: int, num_experts: int, top_k: int, num_ranks: int) -> RankLoad:
    """Slot j of token i goes to expert i + j ceil(E / k), spread evenly where there are few tokens; rank 0 is timed."""
    stride = -(-num_experts // top_k)
    token, slot = np.arange(num_tokens)[:, None], np.arange(top_k)
    first = token if num_tokens >= stride else token * stride // num_tokens
    chosen = (first + slot * stride) % num_experts
    local = num_experts // num_ranks
    counts = np.bincount(chosen.ravel(), minlength=num_experts)[:local]
    return _load(_numbers(counts, float((chosen < local).any(axis=1).sum())))


def _power_law(tokens: int, experts: int, top_k: int, a: float, rng: np.random.Generator, ranks: int) -> Counts:
    """Tokens of each expert, (rank, expert): shares drawn with density x^-a, rounded, at most one slot per token.

    What rounding and that limit leave over or take too much goes one at a time to each rank in turn, to its smallest
    (from its largest) expert: with few tokens that is nearly all of them.
    """
    low, high = (1.0, 0.8 * tokens) if tokens * top_k > experts else (0.01, 2.0)
    share = ((high ** (1 - a) - low ** (1 - a)) * rng.random(experts) + low ** (1 - a)) ** (1 / (1 - a))
    wanted = np.round(share / share.sum() * tokens * top_k).astype(np.int64)
    counts: Counts = np.minimum(wanted, tokens)
    over = int((wanted - counts).sum())
    counts = counts.reshape(ranks, -1)
    _hand_out(counts, over, tokens, 1)
    missing = int(tokens * top_k - counts.sum())
    _hand_out(counts, abs(missing), tokens, 1 if missing > 0 else -1)
    return counts


def _hand_out(counts: Counts, amount: int, most: int, sign: int) -> None:
    """Add (or take) one at a time, rank by rank, until `amount` is spent."""
    shares = _in_turn(amount, (most - counts if sign > 0 else counts).sum(axis=1))
    for rank in np.flatnonzero(shares):
        counts[rank] = sign * _filled(sign * counts[rank], int(shares[rank]))


def _in_turn(amount: int, room: Counts) -> Counts:
    """What each rank gets of `amount` that is handed out one at a time in turn, to those that have room."""
    shares = np.zeros_like(room)
    while amount > 0 and len(able := np.flatnonzero(shares < room)[:amount]):
        turns = min(amount // len(able), int((room - shares)[able].min()))
        shares[able] += turns
        amount -= turns * len(able)
    return shares


def _filled(heights: Counts, amount: int) -> Counts:
    """Heights after `amount` was added one at a time to the lowest, the first of equal ones."""
    ordered = np.sort(heights)
    below = np.cumsum(ordered) - ordered
    num_raised = int((np.arange(len(ordered)) * ordered - below <= amount).sum())
    level, left = divmod(amount + int(ordered[:num_raised].sum()), num_raised)
    result = np.maximum(heights, level)
    result[np.flatnonzero(heights <= level)[:left]] += 1
    return result


def _numbers(counts: Counts, tokens: float) -> NDArray[np.float64]:
    tiles = [np.ceil(counts / rows).sum() for rows in TILE_ROWS]
    return np.array([(counts > 0).sum(), counts.sum(), tokens, *tiles], dtype=np.float64)


def _load(numbers: NDArray[Any]) -> RankLoad:
    distinct, assignments, tokens, *tiles = map(float, numbers)
    return RankLoad(distinct, assignments, tokens, tuple(tiles))


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
    values: dict[tuple[str, str], list[tuple[WeightFormat, _Kernel, Rows]]] = {}
    for (version, dtype, source), rows in table.groups(("engine_version", "moe_dtype", "kernel_source")):
        if dtype in WEIGHT_FORMATS:
            form, engine = WEIGHT_FORMATS[dtype], engine_name(version)
            kernel = _kernel(source, engine, form.name)
            key = "/".join(filter(None, (kernel.family, form.name, kernel.variant)))
            values.setdefault((engine, key), []).append((form, kernel, rows))
    known = _num_gates(table)
    result = []
    for (engine, key), parts in values.items():
        form, kernel, _ = parts[0]
        rows = np.concatenate([item for _, _, item in parts])
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
    part = group.take(usable[np.sort(np.unique(calls, axis=0, return_index=True)[1])])
    start = fit_start(group.key, group.engine)
    free: tuple[str, ...] = _FREE
    if np.count_nonzero(part.sizes.extent.inner % 16) >= _LEAST_MISALIGNED:
        free = (*free, "misaligned")
        start = start.model_copy(update={"misaligned": 1.3})
    launch = max(4e-6, 0.7 * float(np.quantile(part.seconds, 0.01)))
    starts = tuple({"launch_s": launch, **item} for item in _STARTS)
    return fit_group(part, _seconds, start, device, free=free, starts=starts, most_rows=_MOST_ROWS)


def _seconds(sizes: ExpertSizes, fit: GroupedExpertsFit, device: DeviceFacts) -> Floats:
    duration: Floats = expert_seconds(sizes, fit, device).duration
    return duration


def fit_start(key: str, engine: str) -> GroupedExpertsFit:
    """What is known of a kernel before any row: its rules, and which works run it."""
    _, format, *variant = key.split("/")
    kernel = next(
        item
        for item in _KERNELS
        if item.engine in ("", engine) and item.format in ("", format) and item.variant == "".join(variant)
    )
    return GroupedExpertsFit(
        tile_rule=kernel.tile_rule,
        rule_counts=kernel.rule_counts,
        moves_all_slots=kernel.moves_all_slots,
        domain=kernel.domain,
    )


def predict(group: Group, fit: GroupedExpertsFit, device: DeviceFacts) -> Floats:
    """Seconds of each row."""
    return _seconds(group.sizes, fit, device)


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

    result = {}
    for name in list_models():
        model = load_model(name)
        for layer, _ in model.layers:
            ffn = layer.ffn
            if isinstance(ffn, MoEFFN):
                width = ffn.latent_size or model.hidden_size
                result[(width, ffn.intermediate_size, ffn.top_k, ffn.num_experts)] = ffn.gated
    return result

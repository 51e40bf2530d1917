"""Measured matrix products: dense (`gemm`), and of mixtures of experts (`moe`).

gemm: m, n, k, gemm_dtype, kernel_source, engine_version. Most rows are CUDA graph replays; `is_eager` kernels were
      launched one by one, which puts a floor under their times that serving does not have.
moe: num_tokens (of all ranks), hidden_size, inter_size (per expert, before sharding), topk, num_experts, moe_tp_size,
     moe_ep_size, distribution, moe_dtype, kernel_source, engine_version. Tables omit whether experts are gated.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.experts import ExpertSizes, GroupedExpertsFit
from perfmodel.cost.kernel_models.fits import Domain
from perfmodel.cost.kernel_models.gemm import GemmSizes, TiledGemmFit, TileStep
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.kernels import Floats, KernelModule, fit_group
from perfmodel.evidence.sources.kernels import WEIGHT_FORMATS, Group, KernelTable, WeightFormat, engine_name, numbers
from perfmodel.ops.problem_sizes import ExpertsSize, GemmSize
from perfmodel.ops.routing import TILE_ROWS

_MAX_ROWS = 3000  # of a fit


@dataclass(frozen=True)
class _Kernel:
    """Facts about a kernel, from its code or how it was timed.

    start:   of its fit: rules and domain
    variant: suffix of the calibration key, if an engine has several kernels for a format
    family:  start of the key, if unusual
    is_eager: launched one by one
    computes_masked: the collector's call also computes slots of other ranks' experts (serving does not)
    has_gate: of the collector's experts; None: as the model has it
    """

    source: str  # a regular expression for `kernel_source`
    engine: str
    format: str  # "" matches all
    start: Any
    variant: str = ""
    family: str = ""
    is_eager: bool = False
    computes_masked: bool = False
    has_gate: bool | None = None


def _kernel(kernels: Iterable[_Kernel], engine: str, format: str, matches: Callable[[_Kernel], Any]) -> _Kernel:
    of_engine = (kernel for kernel in kernels if kernel.engine in ("", engine) and kernel.format in ("", format))
    return next(filter(matches, of_engine))


def _kernel_of_source(kernels: Iterable[_Kernel], source: str, engine: str, format: str) -> _Kernel:
    return _kernel(kernels, engine, format, lambda kernel: re.search(kernel.source, source))


def _kernel_of_key(kernels: Iterable[_Kernel], key: str, engine: str) -> _Kernel:
    _, format, *variant = key.split("/")
    return _kernel(kernels, engine, format, lambda kernel: kernel.variant == "".join(variant))


# ---------------------------------------------------------------- dense


# CUTLASS without a tuned choice: vLLM's scaled-mm dispatch for Hopper, TensorRT-LLM's blockwise FP8 kernel.
_CUTLASS = TiledGemmFit(tile_rule=(TileStep(64, 64, 64), TileStep(128, 64, 128), TileStep(0, 128, 128)))
_PLAIN = TiledGemmFit()
# vLLM picks among its three kernels for blockwise FP8 by shape: FlashInfer for few rows, CUTLASS where N or K is no
# multiple of 64 or 128, DeepGEMM for the rest. The eager floor hides what the first two do on the device, so serving
# takes DeepGEMM's parameters, which have no variant, for all.
_GEMMS = (
    _Kernel("^CutlassFP8Scaled", "vllm", "fp8", _CUTLASS),
    _Kernel("^DeepGemm", "vllm", "fp8_block", _PLAIN, is_eager=True),
    _Kernel("^FlashInfer", "vllm", "fp8_block", _PLAIN, "flashinfer", is_eager=True),
    _Kernel("^Cutlass", "vllm", "fp8_block", _PLAIN, "cutlass", is_eager=True),
    _Kernel("", "trtllm", "fp8_block", _CUTLASS),
    _Kernel("", "", "", _PLAIN),
)
_GEMM_FREE = ("launch_s", "compute_fraction", "memory_fraction", "feed_edge", "knee", "tile_s", "wave_quantization")
_GEMM_STARTS: tuple[dict[str, float], ...] = (
    {"knee": 4.0, "tile_s": 2.5e-6, "wave_quantization": 0.8, "feed_edge": 60.0},
    {"knee": 4.0, "tile_s": 8e-7, "wave_quantization": 0.02, "feed_edge": 60.0},
    {"knee": 2.0, "tile_s": 1e-6, "wave_quantization": 0.9},
    {"knee": 1.5, "tile_s": 5e-7, "wave_quantization": 0.5, "compute_fraction": 0.7},
)
_REPLAYED_S = 4e-6  # launches of a quantizing kernel and a GEMM in a CUDA graph, where only eager times are known


def gemm_groups(table: KernelTable, _: DeviceFacts) -> list[Group]:
    """One group per engine, format and kernel, without rows of unknown formats."""
    parts: dict[tuple[str, str, str], list[NDArray[np.int64]]] = {}
    for (version, dtype, source), rows in table.groups(("engine_version", "gemm_dtype", "kernel_source")):
        if dtype in WEIGHT_FORMATS:
            engine, format = engine_name(version), WEIGHT_FORMATS[dtype].name
            key = "/".join(filter(None, ("gemm", format, _kernel_of_source(_GEMMS, source, engine, format).variant)))
            parts.setdefault((engine, key, dtype), []).append(rows)
    result = []
    for (engine, key, dtype), members in parts.items():
        rows, form = np.concatenate(members), WEIGHT_FORMATS[dtype]
        part = table.take(rows)
        m, n, k = (np.asarray(part[name], dtype=np.float64) for name in ("m", "n", "k"))
        moved = n * k * form.weight_bytes + m * k * form.input_bytes + m * n * 2.0
        problem = GemmSize(m, n, k, form.weight_bytes, form.input_bytes, m * k * form.quantized_bytes)
        result.append(Group(engine, key, GemmSizes(problem, moved, form.rate), part.seconds, rows))
    return result


def gemms_too_fast(group: Group, device: DeviceFacts) -> NDArray[np.bool_]:
    """Rows that beat the declared tensor rate or bandwidth: operands stayed in L2, or something else was timed."""
    sizes: GemmSizes = group.sizes
    flops = 2.0 * sizes.problem.m * sizes.problem.n * sizes.problem.k
    fastest = np.maximum(flops / device.peak(sizes.rate), sizes.moved_bytes / device.bandwidth)
    return np.asarray(group.seconds < fastest)


def fit_gemm(group: Group, device: DeviceFacts) -> TiledGemmFit:
    """Fit one kernel to the rows within the declared peaks."""
    kernel = _kernel_of_key(_GEMMS, group.key, group.engine)
    fastest = float(np.quantile(group.seconds, 0.01))
    free: tuple[str, ...] = _GEMM_FREE
    changes = {"launch_s": 0.9 * fastest}
    if not kernel.start.tile_rule:
        free = (*free, "split_s")
    if group.sizes.problem.quantized_bytes.any():
        free = (*free, "quantize_fraction", "quantize_row_s")
    if kernel.is_eager:
        free = (*free[1:], "eager_launch_s", "eager_floor_s")
        changes = {"launch_s": _REPLAYED_S, "eager_launch_s": 0.2 * fastest, "eager_floor_s": fastest}
    start: TiledGemmFit = kernel.start.model_copy(update=changes)
    usable, starts = group.take(~gemms_too_fast(group, device)), tuple({**changes, **item} for item in _GEMM_STARTS)
    return fit_group(usable, start, device, free=free, starts=starts, most_rows=_MAX_ROWS)


# ---------------------------------------------------------------- experts


def _experts(
    tile_rule: tuple[TileStep, ...] = (),
    rule_counts: Literal["tokens", "tokens_per_expert"] = "tokens",
    moves_all_slots: bool = False,
    **domain: Any,
) -> GroupedExpertsFit:
    return GroupedExpertsFit(
        tile_rule=tile_rule, rule_counts=rule_counts, moves_all_slots=moves_all_slots, domain=Domain(**domain)
    )


# Triton's fused_moe without a tuned configuration: by tokens per expert in older versions, by tokens in newer ones.
_OLD = (TileStep(1, 16, 32), TileStep(0, 64, 64))
_NEW = (TileStep(32, 16, 64), TileStep(96, 32, 64), TileStep(512, 64, 128), TileStep(0, 128, 128))
_OLD_TRITON = _experts(_OLD, "tokens_per_expert")
_OLD_TRITON_ALL_SLOTS = _experts(_OLD, "tokens_per_expert", True)
_NEW_TRITON = _experts(_NEW, moves_all_slots=True)
_FP8_TRITON = _experts((TileStep(64, 16, 128), TileStep(0, 64, 128)), moves_all_slots=True, expert_parallel=False)
_ANY = _experts()
_ALL_SLOTS = _experts(moves_all_slots=True)
_MOES = (
    _Kernel("nongated", "trtllm", "", _experts(gates=1), "nongated", has_gate=False),
    _Kernel("", "trtllm", "", _experts(gates=2), has_gate=True),
    _Kernel("fused_moe_triton", "sglang", "bf16", _OLD_TRITON, computes_masked=True, has_gate=True),
    _Kernel("", "sglang", "", _ANY, computes_masked=True, has_gate=True),
    _Kernel("vllm_fused_moe", "vllm", "bf16", _OLD_TRITON_ALL_SLOTS, "fused_moe", has_gate=True),
    _Kernel("unquantizedfusedmoe_triton", "vllm", "bf16", _NEW_TRITON),
    _Kernel("fp8moe_triton", "vllm", "fp8_block", _FP8_TRITON, "triton"),
    _Kernel("flashinfer", "vllm", "fp8_block", _experts(expert_parallel=True)),
    # As it was timed, per-tensor FP8 fell back to a slow tactic (a fifth of the tensor rate and of the bandwidth) that
    # servers of FP8 checkpoints do not run: a family of its own, which they never find.
    _Kernel("modeloptfp8moe_flashinfer", "vllm", "fp8", _ANY, family="moe_untuned"),
    _Kernel("marlin", "vllm", "int4_wo", _ALL_SLOTS),
    _Kernel("marlin", "vllm", "mxfp4_wo", _ALL_SLOTS, "marlin"),
    _Kernel("", "", "", _ANY),
)
_MOE_FREE = (*_GEMM_FREE, "passes", "expert_s")
_MOE_STARTS: tuple[dict[str, float], ...] = (
    {},
    {"feed_edge": 20.0, "compute_fraction": 0.8, "tile_s": 5e-7, "knee": 2.0},
    {"feed_edge": 90.0, "compute_fraction": 0.5, "tile_s": 4e-6, "knee": 1.5},
    {"compute_fraction": 0.6, "passes": 3.0, "knee": 1.3, "memory_fraction": 0.95},
    {"compute_fraction": 0.5, "feed_edge": 80.0, "tile_s": 4e-6, "knee": 4.4, "memory_fraction": 0.95},
)
_TOO_FAST = 1.1  # times the declared peaks: the draws of expert loads are not the collector's own
_ONE_CALL = ("tokens", "top_k", "num_experts", "local_experts", "width", "inner", "distinct", "assignments")
_MIN_MISALIGNED = 50  # rows with odd shards that it takes to fit what they cost


def moe_groups(table: KernelTable, _device: DeviceFacts) -> list[Group]:
    """One group per engine, format and kernel, without rows of unknown formats."""
    parts: dict[tuple[str, str], list[tuple[WeightFormat, _Kernel, NDArray[np.int64]]]] = {}
    for (version, dtype, source), rows in table.groups(("engine_version", "moe_dtype", "kernel_source")):
        if dtype in WEIGHT_FORMATS:
            form, engine = WEIGHT_FORMATS[dtype], engine_name(version)
            kernel = _kernel_of_source(_MOES, source, engine, form.name)
            key = "/".join(filter(None, (kernel.family or "moe", form.name, kernel.variant)))
            parts.setdefault((engine, key), []).append((form, kernel, rows))
    known = _num_gates(table)
    result = []
    for (engine, key), members in parts.items():
        form, kernel, _ = members[0]
        rows = np.concatenate([places for *_, places in members])
        part = table.take(rows)
        gates = known[rows] if kernel.has_gate is None else np.full(len(rows), 1.0 + kernel.has_gate)
        result.append(Group(engine, key, _expert_sizes(part, form, kernel, gates), part.seconds, rows))
    return result


def _expert_sizes(table: KernelTable, form: WeightFormat, kernel: _Kernel, gates: Floats) -> ExpertSizes:
    """Sizes of one kernel's rows, with the load of the timed rank. gates: matrices of the first product (2 if gated)"""
    tokens, top_k, experts = (numbers(table, name) for name in ("num_tokens", "topk", "num_experts"))
    ranks, width = numbers(table, "moe_ep_size"), numbers(table, "hidden_size")
    inner = numbers(table, "inter_size") / numbers(table, "moe_tp_size")
    keys = zip(tokens, experts, top_k, ranks, table["distribution"], strict=True)
    loads = [rank_load(int(m), int(e), int(k), int(r), str(name)) for m, e, k, r, name in keys]
    distinct, assignments, local_tokens, tiles = (np.array(column) for column in zip(*loads, strict=True))
    if kernel.computes_masked:
        masked = np.maximum(local_tokens * top_k - assignments, 0.0)
        distinct, assignments = distinct + (masked > 0), assignments + masked
        tiles, tokens = tiles + np.ceil(masked[:, None] / np.array(TILE_ROWS)), local_tokens
    a = form.input_bytes
    row_bytes = (width * a + gates * inner * 2) + (gates * inner * 2 + inner * a) + (inner * a + width * 2) + width * 2
    problem = ExpertsSize(
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
    return ExpertSizes(problem, row_bytes, form.rate)


def experts_too_fast(group: Group, device: DeviceFacts) -> NDArray[np.bool_]:
    """Rows that beat the declared tensor rate, or the bandwidth for the weights of the experts hit."""
    sizes: ExpertSizes = group.sizes
    problem = sizes.problem
    weights = (problem.gates + 1) * problem.width * problem.inner
    flops = 2.0 * problem.assignments * weights
    read = problem.distinct * weights * problem.weight_bytes
    fastest = np.maximum(flops / device.peak(sizes.rate), read / device.bandwidth)
    return np.asarray(group.seconds * _TOO_FAST < fastest)


def experts_start(key: str, engine: str) -> GroupedExpertsFit:
    """Rules and domain of a kernel before fitting."""
    start: GroupedExpertsFit = _kernel_of_key(_MOES, key, engine).start
    return start


def fit_experts(group: Group, device: DeviceFacts) -> GroupedExpertsFit:
    """Fit one kernel to the rows within the declared peaks; repeated measurements count once."""
    usable = np.flatnonzero(~experts_too_fast(group, device))
    if not len(usable):
        raise SpecError(f"{group.key}: all {len(group.rows)} rows are faster than the device's memory allows.")
    calls = np.column_stack([getattr(group.sizes.problem, name) for name in _ONE_CALL])[usable]
    part = group.take(usable[np.sort(np.unique(calls, axis=0, return_index=True)[1])])
    free: tuple[str, ...] = _MOE_FREE
    start = experts_start(group.key, group.engine)
    if np.count_nonzero(part.sizes.problem.inner % 16) >= _MIN_MISALIGNED:
        free = (*free, "misaligned")
        start = start.model_copy(update={"misaligned": 1.3})
    launch = max(4e-6, 0.7 * float(np.quantile(part.seconds, 0.01)))
    starts = tuple({"launch_s": launch, **item} for item in _MOE_STARTS)
    return fit_group(part, start, device, free=free, starts=starts, most_rows=_MAX_ROWS)


def _num_gates(table: KernelTable) -> Floats:
    """2 for gated experts, else 1: by a published model of that shape, or a kernel in the table."""
    names = ("hidden_size", "inter_size", "topk", "num_experts")
    shapes = list(zip(*(table[name].tolist() for name in names), strict=True))
    ungated = {shape for shape, gated in _known_gates().items() if not gated}
    is_named = np.char.find(table["kernel_source"].astype(str), "nongated") >= 0
    ungated |= {shape for shape, named in zip(shapes, is_named, strict=True) if named}
    return np.array([1.0 if shape in ungated else 2.0 for shape in shapes])


@lru_cache(maxsize=1)
def _known_gates() -> Mapping[tuple[Any, ...], bool]:
    """(width, intermediate size, top k, number of experts) -> whether gated, of all model cards."""
    from perfmodel.models.architecture import MoEFFN
    from perfmodel.models.cards import list_models, load_model

    result = {}
    for model in map(load_model, list_models()):
        for ffn in (layer.ffn for layer, _ in model.layers):
            if isinstance(ffn, MoEFFN):
                width = ffn.latent_size or model.hidden_size
                result[(width, ffn.intermediate_size, ffn.top_k, ffn.num_experts)] = ffn.gated
    return result


# ---------------------------------------------------------------- the load of the timed rank

# Tables name the collectors' synthetic routing: `balanced`, or `power_law_a` (experts drawn with density x^-a). M
# tokens over all ranks choose k of E experts; of R ranks with E / R experts each, the one with most assignments is
# timed.
# Source: MoE collectors of ai-dynamo/aiconfigurator (Apache-2.0), rebuilt from their description; their draws are
# unknown, so averages over `_DRAWS` seeded draws are used.
Counts = NDArray[np.int64]
_DRAWS = 8


class RankLoad(NamedTuple):
    """Distinct experts, assignments, tokens with any local expert, and tiles by tile rows."""

    distinct: float
    assignments: float
    tokens: float
    tiles: tuple[float, ...]


@lru_cache(maxsize=65536)
def rank_load(num_tokens: int, num_experts: int, top_k: int, num_ranks: int, distribution: str) -> RankLoad:
    """Load of the timed rank when `num_tokens` tokens choose `top_k` of `num_experts` experts on `num_ranks` ranks.
    distribution: "balanced" or "power_law_<a>"."""
    if distribution == "balanced":
        # slot j of token i goes to expert i + j ceil(E / k), spread evenly where there are few tokens; rank 0 is timed
        stride = -(-num_experts // top_k)
        token, slot = np.arange(num_tokens)[:, None], np.arange(top_k)
        first = token if num_tokens >= stride else token * stride // num_tokens
        chosen = (first + slot * stride) % num_experts
        local = num_experts // num_ranks
        counts = np.bincount(chosen.ravel(), minlength=num_experts)[:local]
        return _load(_load_numbers(counts, float((chosen < local).any(axis=1).sum())))
    exponent = float(distribution.rpartition("_")[2])
    rng = np.random.default_rng((num_tokens, num_experts, top_k, num_ranks))
    drawn = np.zeros(3 + len(TILE_ROWS))
    for _ in range(_DRAWS):
        counts = _power_law(num_tokens, num_experts, top_k, exponent, rng, num_ranks)
        heaviest = counts[counts.sum(axis=1).argmax()]
        share = min(1.0, heaviest.sum() / (num_tokens * top_k))
        drawn += _load_numbers(heaviest, num_tokens * (1.0 - (1.0 - share) ** top_k))
    return _load(drawn / _DRAWS)


def _power_law(tokens: int, experts: int, top_k: int, a: float, rng: np.random.Generator, ranks: int) -> Counts:
    """Tokens per (rank, expert): shares with density x^-a, rounded, at most one slot per token. The rounding remainder
    goes one at a time to the ranks in turn, to the smallest (if negative from the largest) expert: with few tokens that
    is nearly all of them."""
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
    """Each rank's part of `amount`, handed out in turn to ranks with room."""
    shares = np.zeros_like(room)
    while amount > 0 and len(able := np.flatnonzero(shares < room)[:amount]):
        turns = min(amount // len(able), int((room - shares)[able].min()))
        shares[able] += turns
        amount -= turns * len(able)
    return shares


def _filled(heights: Counts, amount: int) -> Counts:
    """Heights after adding `amount` one at a time to the lowest, ties to the first."""
    ordered = np.sort(heights)
    below = np.cumsum(ordered) - ordered
    num_raised = int((np.arange(len(ordered)) * ordered - below <= amount).sum())
    level, left = divmod(amount + int(ordered[:num_raised].sum()), num_raised)
    result = np.maximum(heights, level)
    result[np.flatnonzero(heights <= level)[:left]] += 1
    return result


def _load_numbers(counts: Counts, tokens: float) -> Floats:
    tiles = [np.ceil(counts / rows).sum() for rows in TILE_ROWS]
    return np.array([(counts > 0).sum(), counts.sum(), tokens, *tiles], dtype=np.float64)


def _load(numbers: Floats) -> RankLoad:
    distinct, assignments, tokens, *tiles = map(float, numbers)
    return RankLoad(distinct, assignments, tokens, tuple(tiles))


GEMM = KernelModule(gemm_groups, fit_gemm)
MOE = KernelModule(moe_groups, fit_experts)

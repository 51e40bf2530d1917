"""Measured matrix products: dense (`gemm`), and of mixtures of experts (`moe`).

gemm: m, n, k, gemm_dtype, kernel_source, engine_version. Most rows are CUDA graph replays; `is_eager` kernels were
      launched one by one, which puts a floor under their times that serving does not have.
moe: num_tokens (of all ranks), hidden_size, inter_size (per expert, before sharding), topk, num_experts, moe_tp_size,
     moe_ep_size, distribution, moe_dtype, kernel_source, engine_version. Tables omit whether experts are gated."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.experts import ExpertSizes, GroupedExpertsFit
from perfmodel.cost.kernel_models.fits import Domain
from perfmodel.cost.kernel_models.gemm import GemmSizes, TiledGemmFit, TileStep
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.kernels import Floats, Groups, KernelModule, best_of, search_of, seconds_of, within_ranges
from perfmodel.evidence.sources.kernels import (
    WEIGHT_FORMATS,
    Group,
    KernelTable,
    WeightFormat,
    engine_and_version,
    numbers,
)
from perfmodel.ops.problem_sizes import ExpertsSize, GemmSize
from perfmodel.ops.routing import TILE_ROWS

_MAX_ROWS = 3000  # of a fit


# Kernels by what the tables call them, the first that fits; a key ends in the name, an empty one in the format.
_GEMM_NAMES = (
    ("^FlashInferFp8BlockScaled", "flashinfer"),
    ("^CutlassFp8BlockScaled", "cutlass"),
    ("fp8_static$", "static"),
)
_MOE_NAMES = (
    ("nongated", "nongated"),
    ("min_latency", "min_latency"),
    ("oaitriton", "triton_kernels"),
    ("marlin", "marlin"),
    ("cutedsl", "cutedsl"),
    ("deepgemm", "deepgemm"),
    ("flashinfer_trtllm|flashinfer_mxfp4|mxfp4_flashinfer", "trtllm"),
    ("cutlass", "cutlass"),
    ("triton|fused_moe", "triton"),
)


def _name_of(names: Iterable[tuple[str, str]], source: str) -> str:
    return next((name for pattern, name in names if re.search(pattern, source)), "")


# How kernels choose tiles: any, none of few rows, or by M, as vLLM's scaled-mm dispatch for Hopper and TensorRT-LLM's
# blockwise FP8 kernel do. The tables' names do not say it; what fits the rows best counts.
_BY_ROWS = (TileStep(64, 64, 64), TileStep(128, 64, 128), TileStep(0, 128, 128))
_RULES: tuple[dict[str, Any], ...] = ({}, {"least_rows": 64}, {"least_rows": 128}, {"tile_rule": _BY_ROWS})
_STEP_S = 1e-9  # per element of k, where the search begins: some tiles are bound by it
_BEYOND_CACHE = 1.5  # times L2: smaller operands may have come from there
# Timed launch by launch. The floor hides what FlashInfer's kernel for few rows and CUTLASS's for odd N or K do on the
# device, so serving takes DeepGEMM's parameters for all.
_EAGER = ("vllm", "fp8_block")
# On devices with tensor memory DeepGEMM reads scales of weights as packed powers of two. SGLang packs them as it loads
# a model; its tables pack them in every call, as TensorRT-LLM's did up to candidate 17 of 1.3 (14 us for small products
# as here, 6 since).
_PACKS_IN_TABLES = ("sglang", "fp8_block")
_REPLAYED_S = 4e-6  # launches of a quantizing kernel and a GEMM in a CUDA graph, where only eager times are known


def gemm_groups(table: KernelTable, device: DeviceFacts) -> list[Group]:
    """One group per engine, version, format and kernel, without rows of unknown formats."""
    result = []
    for (called, dtype, source), rows in table.groups(("engine_version", "gemm_dtype", "kernel_source")):
        if dtype in WEIGHT_FORMATS:
            form, part = WEIGHT_FORMATS[dtype], table.take(rows)
            key = "/".join(filter(None, ("gemm", form.name, _name_of(_GEMM_NAMES, f"{source} {dtype}"))))
            m, n, k = (np.asarray(part[name], dtype=np.float64) for name in ("m", "n", "k"))
            moved = n * k * form.weight_bytes + m * k * form.input_bytes + m * n * 2.0
            problem = GemmSize(m, n, k, form.weight_bytes, form.input_bytes, m * k * form.quantized_bytes)
            sizes = GemmSizes(problem, moved, form.rate)
            result.append(Group(*engine_and_version(called), key, device, sizes, part.seconds, rows))
    return result


def gemms_too_fast(group: Group) -> NDArray[np.bool_]:
    """Rows that beat the declared tensor rate or, if L2 cannot hold them, the bandwidth: something else was timed."""
    sizes: GemmSizes = group.sizes
    device = group.device
    flops = 2.0 * sizes.problem.m * sizes.problem.n * sizes.problem.k
    read = np.where(sizes.moved_bytes < _BEYOND_CACHE * device.l2_bytes, 0.0, sizes.moved_bytes / device.bandwidth)
    return np.asarray(group.seconds < np.maximum(flops / device.peak(sizes.rate), read))


def fit_gemm(groups: Groups) -> TiledGemmFit:
    """Fit one kernel to the rows within the declared peaks."""
    usable = [group.take(~gemms_too_fast(group)) for group in groups]
    fastest = max(float(np.quantile(seconds_of(usable), 0.01)), 1e-6)
    free, begins = search_of("gemm")
    changes = {"launch_s": 0.9 * fastest, "cache_speedup": 2.0}
    if groups[0].sizes.problem.quantized_bytes.any():
        free = (*free, "quantize_fraction", "quantize_row_s")
    kernel = groups[0].engine, groups[0].key.split("/")[1]
    has_tensor_memory = groups[0].device.hardware.level("tensor_memory") is not None
    if kernel == _EAGER or (has_tensor_memory and kernel == _PACKS_IN_TABLES):
        free = (*free[1:], "eager_launch_s", "eager_floor_s")
        if len({group.device.has_own_host for group in groups}) > 1:
            free = (*free, "eager_on_own_host")
        changes |= {"launch_s": _REPLAYED_S, "eager_launch_s": 0.2 * fastest, "eager_floor_s": fastest}
    starts = tuple({**changes, "step_latency_s": _STEP_S, **item} for item in begins)
    kernels = [within_ranges(TiledGemmFit, {**changes, **rule}) for rule in _RULES]
    return best_of(usable, kernels, free, starts, _MAX_ROWS)


# Triton's fused_moe without a tuned configuration: by tokens per expert in older versions, by tokens in newer ones.
_OLD = (TileStep(1, 16, 32), TileStep(0, 64, 64))
_NEW = (TileStep(32, 16, 64), TileStep(96, 32, 64), TileStep(512, 64, 128), TileStep(0, 128, 128))
_BLOCKWISE = (TileStep(64, 16, 128), TileStep(0, 64, 128))
_TRITON_RULES: tuple[dict[str, Any], ...] = (
    {},
    {"tile_rule": _OLD, "rule_counts": "tokens_per_expert"},
    {"tile_rule": _NEW},
    {"tile_rule": _BLOCKWISE},
)
# vLLM picks among two kernels for blockwise FP8: Triton's where ranks share out no experts, FlashInfer's where they do.
_DOMAINS = {
    ("trtllm", "nongated"): Domain(gates=1),
    ("trtllm", "cutlass"): Domain(gates=2),
    ("vllm", "triton"): Domain(expert_parallel=False),
    ("vllm", "cutlass"): Domain(expert_parallel=True),
}
# Where the collector timed the slots of other ranks' experts, too, which serving does not compute.
_MASKED = {("sglang", "0.5.10", "triton"), ("sglang", "0.5.10", "marlin")}
_MOE_FREE = (
    *("launch_s", "compute_fraction", "memory_fraction", "feed_edge", "knee", "tile_s", "wave_quantization"),
    *("cache_speedup", "passes", "expert_s"),
)
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


def moe_groups(table: KernelTable, device: DeviceFacts) -> list[Group]:
    """One group per engine, version, format and kernel, without rows of unknown formats."""
    known, result = _num_gates(table), []
    for (called, dtype, source), rows in table.groups(("engine_version", "moe_dtype", "kernel_source")):
        if dtype in WEIGHT_FORMATS:
            engine, version = engine_and_version(called)
            form, name, part = WEIGHT_FORMATS[dtype], _name_of(_MOE_NAMES, source), table.take(rows)
            sizes = _expert_sizes(part, form, known[rows], (engine, version, name) in _MASKED)
            key = "/".join(filter(None, ("moe", form.name, name)))
            result.append(Group(engine, version, key, device, sizes, part.seconds, rows))
    return result


def _expert_sizes(table: KernelTable, form: WeightFormat, gates: Floats, is_masked: bool) -> ExpertSizes:
    """Sizes of one kernel's rows, with the load of the timed rank. gates: matrices of the first product (2 if gated);
    is_masked: the slots of other ranks' experts are computed, too"""
    tokens, top_k, experts = (numbers(table, name) for name in ("num_tokens", "topk", "num_experts"))
    ranks, width = numbers(table, "moe_ep_size"), numbers(table, "hidden_size")
    inner = numbers(table, "inter_size") / numbers(table, "moe_tp_size")
    keys = zip(tokens, experts, top_k, ranks, table["distribution"], strict=True)
    loads = [rank_load(int(m), int(e), int(k), int(r), str(name)) for m, e, k, r, name in keys]
    distinct, assignments, local_tokens, tiles = (np.array(column) for column in zip(*loads, strict=True))
    if is_masked:
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


def experts_too_fast(group: Group) -> NDArray[np.bool_]:
    """Rows that beat the declared tensor rate or, with experts hit that L2 cannot hold, the bandwidth."""
    sizes: ExpertSizes = group.sizes
    device, problem = group.device, sizes.problem
    weights = (problem.gates + 1) * problem.width * problem.inner
    flops = 2.0 * problem.assignments * weights
    read = problem.distinct * weights * problem.weight_bytes
    seconds = np.where(read < _BEYOND_CACHE * device.l2_bytes, 0.0, read / device.bandwidth)
    return np.asarray(group.seconds * _TOO_FAST < np.maximum(flops / device.peak(sizes.rate), seconds))


def fit_experts(groups: Groups) -> GroupedExpertsFit:
    """Fit one kernel to the rows within the declared peaks; repeated measurements count once."""
    parts = [_once(group.take(~experts_too_fast(group))) for group in groups]
    if not any(len(part.rows) for part in parts):
        raise SpecError(f"{groups[0].key}: all {len(seconds_of(groups))} rows beat the declared peaks of the device.")
    free: tuple[str, ...] = _MOE_FREE
    name = groups[0].key.split("/")[-1]
    facts: dict[str, Any] = {"domain": _DOMAINS.get((groups[0].engine, name), Domain()), "cache_speedup": 1.5}
    # Thread blocks of FlashInfer's blockwise kernel look through their rank's experts (GroupedWithOffsetScheduler).
    facts["counts_local_experts"] = (groups[0].engine, groups[0].key) == ("vllm", "moe/fp8_block/cutlass")
    if sum(np.count_nonzero(part.sizes.problem.inner % 16) for part in parts) >= _MIN_MISALIGNED:
        free = (*free, "misaligned")
        facts["misaligned"] = 1.3
    launch = max(4e-6, 0.7 * float(np.quantile(seconds_of(parts), 0.01)))
    starts = tuple({"launch_s": launch, **item} for item in _MOE_STARTS)
    rules = _TRITON_RULES if name == "triton" else _TRITON_RULES[:1]
    kernels = [
        GroupedExpertsFit(**facts, **rule, moves_all_slots=moves_all) for rule in rules for moves_all in (False, True)
    ]
    return best_of(parts, kernels, free, starts, _MAX_ROWS)


def _once(group: Group) -> Group:
    calls = np.column_stack([getattr(group.sizes.problem, name) for name in _ONE_CALL])
    return group.take(np.sort(np.unique(calls, axis=0, return_index=True)[1]))


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

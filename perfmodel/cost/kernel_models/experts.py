"""The routed experts of one rank: two grouped GEMMs, and the kernels that permute, activate and combine around them.

    t = launch + expert E + sum over the up and the down GEMM of
        min over tiles of knee( waves(tiles / SM) (K step + tile sqrt(tm tn) / 128),  D N K w / (memory_fraction W) )
        + passes * (activation bytes) / W

    tiles = T(tm) ceil(N / tn),  T(tm) = sum over experts of ceil(rows / tm);  N, K = g f, d and d, f

D distinct experts, E of the model (some kernels': of this rank), w bytes of a weight, d width, f intermediate size on
this rank, g = 2 with a gate. The slowest rank's load (`perfmodel.ops.routing`) matters most. Kernels that run over all
slots of all tokens, local experts or not, move that many more activation bytes (`moves_all_slots`). For tables timed
launch by launch, `kernel_s` of an engine's profile replaces the overhead by that of a CUDA graph.
Rows of f not a multiple of 16 lose vector loads (`misaligned`). Parameters are fitted to the MoE tables of
ai-dynamo/aiconfigurator (Apache-2.0)."""

from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from perfmodel.cost.kernel_models.device import NO_TIME, DeviceFacts, OperatorTime
from perfmodel.cost.kernel_models.fits import Domain, KernelSeconds, Residuals, joined, take
from perfmodel.cost.kernel_models.gemm import TileStep, Values, cached_share, k_step_s, knee_of, tile_allowed, waves
from perfmodel.files.base import Spec
from perfmodel.ops.problem_sizes import ExpertsSize
from perfmodel.ops.routing import TILE_ROWS
from perfmodel.ops.work import Work

_TILE_COLUMNS = (32, 64, 128, 256)
_TILES = tuple((m, n) for m in TILE_ROWS for n in _TILE_COLUMNS if 512 <= m * n <= 32768)
_TILE_EDGE = 128.0
_ALIGNMENT = 16
_NEVER_S = 1e9
_ROWS_AT_ONCE = 4096
_NO_COLUMNS = ("tiles", "weight_bytes", "input_bytes")  # the last fields of a problem size


class GroupedExpertsFit(Spec):
    """One family of grouped GEMM kernels. Times in seconds; fractions of the declared peaks."""

    form: Literal["grouped_experts"] = "grouped_experts"
    tile_rule: tuple[TileStep, ...] = ()  # of kernels with a default configuration; empty: the fastest tile
    rule_counts: Literal["tokens", "tokens_per_expert"] = "tokens"  # what `most_rows` of the rule limits
    moves_all_slots: bool = False
    counts_local_experts: bool = False  # `expert_s` is per expert of the rank: thread blocks look through all for tiles
    domain: Domain = Domain()
    launch_s: float = Field(default=2.5e-5, ge=2e-6, le=2e-4)  # of all kernels of the layer
    compute_fraction: float = Field(default=0.6, ge=0.1, le=1.0)
    memory_fraction: float = Field(default=0.9, ge=0.15, le=1.0)
    feed_edge: float = Field(default=50.0, ge=5.0, le=400.0)
    knee: float = Field(default=2.2, ge=1.0, le=20.0)
    tile_s: float = Field(default=1e-6, ge=1e-8, le=2e-5)  # fill and drain of the pipeline, per wave of 128 x 128
    wave_quantization: float = Field(default=0.5, ge=1e-3, le=1.0)
    passes: float = Field(default=1.5, ge=1.0, le=12.0)  # over the activations between the GEMMs, at full bandwidth
    expert_s: float = Field(default=2e-8, ge=1e-11, le=2e-6)  # per expert of the model: counting and sorting slots
    cache_speedup: float = Field(default=1.0, ge=1.0, le=8.0)  # of weights that a benchmark finds in L2
    misaligned: float = Field(default=1.0, ge=1.0, le=3.0)  # slow-down of the GEMMs where 16 does not divide f
    kernel_s: float | None = Field(default=None, ge=3e-7, le=1e-5)  # replayed from a CUDA graph, of each kernel
    residuals: Residuals = Residuals()

    def replayed(self, num_kernels: int) -> "GroupedExpertsFit":
        """The fit with `num_kernels` launches in a CUDA graph, if `kernel_s` is known."""
        if self.kernel_s is None or self.launch_s <= num_kernels * self.kernel_s:
            return self
        return self.model_copy(update={"launch_s": num_kernels * self.kernel_s})


class ExpertSizes(NamedTuple):
    """Calls of one number format, as columns. row_bytes: activation bytes per assignment; rate: the peak rate used"""

    problem: ExpertsSize
    row_bytes: Values
    rate: str


def expert_seconds(
    sizes: ExpertSizes, fit: GroupedExpertsFit, device: DeviceFacts, *, is_warm: bool = False
) -> KernelSeconds:
    """The formula of this module. `is_warm`: weights that fit L2 are there from the last repetition. sizes: columns;
    fit: parameters of the kernels; device: that runs them"""
    starts = range(0, max(1, len(sizes.problem.tokens)), _ROWS_AT_ONCE)
    return joined([_parts(take(sizes, slice(start, start + _ROWS_AT_ONCE)), fit, device, is_warm) for start in starts])


def _parts(sizes: ExpertSizes, fit: GroupedExpertsFit, device: DeviceFacts, is_warm: bool = False) -> KernelSeconds:
    problem = sizes.problem
    rows, columns = np.array(tuple((s.rows, s.columns) for s in fit.tile_rule) or _TILES, dtype=np.float64).T
    peak_per_unit = device.peak(sizes.rate) / device.compute_units
    step = k_step_s(
        rows, columns, peak_per_unit, fit.compute_fraction, fit.feed_edge, problem.input_bytes, problem.weight_bytes
    )
    fill = fit.tile_s * np.sqrt(rows * columns) / _TILE_EDGE
    row_tiles = problem.tiles[:, np.searchsorted(TILE_ROWS, rows)] / device.compute_units
    counted = problem.tokens / problem.local_experts if fit.rule_counts == "tokens_per_expert" else problem.tokens
    allowed = tile_allowed(fit.tile_rule, counted) if fit.tile_rule else None
    slow = np.where(problem.inner % _ALIGNMENT, fit.misaligned, 1.0) if fit.misaligned > 1 else 1.0
    weight_s = problem.weight_bytes / (device.bandwidth * fit.memory_fraction)
    read = problem.distinct * problem.width * problem.inner * weight_s
    if is_warm and fit.cache_speedup > 1.0:
        weights = (problem.gates + 1.0) * problem.distinct * problem.width * problem.inner * problem.weight_bytes
        hit = cached_share(weights, device)
        read = read * (1.0 - hit + hit / fit.cache_speedup)

    gemms = compute = np.zeros(len(problem.tokens))
    up, down = (problem.gates * problem.inner, problem.width), (problem.width, problem.inner)
    for (n, k), share in ((up, problem.gates), (down, 1.0)):
        blocks = row_tiles * np.ceil(n[:, None] / columns)
        by_tile = waves(blocks, fit.wave_quantization) * (k[:, None] * step + fill)
        if allowed is not None:
            by_tile = np.where(allowed, by_tile, _NEVER_S)
        busy = by_tile.min(axis=1)
        compute = compute + busy
        gemms = gemms + knee_of(busy, read * share, fit.knee)
    slots = problem.tokens * problem.top_k if fit.moves_all_slots else problem.assignments
    num_bytes = np.maximum(slots, problem.assignments) * sizes.row_bytes + problem.sum_bytes
    moved = num_bytes * (fit.passes / device.bandwidth)
    num_experts = problem.local_experts if fit.counts_local_experts else problem.num_experts
    duration = fit.launch_s + fit.expert_s * num_experts + slow * gemms + moved
    return KernelSeconds(duration, slow * compute, read * (problem.gates + 1.0) + moved)


def time_experts(work: Work, fit: GroupedExpertsFit, device: DeviceFacts) -> OperatorTime:
    if not work.flops:
        return NO_TIME
    parts = _parts(_sizes(work), fit.replayed(work.num_kernels), device)
    return OperatorTime.of(*(float(column[0]) for column in parts))


def _sizes(work: Work) -> ExpertSizes:
    """A work as columns of one row; without tile counts experts get equal rows."""
    problem = work.problem_as(ExpertsSize)
    numbers = np.array(problem[: -len(_NO_COLUMNS)], dtype=np.float64)[:, None]
    item = problem.assignments / max(problem.distinct, 1e-9)
    tiles = problem.tiles or [problem.distinct * max(1.0, np.ceil(item / rows)) for rows in TILE_ROWS]
    row_bytes = (work.activation_bytes - problem.sum_bytes) / max(problem.assignments, 1e-9)
    columns = (*numbers, np.array([tiles]), problem.weight_bytes, problem.input_bytes)
    return ExpertSizes(ExpertsSize._make(columns), np.array([row_bytes]), work.rate)

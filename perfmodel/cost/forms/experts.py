"""The routed experts of one rank: two grouped GEMMs, and the kernels that permute, activate and combine around them.

    t = launch + expert E + sum over the up and the down GEMM of
        min over tiles of knee( waves(tiles / SM) (K step + tile sqrt(tm tn) / 128),  D N K w / (memory_fraction W) )
        + passes * (activation bytes) / W

    tiles = T(tm) ceil(N / tn),  T(tm) = sum over experts of ceil(rows / tm);  N, K = g f, d and d, f

D distinct experts, E of the model, w bytes of a weight, d width, f intermediate size on this rank, g = 2 with a gate.
What decides most is the load of the slowest rank (`perfmodel.ops.routing`), not the kernels. Kernels that run over all
slots of all tokens, of this rank's experts or not, move that many more activation bytes (`moves_all_slots`). Rows of
f not a multiple of 16 lose vector loads (`misaligned`). Parameters are fitted to the MoE tables of
ai-dynamo/aiconfigurator (Apache-2.0).
"""

__all__ = ["ExpertParts", "ExpertSizes", "GroupedExpertsFit", "expert_seconds", "time_experts"]

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.domain import Domain
from perfmodel.cost.forms.operator_time import OperatorTime, bound_of
from perfmodel.cost.forms.residuals import Residuals
from perfmodel.cost.forms.tiles import TileStep, Values, k_step_s, knee_of, tile_allowed, waves
from perfmodel.files.base import Spec
from perfmodel.ops.routing import TILE_ROWS
from perfmodel.ops.work import Work

_TILE_COLUMNS = (32, 64, 128, 256)
_TILES = tuple((m, n) for m in TILE_ROWS for n in _TILE_COLUMNS if 512 <= m * n <= 32768)
_TILE_EDGE = 128.0
_ALIGNMENT = 16
_NEVER_S = 1e9
_ROWS_AT_ONCE = 4096


class GroupedExpertsFit(Spec):
    """One family of grouped GEMM kernels. Times in seconds; fractions of the declared peaks."""

    form: Literal["grouped_experts"] = "grouped_experts"
    tile_rule: tuple[TileStep, ...] = ()  # of kernels with a default configuration; empty: the fastest tile
    rule_counts: Literal["tokens", "tokens_per_expert"] = "tokens"  # what `most_rows` of the rule limits
    moves_all_slots: bool = False
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
    misaligned: float = Field(default=1.0, ge=1.0, le=3.0)  # slow-down of the GEMMs where 16 does not divide f
    residuals: Residuals = Residuals()


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Many calls of one number format (or one, as arrays of length 1).

    tokens:        of all ranks that share out the experts; local_experts of num_experts are on this one
    width, inner:  d and f
    distinct, assignments, tiles: the load of this rank; tiles has a column per TILE_ROWS
    row_bytes:     activation bytes per assignment; sum_bytes: of the final sum, all tokens
    """

    tokens: Values
    top_k: Values
    num_experts: Values
    local_experts: Values
    width: Values
    inner: Values
    gates: Values
    distinct: Values
    assignments: Values
    tiles: Values
    row_bytes: Values
    sum_bytes: Values
    rate: str
    weight_bytes: float
    input_bytes: float

    def take(self, rows: NDArray[Any] | slice) -> "ExpertSizes":
        """The calls of an index array, a mask or a slice."""
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return replace(self, **columns)


_COLUMNS = tuple(each.name for each in fields(ExpertSizes) if each.name not in ("rate", "weight_bytes", "input_bytes"))


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """Seconds in all, and of the resources alone."""

    duration: Values
    compute: Values
    memory: Values


def expert_seconds(sizes: ExpertSizes, fit: GroupedExpertsFit, device: DeviceFacts) -> ExpertParts:
    """The formula of this module."""
    if len(sizes.tokens) <= _ROWS_AT_ONCE:
        return _parts(sizes, fit, device)
    starts = range(0, len(sizes.tokens), _ROWS_AT_ONCE)
    pieces = [_parts(sizes.take(slice(start, start + _ROWS_AT_ONCE)), fit, device) for start in starts]
    names = ("duration", "compute", "memory")
    return ExpertParts(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in names))


def _parts(sizes: ExpertSizes, fit: GroupedExpertsFit, device: DeviceFacts) -> ExpertParts:
    rows, columns = np.array(tuple((s.rows, s.columns) for s in fit.tile_rule) or _TILES, dtype=np.float64).T
    peak_per_unit = device.peak(sizes.rate) / device.compute_units
    step = k_step_s(
        rows, columns, peak_per_unit, fit.compute_fraction, fit.feed_edge, sizes.input_bytes, sizes.weight_bytes
    )
    fill = fit.tile_s * np.sqrt(rows * columns) / _TILE_EDGE
    row_tiles = sizes.tiles[:, np.searchsorted(TILE_ROWS, rows)] / device.compute_units
    allowed = _allowed(sizes, fit)
    slow = np.where(sizes.inner % _ALIGNMENT, fit.misaligned, 1.0) if fit.misaligned > 1 else 1.0
    read = sizes.distinct * sizes.width * sizes.inner * (sizes.weight_bytes / (device.bandwidth * fit.memory_fraction))

    gemms = compute = np.zeros(len(sizes.tokens))
    up, down = (sizes.gates * sizes.inner, sizes.width), (sizes.width, sizes.inner)
    for (n, k), share in ((up, sizes.gates), (down, 1.0)):
        blocks = row_tiles * np.ceil(n[:, None] / columns)
        by_tile = waves(blocks, fit.wave_quantization) * (k[:, None] * step + fill)
        if allowed is not None:
            by_tile = np.where(allowed, by_tile, _NEVER_S)
        busy = by_tile.min(axis=1)
        compute = compute + busy
        gemms = gemms + knee_of(busy, read * share, fit.knee)
    slots = sizes.tokens * sizes.top_k if fit.moves_all_slots else sizes.assignments
    moved = (np.maximum(slots, sizes.assignments) * sizes.row_bytes + sizes.sum_bytes) * (fit.passes / device.bandwidth)
    duration = fit.launch_s + fit.expert_s * sizes.num_experts + slow * gemms + moved
    return ExpertParts(duration, slow * compute, read * (sizes.gates + 1.0) + moved)


def _allowed(sizes: ExpertSizes, fit: GroupedExpertsFit) -> NDArray[np.bool_] | None:
    if not fit.tile_rule:
        return None
    counted = sizes.tokens / sizes.local_experts if fit.rule_counts == "tokens_per_expert" else sizes.tokens
    return tile_allowed(fit.tile_rule, counted)


def time_experts(work: Work, fit: GroupedExpertsFit, device: DeviceFacts) -> OperatorTime:
    """How long one run of `work` takes."""
    if not work.num_kernels or not work.flops:
        return OperatorTime(0.0, 0.0, 0.0, 0.0, 0.0, "overhead")
    parts = _parts(_sizes(work), fit, device)
    duration, compute, memory = float(parts.duration[0]), float(parts.compute[0]), float(parts.memory[0])
    overhead = max(0.0, duration - max(compute, memory))
    return OperatorTime(duration, compute, memory, 0.0, overhead, bound_of(compute, memory, 0.0, overhead))


def _sizes(work: Work) -> ExpertSizes:
    extent = work.extent
    names = ("tokens", "top_k", "experts", "local_experts", "hidden", "intermediate", "gates", "distinct_experts")
    values = np.array([extent[name] for name in names], dtype=np.float64)[:, None]
    assignments = extent["assignments"]
    known = extent.get(f"tiles_{TILE_ROWS[0]}") is not None
    # Without tile counts: the same number of rows for each expert.
    each = assignments / max(extent["distinct_experts"], 1e-9)
    tiles = [
        extent[f"tiles_{rows}"] if known else extent["distinct_experts"] * max(1.0, np.ceil(each / rows))
        for rows in TILE_ROWS
    ]
    sum_bytes = extent["sum_bytes"]
    row_bytes = (work.activation_bytes - sum_bytes) / max(assignments, 1e-9)
    tokens, top_k, experts, local, width, inner, gates, distinct = values
    return ExpertSizes(
        tokens=tokens,
        top_k=top_k,
        num_experts=experts,
        local_experts=local,
        width=width,
        inner=inner,
        gates=gates,
        distinct=distinct,
        assignments=np.array([assignments]),
        tiles=np.array([tiles]),
        row_bytes=np.array([row_bytes]),
        sum_bytes=np.array([sum_bytes]),
        rate=work.rate,
        weight_bytes=extent["weight_bytes"],
        input_bytes=extent["input_bytes"],
    )

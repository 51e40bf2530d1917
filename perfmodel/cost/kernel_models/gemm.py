"""Tiled GEMM: the library picks the fastest tile and k split.

    t = launch + min over tiles (tm, tn) and splits s of
                 knee( waves(tiles / SM) (K/s step + tile tm tn / 128**2),  bytes / (memory_fraction W) )
                 + [s > 1] (split + 4 s M N bytes of partial sums / (memory_fraction W))
        [+ 3 M K bytes / (quantize_fraction W) + quantize_row M / SM, if a kernel quantizes the input first]

    tiles = G ceil(M / tm) ceil(N / tn) s thread blocks on SM compute units; `waves`, `k_step_s`: see `tiles`
    G       equal multiplications in one launch (1, but for the small one per head of latent attention)

W is the declared bandwidth. Kernels without a choice name their tiles (`tile_rule`). The formula misses the library's
own heuristics, which now and then pick a tile 1.5 times slower; two engines that call the same library differ by 4 %
(median).
Source of the form: wave quantization as in NVIDIA's "Matrix Multiplication Background" guide; parameters are fitted to
the GEMM tables of ai-dynamo/aiconfigurator (Apache-2.0)."""

from math import ceil, inf
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from perfmodel.cost.kernel_models.device import CACHED_SHARE, DeviceFacts, OperatorTime
from perfmodel.cost.kernel_models.fits import KernelSeconds, Residuals, joined, take
from perfmodel.files.base import Spec
from perfmodel.files.units import NonNegativeInt
from perfmodel.ops.formats import SPARSE_RATE
from perfmodel.ops.problem_sizes import GemmSize
from perfmodel.ops.work import Work

Values = NDArray[np.float64]
# Tiles that cuBLAS and CUTLASS ship for tensor cores, and the k splits they are launched with.
_TILES = ((16, 64), (16, 128), (32, 64), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_LARGE_TILE_ROWS = 128  # from here on a tile splits k at most _LARGE_TILE_SPLITS ways
_LARGE_TILE_SPLITS = 4
_MIN_SPLIT_K = 128
_TILE_AREA = 128 * 128
_K_STEP = 32  # k is padded to whole steps of the main loop
_NEVER_S = 1e9
_CUDA_CORES = "fp32"  # the rate of what is not multiplied by tensor cores
_ROWS_AT_ONCE = 4096
_MAX_PLANS = 4096
_COPIES = 6.0  # of the weights that the collectors of the tables cycle through


class TileStep(NamedTuple):
    """One line of a tile rule: problems of up to `most_rows` rows (0: any) use tiles of `rows` x `columns`."""

    most_rows: float
    rows: int
    columns: int


def k_step_s(
    rows: Values,
    columns: Values,
    peak_per_unit: float,
    compute_fraction: float,
    feed_edge: float,
    input_bytes: float,
    weight_bytes: float,
    speedup: float = 1.0,
    latency_s: float = 0.0,
) -> Values:
    """Seconds of one thread block per element of k: multiplying, or loading operands.

        max( latency, 2 tm tn / P1 * max( 1 / (c u), e (tm a + tn w) / (tm tn max(a, w)) ) )

    with P1 (`peak_per_unit`) the FLOP/s of one compute unit, c `compute_fraction`, a `input_bytes` and w `weight_bytes`
    per element, tm `rows` and tn `columns` of the tile. e (`feed_edge`) is the edge, in elements, of the square tile
    whose operands take as long to load as to multiply at peak; equal on Ampere and Hopper, which doubled both rates
    (bytes per clock do not carry over). u is the `speedup` of sparse tensor cores, which skip products but load all
    inputs. A pipeline of few stages waits `latency_s` (latency) for its loads, however small the tile."""
    tile = rows * columns
    feed = feed_edge * (rows * input_bytes + columns * weight_bytes) / (tile * max(input_bytes, weight_bytes))
    busy: Values = 2.0 * tile / peak_per_unit * np.maximum(1.0 / (compute_fraction * speedup), feed)
    return np.maximum(busy, latency_s)


def waves(blocks_per_unit: Values, quantization: float) -> Values:
    """Fills of the device: between max(1, r) (persistent kernels balance) and ceil(r) (whole waves)."""
    filled = np.maximum(blocks_per_unit, 1.0)
    partial = np.ceil(blocks_per_unit)
    partial -= filled
    partial *= quantization
    filled += partial
    return filled


def knee_of(a: Any, b: Any, p: float) -> Values:
    """(a**p + b**p) ** (1/p), element by element, without overflow; a or b positive."""
    high = np.maximum(a, b)
    ratio: Values = np.minimum(a, b)
    ratio /= high
    ratio **= p
    ratio += 1.0
    ratio **= 1.0 / p
    ratio *= high
    return ratio


def tile_allowed(rule: tuple[TileStep, ...], rows: Values) -> NDArray[np.bool_]:
    """(problems, lines of the rule): which line applies to each problem."""
    ends = np.array([step.most_rows or np.inf for step in rule])
    line = np.searchsorted(ends, rows)
    allowed: NDArray[np.bool_] = line[:, None] == np.arange(len(rule))
    return allowed


class TiledGemmFit(Spec):
    """One family of GEMM kernels. Times in seconds; fractions of the declared peaks."""

    form: Literal["tiled_gemm"] = "tiled_gemm"
    tile_rule: tuple[TileStep, ...] = ()  # by M, without k splits; empty: the fastest of all tiles and splits
    least_rows: NonNegativeInt = 0  # of a tile, where the fastest counts
    launch_s: float = Field(default=2e-6, ge=3e-7, le=6e-5)  # launches, epilogue; several kernels where it quantizes
    compute_fraction: float = Field(default=0.85, ge=0.3, le=1.0)  # of the tensor peak, in the main loop
    memory_fraction: float = Field(default=0.82, ge=0.3, le=1.0)
    feed_edge: float = Field(default=50.0, ge=5.0, le=300.0)  # elements; larger where weights are dequantized
    step_latency_s: float = Field(default=1e-11, ge=1e-11, le=1e-8)  # of an element of k, however small the tile
    split_s: float = Field(default=2.2e-6, ge=3e-7, le=3e-5)  # one more pass over the output, with its launch
    knee: float = Field(default=2.2, ge=1.0, le=20.0)  # how well loads hide behind multiplications
    tile_s: float = Field(default=1e-6, ge=1e-8, le=8e-6)  # fill of the pipeline, write of the output: of 128 x 128
    wave_quantization: float = Field(default=0.1, ge=1e-3, le=1.0)  # 1: a last, partial wave costs a whole one
    quantize_fraction: float = Field(default=0.5, ge=0.05, le=1.0)  # of the bandwidth, by the quantizing kernel
    quantize_row_s: float = Field(default=2e-9, ge=1e-11, le=1e-6)  # of one row on one unit, beside its bytes
    # Of kernels measured launched one by one: instead of `launch_s`, and the host's time, below which no measurement
    # falls; both times `eager_on_own_host` where the host's CPU is the GPU maker's. Serving replays CUDA graphs and has
    # neither.
    eager_launch_s: float | None = Field(default=None, ge=1e-6, le=1e-4)
    eager_floor_s: float | None = Field(default=None, ge=1e-6, le=1e-3)
    eager_on_own_host: float = Field(default=1.0, ge=0.3, le=4.0)
    cache_speedup: float = Field(default=1.0, ge=1.0, le=8.0)  # of operands that a benchmark finds in L2
    residuals: Residuals = Residuals()


class GemmSizes(NamedTuple):
    """Many multiplications of one number format and batch, as columns. moved_bytes: of the multiplications themselves:
    weights, input, output (and bias); rate: the peak rate that multiplies"""

    problem: GemmSize
    moved_bytes: Values
    rate: str


class _Plan(NamedTuple):
    """What does not depend on m, for each (problem, split, tile). tile_rows: tm; columns: thread blocks per row of
    tiles and compute unit; block_s: per thread block, huge where the split is not offered; partial_s_per_row: (problem,
    split), writing and reading partial sums"""

    tile_rows: Values
    columns: Values
    block_s: Values
    split_s: Values
    partial_s_per_row: Values
    bandwidth: float


def _plan(sizes: GemmSizes, fit: TiledGemmFit, device: DeviceFacts) -> _Plan:
    tiles = tuple((step.rows, step.columns) for step in fit.tile_rule)
    least_rows = 0 if sizes.rate == _CUDA_CORES else fit.least_rows
    tiles = tiles or tuple(tile for tile in _TILES if tile[0] >= least_rows)
    rows, columns = np.array(tiles, dtype=np.float64).T
    splits = np.array((1,) if fit.tile_rule else _SPLITS, dtype=np.float64)
    problem = sizes.problem
    n, k, s = problem.n[:, None, None], problem.k[:, None, None], splits[:, None]
    dense = device.peak(sizes.rate.removesuffix(SPARSE_RATE))
    speedup, per_element = device.peak(sizes.rate) / dense, (problem.input_bytes, problem.weight_bytes)
    per_unit = dense / device.compute_units
    # Fits are of tensor cores, fed at equal bytes per second but that much faster at products; an fp32 element has
    # twice the bytes.
    slower = 2.0 * device.peak(_CUDA_CORES) / device.peak("bf16") if sizes.rate == _CUDA_CORES else 1.0
    edge = fit.feed_edge * slower
    step = k_step_s(rows, columns, per_unit, fit.compute_fraction, edge, *per_element, speedup, fit.step_latency_s)
    offered = (s == 1) | ((k >= s * _MIN_SPLIT_K) & ((rows < _LARGE_TILE_ROWS) | (s <= _LARGE_TILE_SPLITS)))
    block = np.ceil(k / (s * _K_STEP)) * (_K_STEP * step) + fit.tile_s * (rows * columns / _TILE_AREA)
    bandwidth = device.bandwidth * fit.memory_fraction
    is_split = splits > 1
    return _Plan(
        tile_rows=rows,
        columns=np.ceil(n / columns) * (s * problem.batch / device.compute_units),
        block_s=np.where(offered, block, _NEVER_S),
        split_s=np.where(is_split, fit.split_s, 0.0),
        partial_s_per_row=is_split * splits * (4.0 * problem.batch / bandwidth) * problem.n[:, None],
        bandwidth=bandwidth,
    )


def _compute_s(m: Values, plan: _Plan, fit: TiledGemmFit) -> Values:
    """(problem, split): seconds of the fastest tile, operands at hand."""
    blocks = np.ceil(m[:, None] / plan.tile_rows)[:, None, :] * plan.columns
    by_tile = waves(blocks, fit.wave_quantization) * plan.block_s
    if fit.tile_rule:
        by_tile = np.where(tile_allowed(fit.tile_rule, m)[:, None, :], by_tile, _NEVER_S)
    fastest: Values = by_tile.min(axis=2)
    return fastest


def _parts(
    sizes: GemmSizes, plan: _Plan, fit: TiledGemmFit, device: DeviceFacts, is_warm: bool = False
) -> KernelSeconds:
    problem = sizes.problem
    m, compute = problem.m[:, None], _compute_s(problem.m, plan, fit)
    moved_bytes = _past_the_cache(sizes, fit, device) if is_warm else sizes.moved_bytes
    memory = moved_bytes / plan.bandwidth
    total = knee_of(compute, memory[:, None], fit.knee) + (plan.split_s + m * plan.partial_s_per_row)
    item, best = np.arange(len(total)), total.argmin(axis=1)
    duration = total[item, best] + fit.launch_s
    if problem.quantized_bytes.any():
        quantize = problem.quantized_bytes / (device.bandwidth * fit.quantize_fraction)
        quantize = quantize + (problem.quantized_bytes > 0) * problem.m * (fit.quantize_row_s / device.compute_units)
        duration, memory = duration + quantize, memory + quantize
    return KernelSeconds(duration, compute[item, best], memory)


def _past_the_cache(sizes: GemmSizes, fit: TiledGemmFit, device: DeviceFacts) -> Values:
    """Bytes as if from HBM where a benchmark repeats a product with the same input and `_COPIES` weights in turn: what
    fits L2 is read faster from there."""
    weights = sizes.problem.n * sizes.problem.k * sizes.problem.weight_bytes
    others: Values = sizes.moved_bytes - weights
    left = 1.0 - 1.0 / fit.cache_speedup
    hits = weights * cached_share(_COPIES * weights, device) + others * cached_share(others, device)
    result: Values = sizes.moved_bytes - left * hits
    return result


def cached_share(num_bytes: Values, device: DeviceFacts) -> Values:
    """The share of `num_bytes` that a repeated benchmark finds in L2: all up to `CACHED_SHARE` of it, none from twice
    that."""
    return np.clip(2.0 - num_bytes / (CACHED_SHARE * device.l2_bytes), 0.0, 1.0)


def gemm_seconds(sizes: GemmSizes, fit: TiledGemmFit, device: DeviceFacts, *, as_timed: bool = False) -> KernelSeconds:
    """The formula of this module. `as_timed`: as tables time kernels: launched one by one, if the fit knows the cost,
    and operands from L2 if they fit. sizes: columns; fit: parameters of the kernel; device: that runs it"""
    pieces = []
    for start in range(0, max(1, len(sizes.problem.m)), _ROWS_AT_ONCE):
        some = take(sizes, slice(start, start + _ROWS_AT_ONCE))
        pieces.append(_parts(some, _plan(some, fit, device), fit, device, as_timed and fit.cache_speedup > 1.0))
    parts = joined(pieces)
    if not as_timed or fit.eager_floor_s is None or fit.eager_launch_s is None:
        return parts
    slower = fit.eager_on_own_host if device.has_own_host else 1.0
    duration = parts.duration + (fit.eager_launch_s * slower - fit.launch_s)
    return parts._replace(duration=np.maximum(duration, fit.eager_floor_s * slower))


def _knee(a: float, b: float, p: float) -> float:
    """`knee_of` two numbers, equal to the last bit: numpy's powers are not those of Python on every CPU."""
    high, low = max(a, b), min(a, b)
    return float(np.power(np.power(low / high, p) + 1.0, 1.0 / p)) * high


# (fit, device, sizes) -> plan, keyed by identity, which the entry's own references keep from being reused; and the
# splits worth trying, (compute_s, split_s, partial_s_per_row), by the tiles in a column of them.
_plans: dict[tuple[Any, ...], tuple[TiledGemmFit, DeviceFacts, _Plan, dict[float, list[tuple[float, ...]]]]] = {}


def time_gemm(work: Work, fit: TiledGemmFit, device: DeviceFacts) -> OperatorTime:
    """The time of one run of `work` in a CUDA graph: as of `gemm_seconds`, in plain numbers."""
    problem = work.problem_as(GemmSize)
    m, n, k, weight_bytes, input_bytes, quantized_bytes, batch = problem
    key = (id(fit), id(device), n, k, batch, work.rate, weight_bytes, input_bytes)
    entry = _plans.get(key)
    if entry is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        column = np.array([[n], [k]], dtype=np.float64)
        sizes = GemmSizes(problem._replace(n=column[0], k=column[1]), column[0], work.rate)
        entry = _plans[key] = (fit, device, _plan(sizes, fit, device), {})
    plan, known = entry[2:]
    rows = m if fit.tile_rule else ceil(m / _TILES[0][0])  # tiles have whole multiples of the first one's rows
    choices = known.get(rows)
    if choices is None:
        choices = known[rows] = []
        by_split = _compute_s(np.array([m], dtype=np.float64), plan, fit)[0], plan.split_s, plan.partial_s_per_row[0]
        for choice in zip(*map(np.ndarray.tolist, by_split), strict=True):
            if not choices or choice[0] < choices[-1][0]:  # else a coarser split is never slower
                choices.append(choice)
    memory = (work.weight_bytes + work.activation_bytes - quantized_bytes) / plan.bandwidth
    fastest, compute = inf, inf
    for compute_s, split_s, partial_s_per_row in choices:
        total = _knee(compute_s, memory, fit.knee) + (split_s + m * partial_s_per_row)
        if total < fastest:
            fastest, compute = total, compute_s
    duration = fastest + fit.launch_s
    if quantized_bytes:
        quantize = quantized_bytes / (device.bandwidth * fit.quantize_fraction)
        quantize += m * (fit.quantize_row_s / device.compute_units)
        duration, memory = duration + quantize, memory + quantize
    return OperatorTime.of(duration, compute, memory)

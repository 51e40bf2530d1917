"""GEMM with block-quantized weights: one kernel for few rows, another for many.

    few rows   knee_v( bytes / (memory_fraction B), weights c (1 + s (rows - 1)) / (units clock) )
    many rows  knee_m( FLOPs / (compute_fraction peak) (1 + tile units / outputs + half_rows / rows),
                       bytes / (memory_fraction B) )
    t = launch_s * kernels + the quicker of the two

c (`weight_cycles`) is the clocks of one compute unit to read, dequantize and multiply a weight with one row; each
further row takes the share s of it. Devices with high bandwidth per unit are bound by it: an A100 reads Q4_K at half of
its bandwidth, an L4 at nine tenths. The kernel for many rows computes tiles: few tiles leave units idle (`tile`:
outputs per unit at which half are), few rows leave tiles partly empty. knee(a, b) = (a**p + b**p) ** (1/p).

Engines compute a batch in pieces of up to `micro_batch` tokens, each of which reads the weights again.
Source: the kernels mul_mat_vec_q, mul_mat_q of ggml-cuda, kernel_mul_mv and kernel_mul_mm of ggml-metal.
"""

from typing import Any, Literal, NamedTuple

from pydantic import Field

from perfmodel.cost.kernel_models.device import DeviceFacts, OperatorTime, bound_of
from perfmodel.cost.kernel_models.fits import SCALARS, KernelSeconds, Namespace, Residuals
from perfmodel.files.base import Spec
from perfmodel.files.units import FittedSeconds, NonNegativeInt
from perfmodel.ops.problem_sizes import ExpertsSize, GemmSize, Values
from perfmodel.ops.work import Work


class BlockMatmulFit(Spec):
    """How a backend multiplies weights of one format on one device; see the module.

    rate: the peak that products run at, a key of `peak_flops_per_s`, whatever the weights' format
    """

    form: Literal["block_matmul"] = "block_matmul"
    rate: str
    launch_s: FittedSeconds
    memory_fraction: float = Field(gt=0, le=1)
    weight_cycles: float = Field(gt=0)
    row_share: float = Field(default=0.3, ge=0)
    vector_knee: float = Field(default=3.0, ge=1)
    compute_fraction: float = Field(gt=0)
    tile: float = Field(gt=0)
    half_rows: float = Field(gt=0)
    knee: float = Field(default=1.5, ge=1)
    micro_batch: NonNegativeInt = 0
    residuals: Residuals = Residuals()


class BlockSizes(NamedTuple):
    """What is multiplied.

    flops, num_bytes, kernels: of all matrices together; num_bytes: of weights and activations
    weights: their number; rows: that each matrix is multiplied with; outputs: elements of all products
    """

    flops: Values
    num_bytes: Values
    kernels: Values
    weights: Values
    rows: Values
    outputs: Values


class MatmulRates(NamedTuple):
    """A fit on a device, in the formula's units: seconds per launch, bytes and FLOPs per second."""

    launch_s: Values
    bandwidth: Values
    unit_clocks: Values  # of all units, per second
    units: Values
    flops_per_s: Values
    weight_cycles: Values
    row_share: Values
    vector_knee: Values
    tile: Values
    half_rows: Values
    knee: Values


def matmul_seconds(sizes: BlockSizes, rates: MatmulRates, xp: Namespace | Any = SCALARS) -> KernelSeconds:
    """The formula of the module for one micro-batch. sizes, rates: numbers or columns; xp: numpy for columns"""
    memory = sizes.num_bytes / rates.bandwidth
    unpacked = sizes.weights * rates.weight_cycles * (1.0 + rates.row_share * (sizes.rows - 1.0)) / rates.unit_clocks
    filled = 1.0 + rates.tile * rates.units / sizes.outputs + rates.half_rows / sizes.rows
    multiplied = sizes.flops / rates.flops_per_s * filled
    few = _knee(unpacked, memory, rates.vector_knee, xp)
    many = _knee(multiplied, memory, rates.knee, xp)
    is_few = few <= many
    compute = xp.where(is_few, unpacked, multiplied)
    return KernelSeconds(rates.launch_s * sizes.kernels + xp.where(is_few, few, many), compute, memory)


def _knee(a: Values, b: Values, power: Values, xp: Any) -> Values:
    high = xp.maximum(a, b)
    return high * (1.0 + (xp.minimum(a, b) / high) ** power) ** (1.0 / power)


def block_sizes(work: Work) -> BlockSizes:
    """Sizes of a GEMM or of a layer's experts. Raises SpecError for a work of another family."""
    num_bytes = work.weight_bytes + work.activation_bytes
    if isinstance(work.problem, ExpertsSize):
        experts = work.problem
        columns = experts.gates * experts.inner
        weights = experts.distinct * (columns + experts.inner) * experts.width
        rows = max(1.0, experts.assignments / experts.distinct)
        return BlockSizes(work.flops, num_bytes, work.num_kernels, weights, rows, experts.assignments * columns)
    problem = work.problem_as(GemmSize)
    weights, outputs = problem.n * problem.k * problem.batch, problem.m * problem.n * problem.batch
    return BlockSizes(work.flops, num_bytes, work.num_kernels, weights, problem.m, outputs)


def _rates(fit: BlockMatmulFit, device: DeviceFacts) -> MatmulRates:
    return MatmulRates(
        fit.launch_s,
        fit.memory_fraction * device.bandwidth,
        device.compute_units * device.clock_hz,
        device.compute_units,
        fit.compute_fraction * device.peak(fit.rate),
        fit.weight_cycles,
        fit.row_share,
        fit.vector_knee,
        fit.tile,
        fit.half_rows,
        fit.knee,
    )


def pieces(tokens: float, micro_batch: int) -> list[tuple[int, float]]:
    """(count, tokens) of the micro-batches of a batch."""
    if not micro_batch or tokens <= micro_batch:
        return [(1, tokens)]
    whole, rest = divmod(tokens, micro_batch)
    return [(int(whole), float(micro_batch)), *([(1, rest)] if rest else [])]


def piece_of(sizes: BlockSizes, weight_bytes: float, share: float) -> BlockSizes:
    """A share of the rows, with all weights read."""
    if share == 1.0:
        return sizes
    num_bytes = weight_bytes + share * (sizes.num_bytes - weight_bytes)
    rows = max(1.0, share * sizes.rows)
    return sizes._replace(flops=share * sizes.flops, num_bytes=num_bytes, rows=rows, outputs=share * sizes.outputs)


def block_matmul_time(work: Work, fit: BlockMatmulFit, device: DeviceFacts) -> OperatorTime:
    if not work.num_kernels:
        return OperatorTime(0.0, 0.0, 0.0, 0.0, 0.0, "overhead")
    sizes, rates = block_sizes(work), _rates(fit, device)
    tokens = float(work.problem.tokens if isinstance(work.problem, ExpertsSize) else sizes.rows)
    duration = compute = memory = launched = 0.0
    for count, size in pieces(tokens, fit.micro_batch):
        parts = matmul_seconds(piece_of(sizes, work.weight_bytes, size / tokens), rates)
        duration += count * float(parts.duration)
        compute += count * float(parts.compute)
        memory += count * float(parts.memory)
        launched += count * fit.launch_s * work.num_kernels
    return OperatorTime(duration, compute, memory, 0.0, launched, bound_of(compute, memory, 0.0, launched))

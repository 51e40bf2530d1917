"""Kernels of single-machine engines on block-quantized weights (GGUF, MLX), for any backend.

GEMM: one kernel for few rows, another for many.

    few rows   knee_v( bytes / (memory_fraction B), weights c (1 + s (rows - 1)) / (units clock) )
    many rows  knee_m( FLOPs / (compute_fraction peak) (1 + tile units / outputs + half_rows / rows),
                       bytes / (memory_fraction B) )
    t = launch_s * kernels + the quicker of the two

c (`weight_cycles`) is the clocks of one compute unit to read, dequantize and multiply a weight with one row; each
further row takes the share s of it. Devices with high bandwidth per unit are bound by it: an A100 reads Q4_K at half of
its bandwidth, an L4 at nine tenths. The kernel for many rows computes tiles: few tiles leave units idle (`tile`:
outputs per unit at which half are), few rows leave tiles partly empty. knee(a, b) = (a**p + b**p) ** (1/p).

Other kernels (attention over a cache, norms, activations, elementwise operators):

    t = launch_s * kernels + FLOPs / (compute_fraction peak) + bytes / (memory_fraction B) + KV bytes / (kv_fraction B)

Engines compute a batch in pieces of up to `micro_batch` tokens, each with its own launches and reads of the weights.

CPU-offloaded layers: the CPU computes small steps, the device large ones. In steps of `from_tokens` tokens or more the
device multiplies weights, read over its link once per micro-batch. Operators without weights (attention over the
host's KV) stay on the CPU.
Source: the kernels mul_mat_vec_q, mul_mat_q of ggml-cuda, kernel_mul_mv and kernel_mul_mm of ggml-metal; llama.cpp's
--op-offload (ggml_backend_cuda_device_offload_op: batches of 32 and more)."""

from math import ceil
from typing import Any, Literal, NamedTuple

from pydantic import Field

from perfmodel.cost.kernel_models.device import DeviceFacts, OperatorTime
from perfmodel.cost.kernel_models.fits import SCALARS, KernelSeconds, Namespace, Residuals
from perfmodel.files.base import Spec
from perfmodel.files.units import FittedSeconds, NonNegativeInt, PositiveFloat
from perfmodel.ops.problem_sizes import ExpertsSize, GemmSize, PrefillSize, Values
from perfmodel.ops.work import Work
from perfmodel.specs.hardware import HardwareSpec


class BlockMatmulFit(Spec):
    """How a backend multiplies weights of one format on one device; see the module.

    rate: the peak that products run at, a key of `peak_flops_per_s`, whatever the weights' format"""

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
    """What is multiplied, or of other kernels FLOPs, bytes and launches; numbers or columns. flops, num_bytes, kernels:
    of all matrices together; num_bytes: of weights and activations; weights: their number; rows: that each matrix is
    multiplied with; outputs: elements of all products"""

    flops: Values
    num_bytes: Values
    kernels: Values
    weights: Values = 0.0
    rows: Values = 1.0
    outputs: Values = 1.0


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


def _rows(work: Work) -> float:
    """Tokens multiplied with weights; 0 without weights."""
    if isinstance(work.problem, ExpertsSize):
        return float(work.problem.tokens)
    return float(work.problem.m) if isinstance(work.problem, GemmSize) else 0.0


def block_matmul_time(work: Work, fit: BlockMatmulFit, device: DeviceFacts) -> OperatorTime:
    sizes, tokens = block_sizes(work), _rows(work)
    rates = MatmulRates(
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
    duration = compute = memory = launched = 0.0
    for count, size in pieces(tokens, fit.micro_batch):
        parts = matmul_seconds(piece_of(sizes, work.weight_bytes, size / tokens), rates)
        duration += count * float(parts.duration)
        compute += count * float(parts.compute)
        memory += count * float(parts.memory)
        launched += count * fit.launch_s * work.num_kernels
    return OperatorTime.of(duration, compute, memory, launched)


class BlockStreamFit(Spec):
    """How a backend runs such a kernel on one device; see the module. rate: a key of `peak_flops_per_s`"""

    form: Literal["block_stream"] = "block_stream"
    rate: str = "vector"
    launch_s: FittedSeconds
    memory_fraction: float = Field(gt=0, le=1)
    kv_fraction: float = Field(default=1.0, gt=0, le=1)
    compute_fraction: float = Field(default=1.0, gt=0)
    micro_batch: int = Field(default=0, ge=0)
    residuals: Residuals = Residuals()


class StreamRates(NamedTuple):
    """A fit on a device, in the formula's units; numbers or columns."""

    launch_s: Values
    flops_per_s: Values
    bandwidth: Values
    kv_bandwidth: Values


def stream_seconds(sizes: BlockSizes, kv_bytes: Values, rates: StreamRates) -> Values:
    moved = sizes.num_bytes / rates.bandwidth + kv_bytes / rates.kv_bandwidth
    return rates.launch_s * sizes.kernels + sizes.flops / rates.flops_per_s + moved


def block_stream_time(work: Work, fit: BlockStreamFit, device: DeviceFacts) -> OperatorTime:
    tokens = work.problem.tokens if isinstance(work.problem, PrefillSize) else 0.0
    launches = work.num_kernels * (ceil(tokens / fit.micro_batch) if fit.micro_batch and tokens else 1)
    rates = StreamRates(
        fit.launch_s,
        fit.compute_fraction * device.peak(fit.rate),
        fit.memory_fraction * device.bandwidth,
        fit.kv_fraction * device.bandwidth,
    )
    sizes = BlockSizes(work.flops, work.weight_bytes + work.activation_bytes, launches)
    compute, overhead = work.flops / rates.flops_per_s, fit.launch_s * launches
    duration = float(stream_seconds(sizes, work.kv_bytes, rates))
    return OperatorTime.of(duration, compute, duration - compute - overhead, overhead)


class OnHostFit(Spec):
    """What times an operator of such a layer.

    host: the CPU; on_cpu, on_device: fits of the operator there
    link_bytes_per_s: of the device to the host's memory; from_tokens: 0: the device never computes it"""

    form: Literal["on_host"] = "on_host"
    host: HardwareSpec
    on_cpu: BlockMatmulFit | BlockStreamFit
    on_device: BlockMatmulFit | BlockStreamFit
    link_bytes_per_s: PositiveFloat
    from_tokens: NonNegativeInt
    residuals: Residuals = Residuals()


def on_host_time(work: Work, fit: OnHostFit, device: DeviceFacts) -> OperatorTime:
    tokens = _rows(work)
    if not (fit.from_tokens and tokens >= fit.from_tokens and isinstance(fit.on_device, BlockMatmulFit)):
        cpu = DeviceFacts.of(fit.host)
        if isinstance(fit.on_cpu, BlockMatmulFit):
            return block_matmul_time(work, fit.on_cpu, cpu)
        return block_stream_time(work, fit.on_cpu, cpu)
    there = block_matmul_time(work, fit.on_device, device)
    copies = sum(count for count, _ in pieces(tokens, fit.on_device.micro_batch))
    copied = copies * work.weight_bytes / fit.link_bytes_per_s
    duration = there.duration_s + copied
    return there._replace(
        duration_s=duration, communication_s=copied, bound="communication" if copied > there.duration_s else there.bound
    )

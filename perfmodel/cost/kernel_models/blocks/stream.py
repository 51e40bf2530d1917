"""Other kernels of single-machine engines: attention over a cache, norms, activations, elementwise operators.

    t = launch_s * kernels + FLOPs / (compute_fraction peak) + bytes / (memory_fraction B) + KV bytes / (kv_fraction B)

Prompts are summed over micro-batches of up to `micro_batch` tokens, each with its own launches.
"""

from math import ceil
from typing import Literal, NamedTuple

from pydantic import Field

from perfmodel.cost.kernel_models.device import DeviceFacts, OperatorTime, bound_of
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.files.base import Spec
from perfmodel.files.units import FittedSeconds
from perfmodel.ops.problem_sizes import PrefillSize, Values
from perfmodel.ops.work import Work


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


class StreamSizes(NamedTuple):
    """FLOPs, bytes and launches of a kernel; numbers or columns."""

    flops: Values
    num_bytes: Values
    kv_bytes: Values
    kernels: Values


class StreamRates(NamedTuple):
    """A fit on a device, in the formula's units; numbers or columns."""

    launch_s: Values
    flops_per_s: Values
    bandwidth: Values
    kv_bandwidth: Values


def stream_seconds(sizes: StreamSizes, rates: StreamRates) -> Values:
    moved = sizes.num_bytes / rates.bandwidth + sizes.kv_bytes / rates.kv_bandwidth
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
    sizes = StreamSizes(work.flops, work.weight_bytes + work.activation_bytes, work.kv_bytes, launches)
    compute, overhead = work.flops / rates.flops_per_s, fit.launch_s * launches
    duration = float(stream_seconds(sizes, rates))
    memory = duration - compute - overhead
    return OperatorTime(duration, compute, memory, 0.0, overhead, bound_of(compute, memory, 0.0, overhead))

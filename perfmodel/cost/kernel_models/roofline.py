"""The roofline with overheads: the form of the datasheet, and of families without close measurements.

    t = overhead_s * kernels + overhead_per_item_s * items + knee(FLOPs / (compute_fraction * peak),
                                                                bytes / (memory_fraction * bandwidth))
    knee(a, b) = (a**p + b**p) ** (1/p);  p = None is the hard maximum of the roofline, p = 1 the sum

Items: sequences for attention, thread blocks for that to chosen keys, distinct experts. Vector operations (dequantized)
overlap with the products on other units, or, on a device that unpacks into memory first, add `vector_op_s` each. With
fewer thread blocks than compute units (`thread_blocks` of the problem) a kernel reaches only that share of tensor rate
and KV bandwidth. Activations that fit L2 may be read from there (`cached_speedup`), as the kernel before wrote them:
all up to 0.7 of its size, none from twice that."""

from typing import Literal

from pydantic import Field

from perfmodel.cost.kernel_models.device import CACHED_SHARE, DeviceFacts, OperatorTime, sustained_share
from perfmodel.cost.kernel_models.fits import Domain, Residuals
from perfmodel.cost.kernel_models.messages.links import alpha_beta_time, network_time
from perfmodel.files.base import Spec
from perfmodel.files.units import FittedSeconds
from perfmodel.ops.messages import Message
from perfmodel.ops.work import Work


class FamilyFit(Spec):
    """How well one operator family uses the hardware. Fractions are of the declared peaks, in (0, 1]."""

    form: Literal["roofline"] = "roofline"
    domain: Domain = Domain()
    compute_fraction: float = Field(default=1.0, gt=0, le=1)
    memory_fraction: float = Field(default=1.0, gt=0, le=1)
    overhead_s: FittedSeconds = 0.0  # per kernel
    overhead_per_item_s: FittedSeconds = 0.0
    vector_op_s: FittedSeconds = 0.0  # of each `vector_ops`, one after the other; 0: at the device's own rate
    knee: float | None = Field(default=None, ge=1)
    operation_j: float = Field(default=0.0, ge=0, le=1e-9)  # of one at the full clock (`sustained_share`); 0: no limit
    cached_speedup: float = Field(default=1.0, ge=1, le=8)  # of activations that still lie in L2 over main memory
    residuals: Residuals = Residuals()


def roofline_time(work: Work, fit: FamilyFit, device: DeviceFacts) -> OperatorTime:
    blocks: float = getattr(work.problem, "thread_blocks", 0.0)
    fill = min(1.0, blocks / device.compute_units) if blocks else 1.0  # the share of compute units with a block
    peak = device.peak(work.rate)
    rate = peak * sustained_share(device.tdp_w, peak, fit.operation_j) if fit.operation_j else peak
    compute = work.flops / (rate * fit.compute_fraction * fill)
    if work.vector_ops and fit.vector_op_s:
        compute += work.vector_ops * fit.vector_op_s
    elif work.vector_ops:
        compute = max(compute, work.vector_ops / (device.vector_instructions * fill))
    activation_bytes = work.activation_bytes
    if fit.cached_speedup > 1:
        hit = min(max(2.0 - activation_bytes / (CACHED_SHARE * device.l2_bytes), 0.0), 1.0)
        activation_bytes *= 1.0 - hit + hit / fit.cached_speedup
    num_bytes = work.weight_bytes + activation_bytes + work.kv_bytes / fill
    memory = num_bytes / (device.bandwidth * fit.memory_fraction)
    overhead = fit.overhead_s * work.num_kernels
    if fit.overhead_per_item_s:
        overhead += fit.overhead_per_item_s * getattr(work.problem, "num_items", 0.0)
    communication = 0.0
    if work.message is not None:
        communication = _message_s(work.message, fit, device)
    duration = overhead + communication + knee(compute, memory, fit.knee)
    return OperatorTime.of(duration, compute, memory, overhead, communication)


def _message_s(message: Message, fit: FamilyFit, device: DeviceFacts) -> float:
    spread = device.spread(message)
    if spread.num_nodes == 1:
        return alpha_beta_time(message, device.link, fit.memory_fraction)
    return network_time(message, spread, device.link, device.network, fit.memory_fraction)


def knee(compute: float, memory: float, p: float | None) -> float:
    """(a**p + b**p) ** (1/p), the smoothed maximum; the hard one for p = None."""
    if p is None or compute == 0.0 or memory == 0.0:
        return max(compute, memory)
    high, low = max(compute, memory), min(compute, memory)
    ratio: float = (1.0 + (low / high) ** p) ** (1.0 / p)
    return high * ratio

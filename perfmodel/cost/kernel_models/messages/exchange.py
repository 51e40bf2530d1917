"""The exchange of expert parallelism: tokens to the ranks of their experts (dispatch), and results back (combine).

    t = max( floor, start + wire / (fraction L) )        wire = S (k - 1) / k

S the bytes that a rank sends to all k, L the link's declared one-way bandwidth. Unlike NCCL's all-to-all, these kernels
write to (or read from) peer memory and wait for all peers, with a routing table to fill. Decode steps pay the floor,
three times a small NCCL message. Only where a switch joins the ranks; on other nodes the time is that of the all-to-all
in `beyond`, between nodes that of `exchange_between_nodes`.
The parameters are in `hardware_specs/calibrations/exchange.yaml`: those within a node from dispatch and combine on
GB200 NVL72, 8 to 64 ranks, 1 to 2,048 tokens of DeepSeek-V3's size, in NVIDIA's "Optimizing MoE Communication with
One-Sided AlltoAll Over NVLink" (TensorRT-LLM technical blog 18), of whose 48 figures each 80 % lie within -7 and +11 %
of this formula. What engines other than TensorRT-LLM have (DeepEP's low-latency kernels, FlashInfer's) is said there to
be no faster. The start between nodes from DeepEP's README: 40 us more than the bytes between nodes take.
"""

from typing import Literal

from pydantic import Field

from perfmodel.cost.kernel_models.device import DeviceFacts, OperatorTime
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.messages.collective import collective_time
from perfmodel.cost.kernel_models.messages.nccl import CollectiveFit, exchange_between_nodes
from perfmodel.files.base import Spec
from perfmodel.ops.work import Work


class ExchangeFit(Spec):
    """One direction. Times in seconds; fraction of the declared link bandwidth.

    between_nodes_s: the least start of an exchange that leaves a node
    """

    form: Literal["expert_exchange"] = "expert_exchange"
    floor_s: float = Field(ge=1e-6, le=1e-3)
    start_s: float = Field(ge=1e-7, le=1e-3)
    link_fraction: float = Field(ge=0.05, le=1.0)
    between_nodes_s: float = Field(default=0.0, ge=0, le=1e-3)
    beyond: CollectiveFit = CollectiveFit()
    residuals: Residuals = Residuals()


def exchange_time(work: Work, fit: ExchangeFit, device: DeviceFacts) -> OperatorTime:
    """The time of the exchange of `work`; latency counts as communication."""
    if work.message is None or not work.num_kernels:
        return OperatorTime(0.0, 0.0, 0.0, 0.0, 0.0, "overhead")
    ranks, link, spread = work.message.num_ranks, device.link, device.spread(work.message)
    if spread.num_nodes > 1:
        start_s = max(fit.start_s, fit.between_nodes_s)
        duration = exchange_between_nodes(work.message, spread, start_s, fit.link_fraction, device)
        return OperatorTime(duration, 0.0, 0.0, duration, 0.0, "communication")
    if not link.has_switch:
        return collective_time(work, fit.beyond, device)
    wire = work.message.bytes_ * (ranks - 1) / ranks
    duration = max(fit.floor_s, fit.start_s + wire / (fit.link_fraction * link.bandwidth_bytes_per_s))
    return OperatorTime(duration, 0.0, 0.0, duration, 0.0, "communication")

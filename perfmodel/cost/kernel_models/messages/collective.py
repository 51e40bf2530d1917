"""Collectives: NCCL's two protocols, and engines' custom all-reduce for small messages.

    NCCL    t = launch + hop steps + memory_touches S / W + min( min(wire / (first_channel L), ramp) + wire / (ll L),
                                                                 start + wire / (simple L) )
    custom  t = launch + peer (k - 1) + min( (k - 1) S / (one_shot L),  sync + 2 (k - 1) / k S / (two_shot L) )
            up to `most_bytes`, NCCL beyond; two ranks have no use for two shots

    steps = 2 (k - 1) for an all-reduce over k ranks, 1 for an all-to-all or a send, else k - 1
    wire  = 2 S (k - 1) / k for an all-reduce, S for a send, else S (k - 1) / k; a switch that adds (NVLS) takes
            S (1 + 1 / k) of large all-reduces in floating point between `switch_ranks` ranks and more

S is the payload as in nccl-tests, L the link's declared one-way bandwidth, W the memory's. The low-latency protocol
(LL, LL128) sends flags with the data over few channels first, then many; the simple one starts later and reaches the
link's rate. Each byte is touched a few times in local memory. Hops scale with the link's declared latency; PCIe has its
own hops and fractions, and others where cards lack peer access: `over_link`, from `kernel_models.overheads`.
Source: NCCL's tuning model (src/graph/tuning.cc); vLLM csrc/custom_all_reduce.cuh; TensorRT-LLM allReduceKernels.
"""

from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import Field

from perfmodel.cost.kernel_models.device import DeviceFacts, OperatorTime
from perfmodel.cost.kernel_models.fits import SCALARS, Residuals
from perfmodel.cost.kernel_models.messages.links import most_ranks_of_own_kernels
from perfmodel.cost.kernel_models.messages.nccl import (
    CollectiveFit,
    CollectiveParts,
    CollectiveSizes,
    collective_seconds,
    latency_ratio,
    nccl_between_nodes,
)
from perfmodel.cost.kernel_models.overheads import OverPcieFit, load_overheads
from perfmodel.files.base import Spec
from perfmodel.files.units import PositiveFloat, PositiveInt
from perfmodel.ops.messages import Message
from perfmodel.ops.work import Work
from perfmodel.specs.networks import Link

Fit = TypeVar("Fit")


_ANY_RANKS = 1 << 16


class CustomAllReduceFit(Spec):
    """An engine's own all-reduce for messages up to `most_bytes` between up to `most_ranks`, and NCCL's beyond.

    eager_floor_s: host time of launching eagerly, below which no measurement falls; serving replays CUDA graphs
    """

    form: Literal["custom_all_reduce"] = "custom_all_reduce"
    most_bytes: PositiveFloat = 8.3e6
    most_ranks: PositiveInt = _ANY_RANKS
    launch_s: float = Field(default=4e-6, ge=5e-7, le=5e-5)
    peer_s: float = Field(default=1e-7, ge=1e-9, le=5e-6)
    one_shot_fraction: float = Field(default=0.5, ge=0.05, le=1.0)
    two_shot_fraction: float = Field(default=0.6, ge=0.05, le=1.0)
    sync_s: float = Field(default=3e-6, ge=1e-8, le=2e-5)
    beyond: CollectiveFit = CollectiveFit()
    eager_floor_s: float | None = Field(default=None, ge=1e-6, le=1e-3)
    link_latency_s: PositiveFloat | None = None
    residuals: Residuals = Residuals()


def custom_seconds(
    sizes: CollectiveSizes, fit: CustomAllReduceFit, device: DeviceFacts, link: Link, xp: Any = np
) -> CollectiveParts:
    """The engine's kernels for small messages, NCCL for large ones.

    sizes: numbers or columns; fit: of the kernels; device, link: the ranks', and theirs; xp: numpy, or scalar functions
    """
    rate, others = link.bandwidth_bytes_per_s, sizes.ranks - 1
    one_shot = others * sizes.payload / (fit.one_shot_fraction * rate)
    two_shot = sizes.wire / (fit.two_shot_fraction * rate)
    is_two = (sizes.ranks > 2) & (fit.sync_s + two_shot < one_shot)
    peers_s = fit.peer_s * latency_ratio(fit.link_latency_s, link) * others
    fixed = fit.launch_s + peers_s + xp.where(is_two, fit.sync_s, 0.0)
    wire = xp.where(is_two, two_shot, one_shot)
    beyond = collective_seconds(sizes, fit.beyond, device, link, xp)
    is_small = (sizes.payload <= fit.most_bytes) & (sizes.ranks <= fit.most_ranks)
    duration = xp.maximum(xp.where(is_small, fixed + wire, beyond.duration), fit.eager_floor_s or 0.0)
    return CollectiveParts(xp.where(sizes.ranks > 1, duration, 0.0), xp.where(is_small, wire, beyond.wire))


def over_link(fit: Fit, source: Link, target: Link) -> Fit:
    """`fit`, made over `source`, for messages over `target`.

    Between NVLinks fractions stay; PCIe has its own, whose errors the fit's residuals do not cover. Devices without
    peer access exchange through host memory.
    """
    if target.name != "pcie" or source.name == "pcie":
        return fit
    if isinstance(fit, CollectiveFit):
        return fit.model_copy(update=_nccl_over_pcie(load_overheads().over_pcie, target))
    if isinstance(fit, CustomAllReduceFit):
        fraction = load_overheads().over_pcie.kernels_fraction
        kernels = {"one_shot_fraction": fraction, "two_shot_fraction": fraction}
        most_ranks = most_ranks_of_own_kernels(target)
        others = {"beyond": over_link(fit.beyond, source, target), "most_ranks": most_ranks, "residuals": Residuals()}
        return fit.model_copy(update=kernels | others)
    return fit


def _nccl_over_pcie(pcie: OverPcieFit, link: Link) -> dict[str, Any]:
    """NCCL's fit over PCIe: each byte touched once, unscaled hops, no switch reduction."""
    is_direct = link.peer_to_peer is not False
    return {
        "hop_s": pcie.hop_s if is_direct else pcie.hop_through_host_s,
        "link_latency_s": None,
        "low_latency_fraction": pcie.low_latency_fraction,
        "simple_fraction": pcie.simple_fraction if is_direct else pcie.through_host_fraction,
        "simple_start_s": pcie.simple_start_s,
        "memory_touches": 1.0,
        "switch_ranks": None,
        "residuals": Residuals(),
    }


def collective_time(work: Work, fit: CollectiveFit, device: DeviceFacts) -> OperatorTime:
    if work.message is None or not work.num_kernels:
        return OperatorTime(0.0, 0.0, 0.0, 0.0, 0.0, "overhead")
    return _operator_time(_nccl_seconds(work.message, fit, device))


def custom_time(work: Work, fit: CustomAllReduceFit, device: DeviceFacts) -> OperatorTime:
    """The time of the all-reduce of `work`; NCCL's for other collectives."""
    if work.message is None or not work.num_kernels:
        return OperatorTime(0.0, 0.0, 0.0, 0.0, 0.0, "overhead")
    if work.message.kind != "all_reduce" or device.spread(work.message).num_nodes > 1:
        return _operator_time(_nccl_seconds(work.message, fit.beyond, device))
    parts = custom_seconds(_sizes(work.message), fit, device, device.link, SCALARS)
    return _operator_time(parts.duration)


def _nccl_seconds(message: Message, fit: CollectiveFit, device: DeviceFacts) -> float:
    """NCCL's time within or between nodes; the mean over a pipeline's sends, some of which stay on a node."""
    spread, link = device.spread(message), device.link
    leaving = float(spread.num_nodes > 1) if message.kind != "send_recv" else spread.crossing
    seconds = 0.0
    if leaving:
        hop_s = fit.hop_s * latency_ratio(fit.link_latency_s, link)
        seconds = leaving * nccl_between_nodes(message, spread, fit, hop_s, device)
    if leaving < 1.0:
        on_node = collective_seconds(_sizes(message), fit, device, link, SCALARS)
        seconds += (1.0 - leaving) * float(on_node.duration)
    return seconds


def _sizes(message: Message) -> CollectiveSizes:
    return CollectiveSizes.of(message.kind, message.bytes_, message.num_ranks)


def _operator_time(duration_s: float) -> OperatorTime:
    """Latency counts as communication."""
    return OperatorTime(duration_s, 0.0, 0.0, duration_s, 0.0, "communication")

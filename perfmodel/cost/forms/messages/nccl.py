"""NCCL within a node, as fitted to nccl-tests: the formula is that of `collective`."""

__all__ = ["CollectiveFit", "CollectiveParts", "CollectiveSizes", "collective_seconds", "latency_ratio"]

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.fits import Residuals
from perfmodel.files.amounts import PositiveFloat, PositiveInt
from perfmodel.files.base import Spec
from perfmodel.ops.extents import Values
from perfmodel.specs.hardware import Link

# (steps per k - 1, fixed steps, wire per payload and (k - 1) / k, fixed wire per payload)
_SHAPES = {
    "all_reduce": (2, 0, 2, 0),
    "all_gather": (1, 0, 1, 0),
    "reduce_scatter": (1, 0, 1, 0),
    "all_to_all": (0, 1, 1, 0),
    "send_recv": (0, 1, 0, 1),
}


class CollectiveFit(Spec):
    """NCCL for one kind of collective. Times in seconds; fractions of the declared link bandwidth.

    link_latency_s: the declared latency of the link it was fitted on; None: hops are not scaled
    """

    form: Literal["collective"] = "collective"
    launch_s: float = Field(default=6e-6, ge=1e-6, le=5e-5)
    hop_s: float = Field(default=1e-6, ge=1e-8, le=1e-5)  # one step of the low-latency protocol
    first_channel: float = Field(default=0.02, ge=0.003, le=0.3)  # fraction of the link while channels are few
    ramp_s: float = Field(default=2e-6, ge=1e-8, le=1e-5)  # until all channels run
    low_latency_fraction: float = Field(default=0.35, ge=0.05, le=0.8)
    simple_start_s: float = Field(default=2e-5, ge=1e-8, le=1e-4)
    simple_fraction: float = Field(default=0.85, ge=0.5, le=1.0)
    memory_touches: float = Field(default=2.5, ge=1.0, le=5.0)  # of local memory, per payload byte
    switch_ranks: PositiveInt | None = None  # from so many ranks on a switch adds, on a link that has one
    switch_bytes: PositiveFloat = 3e7  # payload from which it does
    link_latency_s: PositiveFloat | None = None
    residuals: Residuals = Residuals()


class CollectiveSizes(NamedTuple):
    """One message between `ranks` devices, or many as arrays.

    payload: bytes as nccl-tests counts them; steps, wire: see the module; switched: 1 where a switch could add
    """

    payload: Values
    ranks: Values
    steps: Values
    wire: Values
    switched: Values

    @classmethod
    def of(cls, kind: str, payload: Values, ranks: Values, switched: Values = 1.0) -> "CollectiveSizes":
        """Messages of one kind; `switched`: in a number format that a switch can add.

        payload: bytes as nccl-tests counts them, between so many ranks
        """
        per_rank, fixed, share, whole = _SHAPES[kind]
        others = ranks - 1
        wire = payload * (share * others / ranks + whole)
        return cls(payload, ranks, per_rank * others + fixed, wire, switched * (kind == "all_reduce"))


@dataclass(frozen=True, slots=True)
class CollectiveParts:
    """Seconds in all, and those in which bytes are on the wire."""

    duration: Values
    wire: Values


def collective_seconds(
    sizes: CollectiveSizes, fit: CollectiveFit, device: DeviceFacts, link: Link, xp: Any = np
) -> CollectiveParts:
    """NCCL's time; one rank alone takes none.

    sizes: of one message, or columns of many; fit: of NCCL; device, link: of the ranks, and between them
    xp: functions of numbers or of columns
    """
    rate = link.bandwidth_bytes_per_s
    fixed = fit.launch_s + fit.hop_s * latency_ratio(fit.link_latency_s, link) * sizes.steps
    fixed = fixed + fit.memory_touches * sizes.payload / device.bandwidth
    low_latency = sizes.wire / (fit.low_latency_fraction * rate)
    ramp = xp.minimum(sizes.wire / (fit.first_channel * rate), fit.ramp_s)
    wire = sizes.wire
    if fit.switch_ranks is not None and link.has_switch:
        adds = (sizes.switched > 0) & (sizes.ranks >= fit.switch_ranks) & (sizes.payload > fit.switch_bytes)
        wire = xp.where(adds, xp.minimum(wire, sizes.payload * (1 + 1 / sizes.ranks)), wire)
    simple = wire / (fit.simple_fraction * rate)
    duration = fixed + xp.minimum(ramp + low_latency, fit.simple_start_s + simple)
    return CollectiveParts(xp.where(sizes.ranks > 1, duration, 0.0), xp.minimum(low_latency, simple))


def latency_ratio(fitted: float | None, link: Link) -> float:
    """How much longer a hop takes than on the link that the fit was made for."""
    return link.latency_s / fitted if fitted and link.latency_s else 1.0

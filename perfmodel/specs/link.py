"""`Link`: a connection of a device to others, or to the host."""

__all__ = ["Link"]

from typing import Literal

from pydantic import Field

from perfmodel.specs.base import Spec
from perfmodel.specs.units import BytesPerSecond, Seconds


class Link(Spec):
    """A connection to other devices or to the host; bandwidth is one way, per device."""

    name: str  # nvlink | pcie | infinity_fabric | ici | scale_out ...
    bandwidth_bytes_per_s: BytesPerSecond = Field(gt=0)
    direction: Literal["one_way"] = "one_way"
    latency_s: Seconds = Field(default=0.0, ge=0)
    topology: str | None = None

    @property
    def has_switch(self) -> bool:
        """Whether devices talk through a switch of the fabric's own, as their file's `topology` says."""
        return "switch" in (self.topology or "").lower()

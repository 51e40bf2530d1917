"""`GivenLink`: a link that a scenario names, with what it says of it beside the hardware file."""

__all__ = ["GivenLink"]

from pydantic import Field

from perfmodel.specs.base import Spec
from perfmodel.specs.hardware import HardwareSpec, Link
from perfmodel.specs.units import BytesPerSecond, Seconds


class GivenLink(Spec):
    """A link of the hardware file, the scale-up link unless given; another name needs a bandwidth.

    bandwidth_bytes_per_s: one way, per device; the hardware file's unless given
    latency_s:             from request to first byte; the link's own unless given
    """

    link: str | None = None
    bandwidth_bytes_per_s: BytesPerSecond | None = Field(default=None, gt=0)
    latency_s: Seconds | None = Field(default=None, ge=0)

    def link_of(self, hardware: HardwareSpec) -> Link:
        """The link as a device of `hardware` has it. Raises ValueError for one that nobody describes."""
        declared = hardware.scale_up_link if self.link is None else hardware.link(self.link)
        if declared is None and self.bandwidth_bytes_per_s is None:
            known = ", ".join(link.name for link in hardware.declared.links) or "none"
            raise ValueError(
                f"{hardware.name} has no link {self.link or 'at all'} (its links: {known}); name one of them, or give "
                f"bandwidth_bytes_per_s"
            )
        given = {
            "name": self.link,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "latency_s": self.latency_s,
        }
        update = {name: value for name, value in given.items() if value is not None}
        if declared is not None:
            return declared.model_copy(update=update)
        return Link.model_validate({"name": "link", **update})

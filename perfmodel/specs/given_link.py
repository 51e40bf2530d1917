"""`GivenLink`: a link that a scenario names, with what it says of it beside the files of hardware and networks."""

__all__ = ["GivenLink"]

from typing import TYPE_CHECKING

from pydantic import Field

from perfmodel.specs.base import Spec
from perfmodel.specs.catalog import list_names
from perfmodel.specs.link import Link
from perfmodel.specs.network_file import find_network
from perfmodel.specs.units import BytesPerSecond, Seconds

if TYPE_CHECKING:
    from perfmodel.specs.hardware import HardwareSpec


class GivenLink(Spec):
    """A link of the hardware file, the scale-up link unless given, or a network of hardware_specs/networks; another
    name needs a bandwidth.

    bandwidth_bytes_per_s: one way, per device; the hardware file's unless given
    latency_s:             from request to first byte; the link's own unless given
    """

    link: str | None = None
    bandwidth_bytes_per_s: BytesPerSecond | None = Field(default=None, gt=0)
    latency_s: Seconds | None = Field(default=None, ge=0)

    def link_of(self, hardware: "HardwareSpec") -> Link:
        """The link as a device of `hardware` has it. Raises ValueError for one that nobody describes."""
        declared = hardware.scale_up_link if self.link is None else hardware.link(self.link) or find_network(self.link)
        if declared is None and self.bandwidth_bytes_per_s is None:
            known = ", ".join(link.name for link in hardware.declared.links) or "none"
            raise ValueError(
                f"{hardware.name} has no link {self.link or 'at all'} (its links: {known}), and no network is "
                f"called so ({', '.join(list_names('networks'))}); name one of them, or give bandwidth_bytes_per_s"
            )
        given = {
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "latency_s": self.latency_s,
        }
        update = {name: value for name, value in given.items() if value is not None}
        if declared is not None:
            return declared.model_copy(update=update)
        return Link.model_validate({"name": self.link or "link", **update})

"""`NetworkSpec`: how the devices of a replica are spread over nodes, and the network that joins these."""

__all__ = ["DEFAULT_NETWORK", "NetworkSpec"]

from typing import TYPE_CHECKING

from pydantic import PositiveInt

from perfmodel.specs.given_link import GivenLink
from perfmodel.specs.link import Link

if TYPE_CHECKING:
    from perfmodel.specs.hardware import HardwareSpec

DEFAULT_NETWORK = "infiniband-ndr"  # assumed if nothing is said: what a DGX H100, H200 or B200 has, a port per GPU
_SCALE_OUT = "scale_out"  # the name of a link between nodes in a hardware file
_LATENCY_S = 5e-6  # of a network that nobody gave one for: that of the files with RDMA


class NetworkSpec(GivenLink):
    """The network between nodes, and the nodes.

    link:                  of hardware_specs/networks, or a name of one's own with a bandwidth; unless given the
                           hardware file's `scale_out` link, or DEFAULT_NETWORK
    latency_s:             of one hop of a collective, 5 us where neither a file nor a scenario says
    bandwidth_bytes_per_s: one way, of one network card (port)
    devices_per_node:      of those that the scale-up link can join, which is all unless given
    nics_per_node:         network cards of a node, which its devices share evenly; one for each device unless given
    """

    devices_per_node: PositiveInt | None = None
    nics_per_node: PositiveInt | None = None

    @property
    def is_assumed(self) -> bool:
        """Whether nobody said what joins the nodes."""
        return self.link is None and self.bandwidth_bytes_per_s is None

    def share_of(self, hardware: "HardwareSpec") -> Link:
        """The network as one device of `hardware` has it, when all of its node talk. Raises ValueError for a link
        that nobody describes."""
        most = hardware.declared.max_devices
        if self.devices_per_node is not None and self.devices_per_node > most:
            raise ValueError(
                f"found devices_per_node={self.devices_per_node}; the scale-up link of {hardware.name} joins {most} at "
                f"most (max_devices in its file), give that or fewer"
            )
        name = self.link
        if name is None and self.bandwidth_bytes_per_s is None:
            name = _SCALE_OUT if hardware.link(_SCALE_OUT) else DEFAULT_NETWORK
        port = self.model_copy(update={"link": name or "network"}).link_of(hardware)
        update: dict[str, float] = {}
        if self.latency_s is None and not port.latency_s:
            update["latency_s"] = _LATENCY_S
        if self.nics_per_node is not None:
            share = self.nics_per_node / hardware.devices_per_node
            update["bandwidth_bytes_per_s"] = share * port.bandwidth_bytes_per_s
        return port.model_copy(update=update) if update else port

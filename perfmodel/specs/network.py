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

    def is_assumed(self, hardware: "HardwareSpec") -> bool:
        """Whether nobody said what joins nodes of `hardware`."""
        is_given = self.link is not None or self.bandwidth_bytes_per_s is not None
        return not is_given and hardware.link(_SCALE_OUT) is None

    def share_of(self, hardware: "HardwareSpec") -> Link:
        """The network as one device of `hardware` has it, when all of its node talk. Raises ValueError for a link
        that nobody describes."""
        most = hardware.declared.max_devices
        if self.devices_per_node is not None and self.devices_per_node > most:
            raise ValueError(
                f"found devices_per_node={self.devices_per_node}; the scale-up link of {hardware.name} joins {most} at "
                f"most (max_devices in its file), give that or fewer"
            )
        name = self.link or ("network" if self.bandwidth_bytes_per_s is not None else _SCALE_OUT)
        port = self.model_copy(update={"link": DEFAULT_NETWORK if self.is_assumed(hardware) else name}).link_of(
            hardware
        )
        update: dict[str, float] = {}
        if self.latency_s is None and not port.latency_s:
            update["latency_s"] = _LATENCY_S
        if self.nics_per_node is not None:
            share = self.nics_per_node / hardware.devices_per_node
            update["bandwidth_bytes_per_s"] = share * port.bandwidth_bytes_per_s
        return port.model_copy(update=update) if update else port

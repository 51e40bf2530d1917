"""Device links, named inter-node networks (hardware_specs/networks), and a scenario's choice of either."""

from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from perfmodel.errors import SpecError
from perfmodel.files.base import Spec
from perfmodel.files.catalog import find_file, list_names
from perfmodel.files.sandbox import refuse_path
from perfmodel.files.units import BytesPerSecond, PositiveInt, Seconds
from perfmodel.files.validation import load_spec


class Link(Spec):
    """A connection to other devices or to the host; bandwidth is one way, per device.

    peer_to_peer: whether devices read and write each other's memory over it; without, what they exchange goes through
                  the host's memory. None where no source says
    """

    name: str  # nvlink | pcie | infinity_fabric | ici | scale_out ...
    bandwidth_bytes_per_s: BytesPerSecond = Field(gt=0)
    direction: Literal["one_way"] = "one_way"
    latency_s: Seconds = Field(default=0.0, ge=0)
    topology: str | None = None
    peer_to_peer: bool | None = None

    @property
    def has_switch(self) -> bool:
        """Whether devices talk through the fabric's switch, by the `topology` of their file."""
        return "switch" in (self.topology or "").lower()


class LinkedDevice(Protocol):
    """A device with links. max_devices: joinable by its scale-up link; devices_per_node: joined."""

    @property
    def name(self) -> str: ...

    @property
    def links(self) -> tuple[Link, ...]: ...

    @property
    def max_devices(self) -> int: ...

    @property
    def devices_per_node(self) -> int: ...

    @property
    def scale_up_link(self) -> Link | None: ...

    def link(self, name: str) -> Link | None:
        """Link by name, or None."""
        ...


class NetworkFile(Spec):
    """What a vendor or a standard says of a network, and where.

    latency_s:             of one hop of a collective: from device to device, with what the library does in between
    """

    name: str
    aliases: tuple[str, ...] = ()
    source: str
    bandwidth_bytes_per_s: BytesPerSecond = Field(gt=0)  # one way, of one port: the line rate
    latency_s: Seconds = Field(ge=0)
    latency_source: str

    @property
    def link(self) -> Link:
        """One port as a link."""
        return Link(name=self.name, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, latency_s=self.latency_s)


def load_network(name_or_path: str | Path) -> NetworkFile:
    """Network by name, alias or path. Raises SpecError for a missing or malformed one."""
    return load_spec(NetworkFile, find_file("networks", name_or_path))


def find_network(name: str) -> Link | None:
    """One port of network `name`, or None. Raises SpecError for a forbidden file."""
    refuse_path(name)
    try:
        file = find_file("networks", name)
    except SpecError:
        return None
    return load_spec(NetworkFile, file).link


def list_networks() -> list[str]:
    """Sorted names in hardware_specs/networks."""
    return list_names("networks")


class GivenLink(Spec):
    """A link of the hardware file, the scale-up link unless given, or a network of hardware_specs/networks; another
    name needs a bandwidth.

    bandwidth_bytes_per_s: one way, per device; the hardware file's unless given
    """

    link: str | None = None
    bandwidth_bytes_per_s: BytesPerSecond | None = Field(default=None, gt=0)
    latency_s: Seconds | None = Field(default=None, ge=0)  # from request to first byte; the link's own unless given

    def link_of(self, hardware: LinkedDevice) -> Link:
        """The link on `hardware`. Raises ValueError for an unknown one."""
        declared = hardware.scale_up_link if self.link is None else hardware.link(self.link) or find_network(self.link)
        if declared is None and self.bandwidth_bytes_per_s is None:
            known = ", ".join(link.name for link in hardware.links) or "none"
            raise ValueError(
                f"{hardware.name} has no link {self.link or 'at all'} (its links: {known}), and no network is "
                f"called so ({', '.join(list_networks())}); name one of them, or give bandwidth_bytes_per_s"
            )
        given = {"bandwidth_bytes_per_s": self.bandwidth_bytes_per_s, "latency_s": self.latency_s}
        update = {name: value for name, value in given.items() if value is not None}
        if declared is not None:
            return declared.model_copy(update=update)
        return Link.model_validate({"name": self.link or "link", **update})


DEFAULT_NETWORK = "infiniband-ndr"  # assumed if nothing is said: what a DGX H100, H200 or B200 has, a port per GPU
_SCALE_OUT = "scale_out"  # the name of a link between nodes in a hardware file
_LATENCY_S = 5e-6  # of a network given without one: that of the files with RDMA


class NetworkSpec(GivenLink):
    """The network between nodes, and the nodes.

    link:                  of hardware_specs/networks, or a name of one's own with a bandwidth; unless given the
                           hardware file's `scale_out` link, or DEFAULT_NETWORK
    latency_s:             of one hop of a collective, 5 us where neither a file nor a scenario says
    bandwidth_bytes_per_s: one way, of one network card (port)
    nics_per_node:         network cards of a node, which its devices share evenly; one for each device unless given
    """

    devices_per_node: PositiveInt | None = None  # of those that the scale-up link can join, which is all unless given
    nics_per_node: PositiveInt | None = None

    def is_assumed(self, hardware: LinkedDevice) -> bool:
        is_given = self.link is not None or self.bandwidth_bytes_per_s is not None
        return not is_given and hardware.link(_SCALE_OUT) is None

    def share_of(self, hardware: LinkedDevice) -> Link:
        """One device's share of the network when its whole node communicates. Raises ValueError for an unknown link."""
        most = hardware.max_devices
        if self.devices_per_node is not None and self.devices_per_node > most:
            raise ValueError(
                f"got devices_per_node={self.devices_per_node}; the scale-up link of {hardware.name} joins {most} at "
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

"""Links of devices, and networks between nodes by name (hardware_specs/networks)."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from perfmodel.errors import SpecError
from perfmodel.files.base import Spec
from perfmodel.files.catalog import find_file, list_names
from perfmodel.files.sandbox import refuse_path
from perfmodel.files.units import BytesPerSecond, Seconds
from perfmodel.files.validation import load_spec

DEFAULT_NETWORK = "infiniband-ndr"  # assumed if nothing is said: what a DGX H100, H200 or B200 has, a port per GPU


class Link(Spec):
    """A connection to other devices or to the host; bandwidth is one way, per device.

    peer_to_peer: whether devices read and write each other's memory over it; without, what they exchange goes through
                  the host's memory. None where no source says"""

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


class NetworkFile(Spec):
    """What a vendor or a standard says of a network, and where.

    latency_s:             of one hop of a collective: from device to device, with what the library does in between"""

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

"""Networks between nodes by name: the files of hardware_specs/networks, each the port of one network card."""

__all__ = ["NetworkFile", "find_network", "list_networks", "load_network"]

from functools import lru_cache
from pathlib import Path

from pydantic import Field

from perfmodel.errors import SpecError
from perfmodel.specs.base import Spec
from perfmodel.specs.catalog import find_file, list_names
from perfmodel.specs.link import Link
from perfmodel.specs.units import BytesPerSecond, Seconds
from perfmodel.specs.validation import parse
from perfmodel.specs.yaml_loader import load_yaml


class NetworkFile(Spec):
    """What a vendor or a standard says of a network, and where.

    bandwidth_bytes_per_s: one way, of one port: the line rate
    latency_s:             of one hop of a collective: from device to device, with what the library does in between
    """

    name: str
    aliases: tuple[str, ...] = ()
    source: str
    bandwidth_bytes_per_s: BytesPerSecond = Field(gt=0)
    latency_s: Seconds = Field(ge=0)
    latency_source: str

    @property
    def link(self) -> Link:
        """One port, as a link."""
        return Link(name=self.name, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, latency_s=self.latency_s)


def load_network(name_or_path: str | Path) -> NetworkFile:
    """The network of a file by name, alias or path. Raises SpecError for one that is missing or malformed."""
    file = find_file("networks", name_or_path)
    return _read(file, file.stat().st_mtime_ns)


def find_network(name: str) -> Link | None:
    """One port of the network called so, or None."""
    try:
        file = find_file("networks", name)
    except SpecError:
        return None
    return _read(file, file.stat().st_mtime_ns).link


def list_networks() -> list[str]:
    """Names of the networks in hardware_specs/networks, sorted."""
    return list_names("networks")


@lru_cache(maxsize=64)
def _read(file: Path, _written_at: int) -> NetworkFile:
    loaded = load_yaml(file)
    return parse(NetworkFile, loaded.data, loaded.positions)

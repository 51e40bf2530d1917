"""The devices and networks that are known, and one of them: `perfmodel hardware list|show`."""

__all__ = ["answer_device", "answer_devices"]

from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.answers.answer import Answer
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.report.document import Document
    from perfmodel.specs.hardware import HardwareSpec


def answer_devices(kind: str | None = None, maker: str | None = None, name: str | None = None) -> Answer:
    """Devices with memory, bandwidth, peak and ridge point; without a filter the document has siblings as tables, and
    networks.

    kind, maker, name: only these, and those with this in their name

    Raises SpecError where no device passes the filters.
    """
    from perfmodel.report.views.catalog import device_facts, devices_view

    if kind is None and maker is None and name is None:
        return Answer(lambda: [device_facts(each) for each in _devices()], _siblings)
    chosen = [each for each in _devices(name or "") if kind in (None, each.kind) and maker in (None, each.maker)]
    if not chosen:
        raise SpecError(_nothing_is(kind, maker, name))
    return Answer(lambda: [device_facts(each) for each in chosen], lambda: devices_view(chosen), chosen)


def _siblings() -> "Document":
    from perfmodel import specs
    from perfmodel.report.views.catalog import siblings_view

    devices = [specs.load_hardware(each) for each in specs.list_names("hardware")]
    networks = [specs.load_network(each) for each in specs.list_networks()]
    return siblings_view(devices, specs.load_tables(), networks)


def _devices(part: str = "") -> "list[HardwareSpec]":
    """All that are known by a name with `part` in it."""
    from perfmodel import specs

    return [specs.load_hardware(each) for each in specs.list_hardware() if part in each]


def _nothing_is(kind: str | None, maker: str | None, name: str | None) -> str:
    """That no device passes the filters, and what there is."""
    given = {"--kind": kind, "--maker": maker, "--name": name}
    asked = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
    devices = _devices()
    kinds, makers = (sorted({str(getattr(each, field)) for each in devices}) for field in ("kind", "maker"))
    return f"no device is listed for {asked}; kinds are {', '.join(kinds)}; makers {', '.join(makers)}."


def answer_device(name: str) -> Answer:
    """Everything declared of a device, or of a network between nodes; `result` is its specification.

    Raises SpecError for what is neither's name nor file.
    """
    from perfmodel import specs
    from perfmodel.report.views.catalog import device_view, network_view

    if _is_network(name):
        network = specs.load_network(name)
        return Answer(lambda: network.model_dump(mode="json"), lambda: network_view(network), network)
    device = specs.load_hardware(name)
    return Answer(lambda: device.model_dump(mode="json"), lambda: device_view(device), device)


def _is_network(name: str) -> bool:
    """Whether a name, or what a file declares, is a network's; what is neither's is for the device's reader to say."""
    from perfmodel import specs
    from perfmodel.files.reach import may_touch

    if may_touch(name) and Path(name).is_file():
        return "declared" not in specs.load_yaml(name).data
    return specs.find_network(name) is not None

"""`perfmodel hardware list|show`: the devices and networks that are known, and what is declared of one."""

__all__ = ["hardware"]

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import answer, guarded

hardware = typer.Typer(help="List the known devices, or show one.", no_args_is_help=True)

DeviceName = Annotated[str, typer.Argument(metavar="NAME", help="A device's name, alias or file.", show_default=False)]


@hardware.command("list")
@guarded
def list_devices(as_json: JsonFlag = False) -> None:
    """List the devices with memory, bandwidth, peak and ridge point, and the networks between nodes."""
    from perfmodel import specs
    from perfmodel.report.views.catalog import device_facts, devices_view

    devices = [specs.load_hardware(name) for name in specs.list_hardware()]
    networks = [specs.load_network(name) for name in specs.list_networks()]
    answer(devices_view(devices, networks), [device_facts(device) for device in devices], as_json)


@hardware.command("show")
@guarded
def show_device(name: DeviceName, as_json: JsonFlag = False) -> None:
    """Show everything declared of one device, or of a network between nodes, and where it comes from."""
    from perfmodel import specs
    from perfmodel.report.views.catalog import device_view, network_view

    if _is_network(name):
        network = specs.load_network(name)
        answer(network_view(network), network.model_dump(mode="json"), as_json)
        return
    device = specs.load_hardware(name)
    answer(device_view(device), device.model_dump(mode="json"), as_json)


def _is_network(name: str) -> bool:
    """Whether a name, or what a file declares, is a network's; what is neither's is for the device's reader to say."""
    from perfmodel import specs

    if Path(name).is_file():
        return "declared" not in specs.load_yaml(name).data
    return specs.find_network(name) is not None

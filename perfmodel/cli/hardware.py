"""`perfmodel hardware list|show`: the devices and networks that are known, and what is declared of one."""

__all__ = ["hardware_app"]

from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import guarded, print_json, stdout

if TYPE_CHECKING:
    from rich.table import Table

    from perfmodel.specs.hardware import HardwareSpec
    from perfmodel.specs.networks import NetworkFile

hardware_app = typer.Typer(help="List the known devices, or show one.", no_args_is_help=True)

DeviceName = Annotated[str, typer.Argument(metavar="NAME", help="A device's name, alias or file.", show_default=False)]


@hardware_app.command("list")
@guarded
def list_devices(as_json: JsonFlag = False) -> None:
    """List the devices with memory, bandwidth, peak and ridge point, and the networks between nodes."""
    from perfmodel import specs

    devices = [specs.load_hardware(name) for name in specs.list_hardware()]
    if as_json:
        print_json([_facts(device) for device in devices])
        return
    stdout().print(_device_table(devices))
    stdout().print(_network_table())


@hardware_app.command("show")
@guarded
def show_device(name: DeviceName, as_json: JsonFlag = False) -> None:
    """Show everything declared of one device, or of a network between nodes, and where it comes from."""
    from perfmodel import specs

    if specs.find_network(name) is not None:
        _show_network(specs.load_network(name), as_json)
        return
    device = specs.load_hardware(name)
    if as_json:
        print_json(device.model_dump(mode="json"))
        return
    _print_device(device)


def _facts(device: "HardwareSpec") -> dict[str, object]:
    from perfmodel.report.runs.step_view import ridge_points

    return {
        "name": device.name,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth,
        "peak_flops_per_s": device.declared.peak_flops_per_s,
        "ridge_flop_per_byte": ridge_points(device),
        "tdp_w": device.declared.tdp_w,
        "usd_per_hour": device.price.usd_per_hour if device.price else None,
    }


def _device_table(devices: list["HardwareSpec"]) -> "Table":
    from perfmodel.cost import peak_flops_per_s, ridge_point
    from perfmodel.report.drawing.fields import format_number, format_si
    from perfmodel.report.runs.tables import rows_table

    rows = [
        (
            device.name,
            device.kind,
            format_si(device.memory_bytes, "B"),
            format_si(device.memory_bandwidth, "B/s"),
            format_si(peak_flops_per_s(device, "bf16"), "FLOP/s"),
            format_number(ridge_point(device), 0),
            format_number(device.declared.tdp_w, 0),
            format_number(device.price.usd_per_hour if device.price else None),
        )
        for device in devices
    ]
    columns = ("device", "kind", "memory", "bandwidth", "bf16 peak", "FLOP/byte", "TDP W", "USD/h")
    return rows_table(columns, rows, left=2)


def _network_table() -> "Table":
    from perfmodel import specs
    from perfmodel.report.drawing.fields import format_number, format_si
    from perfmodel.report.runs.tables import rows_table

    rows = [
        (network.name, format_si(network.bandwidth_bytes_per_s, "B/s"), format_number(network.latency_s * 1e6, 1))
        for network in map(specs.load_network, specs.list_networks())
    ]
    return rows_table(("network", "a card, one way", "µs a hop"), rows)


def _show_network(network: "NetworkFile", as_json: bool) -> None:
    from rich.text import Text

    from perfmodel.report.drawing.fields import format_si

    if as_json:
        print_json(network.model_dump(mode="json"))
        return
    console, rate = stdout(), format_si(network.bandwidth_bytes_per_s, "B/s")
    latency = f"{network.latency_s * 1e6:g} µs a hop"
    console.print(Text.assemble((network.name, "bold"), f", {rate} a card, one way, {latency}"))
    console.print(Text(f"Source: {network.source}"))
    console.print(Text(f"Of the latency: {network.latency_source}"))


def _print_device(device: "HardwareSpec") -> None:
    from rich.text import Text

    from perfmodel.report.drawing.fields import format_number, format_si
    from perfmodel.report.runs.tables import rows_table

    console, declared = stdout(), device.declared
    console.print(Text.assemble((device.name, "bold"), f", {device.kind}, {declared.architecture or 'other'}"))
    console.print(Text(f"{declared.compute_units} compute units at {format_si(declared.clock_hz, 'Hz')}"))
    rates = [
        (rate, format_si(peak, "FLOP/s"), format_number(peak / device.memory_bandwidth, 1))
        for rate, peak in declared.peak_flops_per_s.items()
    ]
    console.print(rows_table(("dtype", "dense peak", "ridge FLOP/byte"), rates))
    levels = [
        (m.level, format_si(m.capacity_bytes, "B"), m.per.replace("_", " "), format_si(m.bandwidth_bytes_per_s, "B/s"))
        for m in declared.memory
    ]
    console.print(rows_table(("memory", "capacity", "per", "bandwidth"), levels))
    if declared.links:
        links = [(link.name, format_si(link.bandwidth_bytes_per_s, "B/s")) for link in declared.links]
        console.print(rows_table(("link", "one way"), links))
    console.print(Text(f"TDP {format_number(declared.tdp_w, 0)} W. Source: {declared.source}"))
    if device.price is not None:
        price = device.price
        console.print(Text(f"{price.usd_per_hour:g} USD an hour ({price.source}, {price.date.isoformat()})"))
    if declared.unconfirmed:
        console.print(Text(f"Not confirmed in a vendor's document: {', '.join(declared.unconfirmed)}", style="yellow"))

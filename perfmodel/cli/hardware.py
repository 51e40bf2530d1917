"""`perfmodel hardware list|show|new|detect`: known devices and networks, one of them, files for others and this one."""

__all__ = ["hardware"]

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli import completion
from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import answer, guarded
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.specs.networks import NetworkFile

hardware = typer.Typer(help="List the known devices, or show one.", no_args_is_help=True)

DeviceName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A device's name, alias or file.",
        show_default=False,
        autocompletion=completion.devices,
    ),
]


@hardware.command("list")
@guarded
def list_devices(
    kind: Annotated[
        str | None, typer.Option("--kind", help="Only these: gpu, cpu, tpu, npu.", show_default=False)
    ] = None,
    maker: Annotated[
        str | None, typer.Option("--maker", help="Only this maker's: nvidia, amd, intel ...", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Only those with this in their name: rtx-40.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the devices with memory, bandwidth, peak and ridge point, and the networks between nodes.

    Without a filter, siblings are shown as the tables that they are in; with one, each device by itself.
    """
    from perfmodel import specs
    from perfmodel.report.views.devices import device_facts, devices_view, siblings_view

    if kind is None and maker is None and name is None and not as_json:
        devices = [specs.load_hardware(each) for each in specs.list_names("hardware")]
        answer(siblings_view(devices, specs.load_tables(), _networks()), [], as_json)
        return
    found = [specs.load_hardware(each) for each in specs.list_hardware() if (name or "") in each]
    chosen = [each for each in found if kind in (None, each.kind) and maker in (None, each.maker)]
    if not chosen:
        raise SpecError(_nothing_is(kind, maker, name))
    answer(devices_view(chosen), [device_facts(each) for each in chosen], as_json)


def _networks() -> "list[NetworkFile]":
    from perfmodel import specs

    return [specs.load_network(name) for name in specs.list_networks()]


def _nothing_is(kind: str | None, maker: str | None, name: str | None) -> str:
    """That no device passes the filters, and what there is."""
    from perfmodel import specs

    given = {"--kind": kind, "--maker": maker, "--name": name}
    asked = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
    devices = [specs.load_hardware(each) for each in specs.list_hardware()]
    kinds, makers = (sorted({str(getattr(each, field)) for each in devices}) for field in ("kind", "maker"))
    return f"no device is listed for {asked}; kinds are {', '.join(kinds)}; makers {', '.join(makers)}."


@hardware.command("show")
@guarded
def show_device(name: DeviceName, as_json: JsonFlag = False) -> None:
    """Show everything declared of one device, or of a network between nodes, and where it comes from."""
    from perfmodel import specs
    from perfmodel.report.views.devices import device_view, network_view

    if _is_network(name):
        network = specs.load_network(name)
        answer(network_view(network), network.model_dump(mode="json"), as_json)
        return
    device = specs.load_hardware(name)
    answer(device_view(device), device.model_dump(mode="json"), as_json)


@hardware.command("new")
@guarded
def new_device(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the device is to be called.", show_default=False)],
    like: Annotated[
        str, typer.Option("--like", metavar="DEVICE", help="The known device whose figures are filled in.")
    ] = "h100-sxm-80gb",
) -> None:
    """Print the file of a device that is not known yet, every field explained, to be filled in.

    Write it to a file, replace the figures, and use it by its path:
    `perfmodel hardware new my-npu --like a100-sxm-80gb > my-npu.yaml`, then
    `perfmodel simulate llama-3.1-8b-a100 --set hardware=./my-npu.yaml`.
    """
    from perfmodel import specs
    from perfmodel.specs.hardware_template import hardware_template

    typer.echo(hardware_template(name, specs.load_hardware(like)), nl=False)


@hardware.command("detect")
@guarded
def detect_device(
    cpu: Annotated[bool, typer.Option("--cpu", help="The processor's file, also where there is a GPU.")] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=60, help="How long the copy test of the memory takes.")
    ] = 2.0,
) -> None:
    """Print the file of the machine at hand as a start: its first GPU, else its processor.

    GPUs are asked for by their makers' tools where they are installed (nvidia-smi, amd-smi, rocm-smi, xpu-smi,
    system_profiler); the memory's bandwidth is measured by copying for two seconds on all cores.
    """
    from perfmodel.specs.detect.machine import this_machine
    from perfmodel.specs.detect.starting_file import graphics_file, processor_file, summary

    machine = this_machine(seconds)
    typer.echo(summary(machine), nl=False)
    is_processor = cpu or not machine.graphics
    typer.echo(processor_file(machine) if is_processor else graphics_file(machine.graphics[0]), nl=False)


def _is_network(name: str) -> bool:
    """Whether a name, or what a file declares, is a network's; what is neither's is for the device's reader to say."""
    from perfmodel import specs

    if Path(name).is_file():
        return "declared" not in specs.load_yaml(name).data
    return specs.find_network(name) is not None

"""`perfmodel hardware list|show|new|detect`: known devices and networks, one of them, files for others and this one."""

__all__ = ["hardware"]

from typing import Annotated

import typer

from perfmodel.cli import completion
from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import give, guarded

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
    from perfmodel.answers.hardware import answer_devices

    give(answer_devices(kind, maker, name), as_json)


@hardware.command("show")
@guarded
def show_device(name: DeviceName, as_json: JsonFlag = False) -> None:
    """Show everything declared of one device, or of a network between nodes, and where it comes from."""
    from perfmodel.answers.hardware import answer_device

    give(answer_device(name), as_json)


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

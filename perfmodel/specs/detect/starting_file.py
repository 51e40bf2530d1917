"""Draft hardware files from detection and the known device of the same name."""

import re
from collections.abc import Mapping
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.device_tables import plain_name
from perfmodel.files.units import shortest_amount
from perfmodel.specs.detect.machine import Graphics, Machine
from perfmodel.specs.hardware import Declared, HardwareSpec, MemoryLevel
from perfmodel.specs.hardware_template import hardware_template
from perfmodel.specs.scenario_file import load_hardware

# Multiplications and additions in fp32 that a core starts in one clock, by the widest instructions it has: two of 512,
# 256 or 128 bits. Several processors of each kind have one instead of two.
_OPERATIONS = {"avx512": 64, "avx2": 32, "avx": 16, "sve": 32, "neon": 16, "rvv": 16, "sse4": 8}
_ANY_CLOCK_HZ = 3e9
_ANY_MEMORY_BYTES = 16e9


def summary(machine: Machine) -> str:
    """Detected devices with their catalogue names, as comments."""
    processor = machine.processor
    lines = [
        f"# Found: {processor.name or 'a processor without a name'}, {processor.num_cores} cores"
        f"{_called(processor.name)}",
        *(f"# Found: {graphic.name} (by {graphic.tool}){_called(graphic.name)}" for graphic in machine.graphics),
        f"# All cores together copy {shortest_amount(round(machine.copied_bytes_per_s, -8), 'B/s')}, read and written.",
    ]
    return "\n".join(lines) + "\n"


def graphics_file(graphics: Graphics) -> str:
    """File of a GPU: the known device with the tool's figures. Raises SpecError for an unknown GPU."""
    known, name = _known(graphics.name), _file_name(graphics.name)
    if known is None:
        raise SpecError(
            f"hardware detect: no device is known as {graphics.name!r}; start from one like it: perfmodel hardware new "
            f"{name} --like rtx-4090."
        )
    main = known.declared.memory[0]
    visible = graphics.memory_bytes if graphics.memory_bytes and not main.unified else main.visible_bytes
    return _file(name, known, {"visible_bytes": visible}, {"tdp_w": graphics.power_w or known.declared.tdp_w})


def processor_file(machine: Machine) -> str:
    """File of the processor: the known one, or derived from cores, flags and the copy test."""
    processor = machine.processor
    known = _known(processor.name) or _unknown_processor(machine)
    capacity = round(processor.memory_bytes or known.memory_bytes, -8)
    return _file(_file_name(processor.name), known, {"capacity_bytes": capacity}, {})


def _file(name: str, known: HardwareSpec, of_memory: Mapping[str, Any], declared: Mapping[str, Any]) -> str:
    """File `name` of the device `known` with other figures of its outermost memory, and others that it declares."""
    main, *others = known.declared.memory
    memory = (main.model_copy(update=of_memory), *others)
    update = {"declared": known.declared.model_copy(update={**declared, "memory": memory})}
    return hardware_template(name, known.model_copy(update=update), is_here=True)


def _unknown_processor(machine: Machine) -> HardwareSpec:
    processor = machine.processor
    clock = round(processor.clock_hz or _ANY_CLOCK_HZ, -7)
    operations = next((count for name, count in _OPERATIONS.items() if name in processor.instructions), 8)
    memory = MemoryLevel(
        level="hbm",
        capacity_bytes=processor.memory_bytes or _ANY_MEMORY_BYTES,
        bandwidth_bytes_per_s=round(machine.copied_bytes_per_s, -8),
    )
    return HardwareSpec(
        name=_file_name(processor.name),
        kind="cpu",
        declared=Declared(
            source="this machine",
            compute_units=processor.num_cores,
            performance_cores=processor.num_performance_cores,
            instructions=processor.instructions,
            clock_hz=clock,
            peak_flops_per_s={"fp32": processor.num_cores * clock * operations},
            memory=(memory,),
            max_devices=processor.num_sockets,
            unconfirmed=("clock_hz", "memory.hbm.bandwidth_bytes_per_s", "peak_flops_per_s.fp32"),
        ),
    )


def _known(name: str) -> HardwareSpec | None:
    if not name:
        return None
    try:
        return load_hardware(plain_name(name))
    except SpecError:
        return None


def _called(name: str) -> str:
    known = _known(name)
    return f": known as {known.name}" if known is not None else ": not known by name"


def _file_name(name: str) -> str:
    return f"my-{re.sub(r'[^a-z0-9.+-]+', '-', plain_name(name)).strip('-') or 'processor'}"[:60]

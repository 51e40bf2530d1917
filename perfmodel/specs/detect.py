"""This machine: processor from the operating system, GPUs from vendor tools, memory bandwidth from a copy test; and
drafts of hardware files from these and the known devices of the same names.

Only installed tools are run, and their failure is no error."""

import json
import os
import platform
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.cores import num_cores
from perfmodel.errors import SpecError
from perfmodel.files.device_tables import plain_name
from perfmodel.files.units import shortest_amount
from perfmodel.specs.hardware import Declared, HardwareSpec, MemoryLevel
from perfmodel.specs.hardware_template import hardware_template
from perfmodel.specs.scenario_file import load_hardware

_BYTES = 256 * 2**20  # of all arrays together: more than nearly all caches hold


def copy_bandwidth(seconds: float = 2.0) -> float:
    """Bytes per second that all cores read and write in copies of large arrays over `seconds`; numpy frees the GIL."""
    count = num_cores()
    started = threading.Barrier(count + 1)

    def moved_bytes() -> int:
        source = np.ones(_BYTES // 2 // count // 8)
        target = np.empty_like(source)
        np.copyto(target, source)  # pages are there from now on
        started.wait()
        until, num_copies = time.perf_counter() + seconds, 0
        while time.perf_counter() < until:
            np.copyto(target, source)
            num_copies += 1
        return 2 * source.nbytes * num_copies

    with ThreadPoolExecutor(count) as pool:
        copies = [pool.submit(moved_bytes) for _ in range(count)]
        started.wait()
        begun = time.perf_counter()
        return sum(copy.result() for copy in copies) / (time.perf_counter() - begun)


_NVIDIA = "name,memory.total,clocks.max.sm,power.limit,pcie.link.gen.max,pcie.link.width.max"

# A tool, and how it is asked for what `read_graphics` reads.
COMMANDS: dict[str, tuple[str, ...]] = {
    "nvidia-smi": ("nvidia-smi", f"--query-gpu={_NVIDIA}", "--format=csv,noheader,nounits"),
    "amd-smi": ("amd-smi", "static", "--asic", "--vram", "--json"),
    "rocm-smi": ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json"),
    "xpu-smi": ("xpu-smi", "discovery", "--dump", "1,2,16"),
    "system_profiler": ("system_profiler", "SPDisplaysDataType", "-json"),
}


@dataclass(frozen=True, slots=True)
class Graphics:
    """One GPU as reported by `tool`. clock_hz: fastest of its units; power_w: limit; pcie: as in tables, `4.0x16`."""

    name: str
    tool: str
    memory_bytes: float | None = None
    clock_hz: float | None = None
    power_w: float | None = None
    pcie: str | None = None


def read_graphics(tool: str, printed: str) -> list[Graphics]:
    """GPUs in the output of a tool of `COMMANDS`; none if it has another format."""
    readers = {"nvidia-smi": _nvidia, "amd-smi": _amd, "rocm-smi": _rocm, "xpu-smi": _xpu, "system_profiler": _apple}
    try:
        return list(readers[tool](printed))
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _number(text: Any, factor: float) -> float | None:
    match = re.search(r"\d+(?:\.\d+)?", str(text))
    return float(match[0]) * factor if match else None


def _nvidia(printed: str) -> Iterator[Graphics]:
    """`NVIDIA GeForce RTX 4090, 24564, 3105, 450.00, 4, 16`: MiB, MHz, W; `[N/A]` if unknown."""
    for line in printed.strip().splitlines():
        name, memory, clock, power, version, lanes = (part.strip() for part in line.split(","))
        is_linked = version.isdecimal() and lanes.isdecimal()
        pcie = f"{version}.0x{lanes}" if is_linked else None
        yield Graphics(name, "nvidia-smi", _number(memory, 2**20), _number(clock, 1e6), _number(power, 1), pcie)


def _amd(printed: str) -> Iterator[Graphics]:
    """A list of cards, or under `gpu_data`; memory in MB or with its unit."""
    result = json.loads(printed)
    for card in result["gpu_data"] if isinstance(result, dict) else result:
        size = card.get("vram", {}).get("size")
        size = size.get("value") if isinstance(size, dict) else size
        yield Graphics(str(card["asic"]["market_name"]), "amd-smi", _number(size, 2**20))


def _rocm(printed: str) -> Iterator[Graphics]:
    """`{"card0": {"Card Series": ..., "VRAM Total Memory (B)": ...}}`; capitalisation varies by version."""
    for name, card in json.loads(printed).items():
        facts = {key.lower(): value for key, value in card.items()} if name.startswith("card") else {}
        called = facts.get("card series") or facts.get("card model")
        if called:
            yield Graphics(str(called), "rocm-smi", _number(facts.get("vram total memory (b)"), 1))


def _xpu(printed: str) -> Iterator[Graphics]:
    """`Device ID,Device Name,Memory Physical Size`, then per card `0,"Intel(R) Arc(TM) ...","16 MiB"`."""
    head, *lines = (line.split(",") for line in printed.strip().splitlines())
    if "Device Name" not in [part.strip() for part in head]:
        return
    for _, name, size, *_ in lines:
        yield Graphics(name.strip(' "'), "xpu-smi", _number(size, 2**20))


def _apple(printed: str) -> Iterator[Graphics]:
    """Apple chips with their cores; others by name."""
    for card in json.loads(printed).get("SPDisplaysDataType", []):
        model, cores = str(card["sppci_model"]), card.get("sppci_cores")
        yield Graphics(f"{model} {cores}GPU" if cores else model, "system_profiler")


# What code can rely on, as /proc/cpuinfo calls it (x86's flags, Arm's features); behind the colon our name for it.
_X86 = "sse4_2:sse4 avx avx2 avx512f:avx512 avx_vnni avx512_vnni avx512_bf16 amx_tile:amx"
_ARM = "asimd:neon asimddp:dotprod i8mm bf16 sve sme"
_FLAGS = {flag: name or flag for flag, _, name in (entry.partition(":") for entry in f"{_X86} {_ARM}".split())}
_OLDER = {"sse4": "avx", "avx": "avx2"}  # what goes without saying beside the newer one


@dataclass(frozen=True, slots=True)
class Processor:
    """num_cores: of all sockets; num_performance_cores: the large ones of hybrid processors."""

    name: str  # as the system calls it; "" where it does not
    num_cores: int
    num_sockets: int = 1
    num_performance_cores: int | None = None
    instructions: tuple[str, ...] = ()
    memory_bytes: float | None = None  # that is installed
    clock_hz: float | None = None  # the highest that is named; None where none is


def from_cpuinfo(cpuinfo: str, meminfo: str = "", highest_khz: str = "") -> Processor:
    """Processor from the texts of /proc/cpuinfo, /proc/meminfo and cpufreq's cpuinfo_max_freq."""
    parted = ([line.partition(":") for line in block.splitlines()] for block in cpuinfo.strip().split("\n\n"))
    blocks = [{key.strip(): value.strip() for key, colon, value in lines if colon} for lines in parted]
    processors = [block for block in blocks if "processor" in block]
    cores = {(block.get("physical id"), block["core id"]) for block in processors if "core id" in block}
    known = {key: value for block in reversed(blocks) for key, value in block.items()}
    words = (known.get("flags") or known.get("Features") or "").split()
    names = [name for flag, name in _FLAGS.items() if flag in words]
    memory = re.search(r"MemTotal:\s+(\d+) kB", meminfo)
    clocks = [float(block["cpu MHz"]) * 1e6 for block in processors if "cpu MHz" in block]
    return Processor(
        name=known.get("model name") or known.get("Model") or known.get("Hardware") or "",
        num_cores=len(cores) or len(processors) or 1,
        num_sockets=len({block.get("physical id") for block in processors}) or 1,
        instructions=tuple(name for name in names if _OLDER.get(name) not in names),
        memory_bytes=float(memory[1]) * 1024 if memory else None,
        clock_hz=float(highest_khz) * 1e3 if highest_khz.strip() else max(clocks, default=None),
    )


def from_system_profiler(report: Mapping[str, Any]) -> Processor:
    """Processor from `system_profiler SPHardwareDataType -json`: cores as `proc 10:8:2`."""
    (about, *_) = report.get("SPHardwareDataType") or [{}]
    counts = [int(text) for text in re.findall(r"\d+", str(about.get("number_processors", "")))]
    total, large, small = (*counts, 0, 0, 0)[:3]
    name = str(about.get("chip_type") or about.get("cpu_type") or "")
    memory = re.match(r"(\d+) GB", str(about.get("physical_memory", "")))
    return Processor(
        name=f"{name} CPU {large}P{small}E" if small else name,
        num_cores=total or 1,
        num_performance_cores=large if small else None,
        instructions=("neon", "dotprod") if name.startswith("Apple") else ("avx2",),
        memory_bytes=float(memory[1]) * 2**30 if memory else None,
    )


_PATIENCE_S = 20.0  # for one tool: nvidia-smi without its daemon takes seconds to wake a GPU
_HIGHEST = "/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"


@dataclass(frozen=True, slots=True)
class Machine:
    """Processor, GPUs, and copy bandwidth of all cores."""

    processor: Processor
    graphics: tuple[Graphics, ...]
    copied_bytes_per_s: float


def this_machine(seconds: float = 2.0) -> Machine:
    """Detect this machine; the copy test takes `seconds`."""
    result: dict[str, list[Graphics]] = {}
    for tool, command in COMMANDS.items():
        printed = _printed(command)
        result[tool] = [] if printed is None else read_graphics(tool, printed)
    if result["amd-smi"]:
        result["rocm-smi"] = []  # the same cards, by the older tool
    graphics = tuple(card for cards in result.values() for card in cards)
    return Machine(_processor(), graphics, copy_bandwidth(seconds))


def _processor() -> Processor:
    cpuinfo = _text("/proc/cpuinfo")
    if cpuinfo:
        return from_cpuinfo(cpuinfo, _text("/proc/meminfo"), _text(_HIGHEST))
    printed = _printed(("system_profiler", "SPHardwareDataType", "-json"))
    if printed is not None:
        return from_system_profiler(json.loads(printed))
    return Processor(name=platform.processor(), num_cores=os.cpu_count() or 1)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _printed(command: tuple[str, ...]) -> str | None:
    """A tool's output; None if missing, failed or too slow."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


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


def _file(
    name: str, known: HardwareSpec, of_memory: Mapping[str, float | None], declared: Mapping[str, float | None]
) -> str:
    """File `name` of the device `known` with other figures of its outermost memory, and others that it declares."""
    main, *others = known.declared.memory
    memory = (main.model_copy(update=of_memory), *others)
    update = {"declared": known.declared.model_copy(update={**declared, "memory": memory})}
    return hardware_template(name, known.model_copy(update=update), is_here=True)


def _unknown_processor(machine: Machine) -> HardwareSpec:
    processor = machine.processor
    clock = round(processor.clock_hz or _ANY_CLOCK_HZ, -7)
    operations = next((count for name, count in _OPERATIONS.items() if name in processor.instructions), 8)
    capacity, bandwidth = processor.memory_bytes or _ANY_MEMORY_BYTES, round(machine.copied_bytes_per_s, -8)
    memory = MemoryLevel(level="hbm", capacity_bytes=capacity, bandwidth_bytes_per_s=bandwidth)
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

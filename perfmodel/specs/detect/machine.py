"""This machine, by what is there to ask: nothing is run that is not installed, and no answer is an error."""

__all__ = ["Machine", "this_machine"]

import json
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from perfmodel.specs.detect.copying import copy_bandwidth
from perfmodel.specs.detect.graphics import COMMANDS, Graphics, read_graphics
from perfmodel.specs.detect.processor import Processor, from_cpuinfo, from_system_profiler

_PATIENCE_S = 20.0  # for one tool: nvidia-smi without its daemon takes seconds to wake a GPU
_HIGHEST = "/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"


@dataclass(frozen=True, slots=True)
class Machine:
    """Its processor, its GPUs, and how many bytes a second all cores copy."""

    processor: Processor
    graphics: tuple[Graphics, ...]
    copied_bytes_per_s: float


def this_machine(seconds: float = 2.0) -> Machine:
    """What is found here; `seconds` is how long the copy test takes."""
    found: dict[str, list[Graphics]] = {}
    for tool, command in COMMANDS.items():
        printed = _printed(command)
        found[tool] = [] if printed is None else read_graphics(tool, printed)
    if found["amd-smi"]:
        found["rocm-smi"] = []  # the same cards, by the older tool
    graphics = tuple(card for cards in found.values() for card in cards)
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
    """What a tool prints; None where it is not there, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None

"""The processor of this machine, as the system describes it: /proc/cpuinfo on Linux, system_profiler on a Mac."""

__all__ = ["Processor", "from_cpuinfo", "from_system_profiler"]

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# How /proc/cpuinfo calls what code can rely on: x86's flags, Arm's features.
_FLAGS = {
    "sse4_2": "sse4",
    "avx": "avx",
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx_vnni": "avx_vnni",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx_tile": "amx",
    "asimd": "neon",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
    "sme": "sme",
}
_OLDER = {"sse4": "avx", "avx": "avx2"}  # what goes without saying beside the newer one


@dataclass(frozen=True, slots=True)
class Processor:
    """A machine's processors.

    name:          as the system calls it; "" where it does not
    num_cores:     of all sockets; num_performance_cores: of them the large ones, where there are two kinds
    memory_bytes:  that is installed
    clock_hz:      the highest that is named; None where none is
    """

    name: str
    num_cores: int
    num_sockets: int = 1
    num_performance_cores: int | None = None
    instructions: tuple[str, ...] = ()
    memory_bytes: float | None = None
    clock_hz: float | None = None


def from_cpuinfo(cpuinfo: str, meminfo: str = "", highest_khz: str = "") -> Processor:
    """The processor in the text of /proc/cpuinfo, with those of /proc/meminfo and of cpufreq's cpuinfo_max_freq."""
    blocks = [dict(_pairs(block)) for block in cpuinfo.strip().split("\n\n")]
    processors = [block for block in blocks if "processor" in block]
    cores = {(block.get("physical id"), block["core id"]) for block in processors if "core id" in block}
    known = {key: value for block in reversed(blocks) for key, value in block.items()}
    words = (known.get("flags") or known.get("Features") or "").split()
    found = [name for flag, name in _FLAGS.items() if flag in words]
    memory = re.search(r"MemTotal:\s+(\d+) kB", meminfo)
    clocks = [float(block["cpu MHz"]) * 1e6 for block in processors if "cpu MHz" in block]
    return Processor(
        name=known.get("model name") or known.get("Model") or known.get("Hardware") or "",
        num_cores=len(cores) or len(processors) or 1,
        num_sockets=len({block.get("physical id") for block in processors}) or 1,
        instructions=tuple(name for name in found if _OLDER.get(name) not in found),
        memory_bytes=float(memory[1]) * 1024 if memory else None,
        clock_hz=float(highest_khz) * 1e3 if highest_khz.strip() else max(clocks, default=None),
    )


def from_system_profiler(report: Mapping[str, Any]) -> Processor:
    """The processor in what `system_profiler SPHardwareDataType -json` prints: cores as `proc 10:8:2`."""
    (about, *_) = report.get("SPHardwareDataType") or [{}]
    counts = [int(each) for each in re.findall(r"\d+", str(about.get("number_processors", "")))]
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


def _pairs(block: str) -> list[tuple[str, str]]:
    lines = (line.partition(":") for line in block.splitlines())
    return [(key.strip(), value.strip()) for key, colon, value in lines if colon]

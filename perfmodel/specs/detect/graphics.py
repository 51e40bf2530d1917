"""GPUs as their makers' tools print them: nvidia-smi, rocm-smi, amd-smi, xpu-smi, system_profiler."""

__all__ = ["COMMANDS", "Graphics", "read_graphics"]

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    """One GPU, what its tool says of it, and which tool that was.

    clock_hz: the highest of its units; power_w: what it may draw; pcie: as a table has it, `4.0x16`
    """

    name: str
    tool: str
    memory_bytes: float | None = None
    clock_hz: float | None = None
    power_w: float | None = None
    pcie: str | None = None


def read_graphics(tool: str, printed: str) -> list[Graphics]:
    """The GPUs in what a tool of `COMMANDS` printed; none where that is not what the tool prints of GPUs."""
    readers = {
        "nvidia-smi": _nvidia,
        "amd-smi": _amd,
        "rocm-smi": _rocm,
        "xpu-smi": _xpu,
        "system_profiler": _apple,
    }
    try:
        return list(readers[tool](printed))
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _number(text: Any, factor: float) -> float | None:
    match = re.search(r"\d+(?:\.\d+)?", str(text))
    return float(match[0]) * factor if match else None


def _nvidia(printed: str) -> Iterator[Graphics]:
    """`NVIDIA GeForce RTX 4090, 24564, 3105, 450.00, 4, 16`: MiB, MHz, W; `[N/A]` where a figure is not known."""
    for line in printed.strip().splitlines():
        name, memory, clock, power, version, lanes = (part.strip() for part in line.split(","))
        is_linked = version.isdecimal() and lanes.isdecimal()
        pcie = f"{version}.0x{lanes}" if is_linked else None
        yield Graphics(name, "nvidia-smi", _number(memory, 2**20), _number(clock, 1e6), _number(power, 1), pcie)


def _amd(printed: str) -> Iterator[Graphics]:
    """A list of cards, or under `gpu_data`; the size of the memory as a number of MB or with its unit."""
    found = json.loads(printed)
    for card in found["gpu_data"] if isinstance(found, dict) else found:
        size = card.get("vram", {}).get("size")
        size = size.get("value") if isinstance(size, dict) else size
        yield Graphics(str(card["asic"]["market_name"]), "amd-smi", _number(size, 2**20))


def _rocm(printed: str) -> Iterator[Graphics]:
    """`{"card0": {"Card Series": ..., "VRAM Total Memory (B)": ...}}`; keys' capitals differ between versions."""
    for name, card in json.loads(printed).items():
        facts = {key.lower(): value for key, value in card.items()} if name.startswith("card") else {}
        called = facts.get("card series") or facts.get("card model")
        if called:
            yield Graphics(str(called), "rocm-smi", _number(facts.get("vram total memory (b)"), 1))


def _xpu(printed: str) -> Iterator[Graphics]:
    """`Device ID,Device Name,Memory Physical Size`, then a line for each card: `0,"Intel(R) Arc(TM) ...","16 MiB"`."""
    head, *lines = (line.split(",") for line in printed.strip().splitlines())
    if "Device Name" not in [part.strip() for part in head]:
        return
    for _, name, size, *_ in lines:
        yield Graphics(name.strip(' "'), "xpu-smi", _number(size, 2**20))


def _apple(printed: str) -> Iterator[Graphics]:
    """The chip and its cores; others than Apple's own by their name."""
    for card in json.loads(printed).get("SPDisplaysDataType", []):
        model, cores = str(card["sppci_model"]), card.get("sppci_cores")
        yield Graphics(f"{model} {cores}GPU" if cores else model, "system_profiler")

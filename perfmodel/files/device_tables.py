"""Device names in family tables, read line by line without parsing YAML; normalised spellings of device names.

Each row and each list of aliases is one line: `  rtx-4090: [128, ...]  # comment`."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from perfmodel.files.catalog import aliases_of, data_dir, list_names, looked_up, normal_name
from perfmodel.files.sandbox import read_limited_text

# What tools print around a name. CPUs: "11th Gen Intel(R) Core(TM) i7-1165G7 CPU @ 2.80GHz (tigerlake)", "AMD Ryzen 7
# 4700U with Radeon Graphics", "AMD Ryzen 9 5950X 16-Core Processor". GPUs: "NVIDIA GeForce RTX 3060 Laptop GPU", "GTX
# 1070 with Max-Q Design", "AMD Radeon 780M Graphics".
_AROUND = re.compile(
    r"\((?:r|tm)\)|[®™]"  # marks
    r"|\s*\([^)]*\)\s*$"  # what stands in brackets at the end
    r"|\s+@.*$|\s+w(?:ith|/)\s+radeon.*$"
    r"|^\d+th[ -]gen\s+",
    re.IGNORECASE,
)
_WORDS_BEFORE = re.compile(r"^(?:(?:cpu|gpu|nvidia|geforce|tesla|amd|radeon|intel|apple|google|arm)-)+(?=.)")
_WORDS_AFTER = re.compile(
    r"(?:-(?:gpu|igpu|cpu|apu|graphics|processor|generation|edition|design|accelerator|model-[a-z](?:-rev-[\d.-]+)?"
    r"|\d+-cores?|(?:two|dual|four|quad|six|eight)-core))+$"
)
_MAX_Q = re.compile(r"-with-(max-[qp])")
# Cores of Apple's chips, as Geekbench and LocalScore print them: "Apple M1 4P+4E+8GPU".
_CORES = re.compile(r"-\d+p\+\d+e\+(\d+gpu)$")
_SIZE = re.compile(r"^(?P<name>.+)-(?P<size>\d+)gb$")


def plain_name(name: str) -> str:
    """A device name without vendor and boilerplate, lower case with hyphens.

    `NVIDIA GeForce RTX 3060 Laptop GPU` -> `rtx-3060-laptop`; `Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz` ->
    `core-i7-8550u`."""
    while True:
        shorter = _AROUND.sub("", name)
        if shorter == name or not shorter.strip():
            break
        name = shorter
    plain = re.sub(r"-+", "-", normal_name(name)).strip("-")
    plain = _CORES.sub(r"-\1", plain)
    plain = _MAX_Q.sub(r"-\1", plain).replace("-cpu-", "-").replace("-generation-", "-")
    return _WORDS_AFTER.sub("", _WORDS_BEFORE.sub("", plain))


def split_size(name: str) -> tuple[str, int] | None:
    """(name, GB) of a name that ends in its memory, `rtx-4060-ti-16gb`; else None."""
    match = _SIZE.match(name)
    return None if match is None else (match["name"], int(match["size"]))


_MAX_BYTES = 2_000_000
_ROW = re.compile(r"^  (?P<name>[\w.+-]+):\s*\[(?P<cells>.*)\]\s*(?:#.*)?$")
_ARCHITECTURE = re.compile(r"\barchitecture: *([\w.+-]+)")
_ARCHITECTURE_COLUMN = re.compile(r"^columns: *\[ *architecture,", re.MULTILINE)
_BY_DEVICE = ("devices", "aliases")  # blocks of a table with one line for a device


class DeviceSource(NamedTuple):
    """Where a device is described."""

    file: Path
    name: str  # what a file of its own is called, or would be
    row: str | None = None  # its row, where `file` is a table; None for a file of its own
    size: int | None = None  # of its memory, GB, where the name asks for another than the usual one
    slice: str | None = None  # its MIG profile, where the name asks for a slice


def device_names() -> list[str]:
    """Sorted names of all devices, in files and rows."""
    return sorted([*list_names("hardware"), *(row.name for row in table_rows())])


def named(name: str) -> DeviceSource | None:
    """Device by normalised name or alias, or None."""
    known = _known()
    return known.get(normal_name(name)) or known.get(plain_name(name))


@cache
def table_rows() -> tuple[DeviceSource, ...]:
    """Every row of every table."""
    files = sorted(data_dir("families").glob("*.yaml"))
    return tuple(DeviceSource(file, row, row) for file in files for kind, row, _ in _entries(file) if kind == "devices")


@cache
def known_architectures() -> frozenset[str]:
    """`architecture` values of all devices and tables."""
    architectures: set[str] = set()
    for file in (*data_dir("hardware").glob("*.yaml"), *data_dir("families").glob("*.yaml")):
        text = read_limited_text(file, _MAX_BYTES)
        architectures.update(_ARCHITECTURE.findall(text))
        if _ARCHITECTURE_COLUMN.search(text):
            architectures.update(row.partition(",")[0].strip() for kind, _, row in _entries(file) if kind == "devices")
    return frozenset(architectures)


def lines_of(file: Path, row: str) -> Iterator[str]:
    """Lines of a table, with those about devices other than `row` blanked."""
    return (line if match is None or match["name"] == row else "" for line, _, match in _matched_lines(file))


def _entries(file: Path) -> Iterator[tuple[str, str, str]]:
    return ((block, match["name"], match["cells"]) for _, block, match in _matched_lines(file) if match is not None)


def _matched_lines(file: Path) -> Iterator[tuple[str, str, re.Match[str] | None]]:
    """(block, line, match) per line; match None if not about one device."""
    block = ""
    for line in read_limited_text(file, _MAX_BYTES).split("\n"):
        block = line.partition(":")[0] if line[:1].isalpha() else block
        yield line, block, _ROW.match(line) if block in _BY_DEVICE else None


@cache
def _known() -> dict[str, DeviceSource]:
    """Names and aliases, raw and normalised; files take precedence over rows."""
    known: dict[str, DeviceSource] = {}
    for device, spelling in _spellings():
        known.setdefault(normal_name(spelling), device)
        known.setdefault(plain_name(spelling), device)
    return known


def _spellings() -> Iterator[tuple[DeviceSource, str]]:
    for name in list_names("hardware"):
        file = looked_up("hardware", name)
        assert file is not None  # it was listed
        yield DeviceSource(file, name), name
    for alias, file in aliases_of("hardware").items():
        yield DeviceSource(file, file.stem), alias
    yield from ((row, row.name) for row in table_rows())
    for file in sorted({row.file for row in table_rows()}):
        for block, name, cells in _entries(file):
            if block == "aliases":
                yield from ((DeviceSource(file, name, name), alias.strip(" \"'")) for alias in cells.split(","))

"""Devices by name: from a file of their own or from a row of their family's table, under any usual spelling.

The name of a file costs one look at the folder. Of a table that has the name only the row itself is parsed.
"""

__all__ = ["DeviceSource", "counted_device", "find_device", "load_tables", "read_device"]

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.catalog import looked_up, unknown_name
from perfmodel.files.device_spelling import plain_name, split_size
from perfmodel.files.device_tables import TableRow, lines_of, named, table_rows
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import LoadedYaml, Positions, load_yaml, load_yaml_text
from perfmodel.specs.devices.family import DeviceFamily, device_data

_SLICE = re.compile(r"(?:^|[\W_])mig(?:[\W_]|$)|(?:^|[\W_])\d+g\.\d+gb(?:[\W_]|$)", re.IGNORECASE)
_COUNTED = re.compile(r"([1-9]\d{0,3})\s*x\s*(\S.*)")


@dataclass(frozen=True, slots=True)
class DeviceSource:
    """Where a device is described.

    name: what a file of its own is called, or would be
    row:  its row, where `file` is a table; None for a file of its own
    size: of its memory, GB, where the name asks for another than the usual one
    """

    file: Path
    name: str
    row: str | None = None
    size: int | None = None


def find_device(name_or_path: str | Path) -> DeviceSource:
    """Where the device meant by a name, an alias or a path is described.

    Names are compared without their maker and what drivers print around them (`plain_name`); one may end in a size of
    memory that the device comes with: `rtx-4060-ti-16gb`.

    Raises SpecError that names the nearest known names.
    """
    own = looked_up("hardware", name_or_path)
    if own is not None:
        return DeviceSource(own, own.stem)
    text = str(name_or_path)
    device = named(text)
    source = _of_size(plain_name(text)) if device is None else _source(device)
    if source is None:
        if _SLICE.search(text):
            raise SpecError(
                f"got {text!r}; slices of a GPU (MIG) are not modelled. Describe the slice's compute units, memory and "
                f"bandwidth as a device of its own: perfmodel hardware new my-slice --like h100-sxm-80gb."
            )
        count, name = counted_device(text)
        if count is not None and named(name) is not None:
            raise SpecError(
                f"got {text!r}, expected one device: write {name}, and engine.tensor_parallel_size={count} (the flag "
                f"--hardware {count}x{name} does both)."
            )
        raise unknown_name("hardware", text, more_names=[row.name for row in table_rows()])
    return source


def counted_device(text: str) -> tuple[int | None, str]:
    """(how many, the device) of `2xh100` or `8 x b200`; without a number None."""
    match = _COUNTED.fullmatch(text.strip())
    return (None, text.strip()) if match is None else (int(match[1]), match[2])


def read_device(source: DeviceSource) -> LoadedYaml:
    """What a device's file holds, or would hold: its lines are those of the file or of the row.

    Raises SpecError for a file that is missing or no YAML, and for a table that is none.
    """
    if source.row is None:
        return load_yaml(source.file)
    family, positions = _family_with(source.file, source.row)
    return LoadedYaml(device_data(family, source.row, source.size), positions)


def load_tables() -> dict[str, DeviceFamily]:
    """The tables of siblings by name. Raises SpecError for one that is malformed."""
    files = dict.fromkeys(row.file for row in table_rows())
    loaded = {file.stem: load_yaml(file) for file in files}
    return {name: parse(DeviceFamily, table.data, table.positions) for name, table in loaded.items()}


def _source(device: TableRow) -> DeviceSource:
    return DeviceSource(device.file, device.name, device.name if device.is_row else None)


def _of_size(plain: str) -> DeviceSource | None:
    """The device whose name stands before a size of memory that it comes with."""
    split = split_size(plain)
    device = None if split is None else named(split[0])
    if split is None or device is None:
        return None
    size, source = split[1], _source(device)
    if source.row is None:
        memory: Any = load_yaml(source.file).data["declared"]["memory"][0]["capacity_bytes"]
        return source if round(memory / 1e9) == size else None
    sizes = _family_with(source.file, source.row)[0].sizes(source.row)
    if size not in sizes:
        return None
    return source if size == sizes[0] else DeviceSource(source.file, f"{source.row}-{size}gb", source.row, size)


def _family_with(file: Path, row: str) -> tuple[DeviceFamily, Positions]:
    """A table with one of its rows, and where that stands: there may be hundreds of others."""
    loaded = load_yaml_text("\n".join(lines_of(file, row)), str(file))
    data = {key: value for key, value in loaded.data.items() if key != "aliases" or value is not None}
    return parse(DeviceFamily, data, loaded.positions), loaded.block(("devices",)).positions

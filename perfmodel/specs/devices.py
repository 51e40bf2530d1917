"""Devices by name in any usual spelling: from their own file or a row of a family table.

A lookup parses only the row, into the data of a file of its own. Derived figures are not written twice: bandwidth is
bus width x transfer rate; a peak is units x clock x operations per unit and clock."""

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from perfmodel.errors import SpecError
from perfmodel.files.base import CheckedSpec
from perfmodel.files.catalog import looked_up, unknown_name
from perfmodel.files.device_tables import DeviceSource, lines_of, named, plain_name, split_size, table_rows
from perfmodel.files.units import PositiveFloat
from perfmodel.files.validation import load_spec, parse
from perfmodel.files.yaml_loader import LoadedYaml, Positions, load_yaml, load_yaml_text

_Units = Literal["architecture", "instructions", "units", "cores", "e_cores", "clock_mhz", "e_clock_mhz"]
_Memory = Literal["memory_gb", "technology", "bus_bits", "channels", "gbit_s", "mt_s", "bandwidth_gb_s"]
Column = Literal[_Units, _Memory, "l2_mib", "l3_mib", "pcie", "tdp_w"]

# What a column of the table says: its place in `declared`, and the factor to its unit.
_PLACES: dict[str, tuple[str, float]] = {
    "architecture": ("architecture", 1),
    "instructions": ("instructions", 1),
    "units": ("compute_units", 1),
    "clock_mhz": ("clock_hz", 1e6),
    "memory_gb": ("memory.hbm.capacity_bytes", 1e9),
    "technology": ("memory.hbm.technology", 1),
    "bus_bits": ("memory.hbm.bus_width_bits", 1),
    "channels": ("memory.hbm.bus_width_bits", 64),
    "gbit_s": ("memory.hbm.transfers_per_s", 1e9),
    "mt_s": ("memory.hbm.transfers_per_s", 1e6),
    "bandwidth_gb_s": ("memory.hbm.bandwidth_bytes_per_s", 1e9),
    "l2_mib": ("memory.l2.capacity_bytes", 2.0**20),
    "l3_mib": ("memory.l3.capacity_bytes", 2.0**20),
    "tdp_w": ("tdp_w", 1),
}
_LEVELS = ("hbm", "l3", "l2", "sram", "tensor_memory", "registers")  # outermost first
# One way and lane, after its encoding. PCI-SIG: 8, 16 and 32 GT/s with 128b/130b (PCIe 3.0 to 5.0).
_PCIE_LANE = {"3.0": 0.984375e9, "4.0": 1.96875e9, "5.0": 3.9375e9}
_LISTS = {"memory": "level", "links": "name"}  # of named items
_BLOCKS = ("columns", "operations_per_clock", "e_operations_per_clock", "shared")


class DeviceFamily(CheckedSpec):
    """A table of devices that differ in figures only.

    operations_per_clock:   of one unit (a CPU's large core) in one clock, dense, by format; `vector`: fp32 without
                            matrix units, where that is less than fp32
    columns, devices:       the head of the table, and its rows by the device's name; ~ is a figure that there is not;
                            several sizes of memory are a list, the first of them the one that the name alone means
    exceptions:             what `declared` holds for one of them instead, by its name, or its `operations_per_clock`
    unconfirmed:            columns, `operations_per_clock` or `shared` as a whole, `columns` for all of them, or paths
                            as in a device's own file"""

    kind: Literal["gpu", "cpu", "tpu", "npu", "fpga"]
    maker: str
    source: str
    operations_per_clock: dict[str, PositiveFloat] = Field(min_length=1)
    e_operations_per_clock: dict[str, PositiveFloat] = Field(default={})  # the same of a small core
    shared: dict[str, Any]  # what `declared` holds for all of them
    columns: tuple[Column, ...]
    devices: dict[str, tuple[Any, ...]] = Field(min_length=1)
    aliases: dict[str, tuple[str, ...]] = Field(default={})
    exceptions: dict[str, dict[str, Any]] = Field(default={})
    unconfirmed: tuple[str, ...] = ()
    unconfirmed_devices: tuple[str, ...] = ()  # rows none of whose figures a document confirms

    def _conflicts(self) -> Iterator[str]:
        for name, cells in self.devices.items():
            if len(cells) != len(self.columns):
                yield f"devices.{name} has {len(cells)} figures; expected {len(self.columns)}: one a column"

    def cells(self, row: str) -> dict[str, Any]:
        """Cells of a row by column."""
        return {column: cell for column, cell in zip(self.columns, self.devices[row], strict=True) if cell is not None}

    def sizes(self, row: str) -> tuple[float, ...]:
        """Memory sizes of a device in GB, the usual one first."""
        cell = self.cells(row).get("memory_gb", [])
        return tuple(cell) if isinstance(cell, list) else (cell,)


def _device_data(family: DeviceFamily, row: str, size: float | None = None) -> dict[str, Any]:
    """File data of the device in `row`; `size`: memory in GB, default: the usual one."""
    cells, sizes = family.cells(row), family.sizes(row)
    is_usual = size is None or size in sizes[:1]
    if sizes:
        cells["memory_gb"] = sizes[0] if size is None else size
    declared = _merged(_by_name(copy.deepcopy(family.shared)), _from_cells(cells))
    exception = dict(family.exceptions.get(row, {}))
    _derive(declared, family, cells, exception.pop("operations_per_clock", family.operations_per_clock))
    declared = _merged(declared, _by_name(exception))
    declared["unconfirmed"] = [*_unconfirmed(family, row, cells, declared), *declared.get("unconfirmed", ())]
    for block, key in _LISTS.items():
        items: Any = declared.pop(block, {}).items()
        if block == "memory":
            items = sorted(items, key=lambda item: _LEVELS.index(item[0]))
        if items:
            declared[block] = [{key: name} | item for name, item in items]
    return {
        "name": row if is_usual else f"{row}-{size:g}gb",
        "kind": family.kind,
        "maker": family.maker,
        "aliases": list(family.aliases.get(row, ())) if is_usual else [],
        "declared": {"source": family.source} | declared,
    }


def _by_name(declared: Mapping[str, Any]) -> dict[str, Any]:
    """`declared` with lists as mappings by name."""
    named = {block: {item[key]: item for item in declared.get(block, ())} for block, key in _LISTS.items()}
    return {**declared, **{block: items for block, items in named.items() if items}}


def _merged(one: Any, other: Any) -> Any:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return other
    return {**one, **{key: _merged(one[key], value) if key in one else value for key, value in other.items()}}


def _from_cells(cells: Mapping[str, Any]) -> dict[str, Any]:
    declared: dict[str, Any] = {}
    for column, cell in cells.items():
        if column in _PLACES:
            path, factor = _PLACES[column]
            inner: Any = cell * factor if isinstance(cell, int | float) else cell
            for key in reversed(path.split(".")):
                inner = {key: inner}
            declared = _merged(declared, inner)
    if "cores" in cells:
        declared["compute_units"] = cells["cores"] + cells.get("e_cores", 0)
        if cells.get("e_cores"):
            declared["performance_cores"] = cells["cores"]
    if "pcie" in cells:
        version, _, lanes = str(cells["pcie"]).partition("x")
        declared["links"] = {"pcie": {"bandwidth_bytes_per_s": _PCIE_LANE[version] * int(lanes)}}
    return declared


def _derive(
    declared: dict[str, Any], family: DeviceFamily, cells: Mapping[str, Any], operations_per_clock: Mapping[str, float]
) -> None:
    """Fill in bandwidth and peaks that follow from other cells."""
    main = declared["memory"]["hbm"]
    if "bandwidth_bytes_per_s" not in main and {"bus_width_bits", "transfers_per_s"} <= main.keys():
        main["bandwidth_bytes_per_s"] = main["bus_width_bits"] * main["transfers_per_s"] / 8
    large = cells.get("units", cells.get("cores", 0)) * declared["clock_hz"]
    small = cells.get("e_cores", 0) * cells.get("e_clock_mhz", 0) * 1e6
    peaks = {
        name: large * operations + small * family.e_operations_per_clock.get(name, 0)
        for name, operations in operations_per_clock.items()
    }
    vector = peaks.pop("vector", peaks.get("fp32"))
    declared["peak_flops_per_s"] = peaks
    if vector is not None:
        declared["vector_flops_per_s"] = vector


def _unconfirmed(
    family: DeviceFamily, row: str, cells: Mapping[str, Any], declared: Mapping[str, Any]
) -> Iterator[str]:
    """Unconfirmed paths of the family's lists, with figures derived from them."""
    listed = set(family.unconfirmed)
    is_whole = "columns" in listed or row in family.unconfirmed_devices
    columns = set(cells) if is_whole else listed & set(cells)
    paths = {_PLACES[column][0] for column in columns if column in _PLACES and column != "architecture"}
    if columns & {"cores", "e_cores"}:
        paths.add("compute_units")
    if "pcie" in columns:
        paths.add("links.pcie.bandwidth_bytes_per_s")
    if columns & {"bus_bits", "channels", "gbit_s", "mt_s"}:
        paths.add("memory.hbm.bandwidth_bytes_per_s")
    if columns & {"units", "cores", "e_cores", "clock_mhz", "e_clock_mhz"} or "operations_per_clock" in listed:
        paths |= {f"peak_flops_per_s.{name}" for name in declared["peak_flops_per_s"]} | {"vector_flops_per_s"}
    if "shared" in listed:
        paths |= set(_figures(_by_name(family.shared)))
    yield from sorted(paths | (listed - set(_BLOCKS) - set(family.columns)))


def _figures(block: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in block.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}"


_SLICE = re.compile(r"(?:(?P<device>.*?)[\W_]+)?(?:mig[\W_]*)?(?P<profile>\d+g\.\d+gb)", re.IGNORECASE)
_COUNTED = re.compile(r"([1-9]\d{0,3})\s*x\s*(\S.*)")


def find_device(name_or_path: str | Path) -> DeviceSource:
    """Source of a device by name, alias or path. Raises SpecError with the nearest names.

    Names are compared by `plain_name` and may end in a memory size of the device, `rtx-4060-ti-16gb`, or in a MIG
    profile, `h100-sxm-80gb:3g.40gb`, `h100-mig-3g.40gb`."""
    own = looked_up("hardware", name_or_path)
    if own is not None:
        return DeviceSource(own, own.stem)
    text = str(name_or_path)
    source = named(text) or _of_size(plain_name(text))
    if source is None:
        if (part := _SLICE.fullmatch(text)) is not None:
            whole = find_device(part["device"]) if part["device"] else None
            if whole is None:
                raise SpecError(f"got {text!r}, a slice of a GPU; say of which, as in h100-sxm-80gb:{part['profile']}.")
            profile = part["profile"].lower()
            return whole._replace(name=f"{whole.name}:{profile}", slice=profile)
        count, name = counted_device(text)
        if count is not None and named(name) is not None:
            raise SpecError(
                f"got {text!r}; expected one device: write {name}, and engine.tensor_parallel_size={count} (the flag "
                f"--hardware {count}x{name} does both)."
            )
        raise unknown_name("hardware", text, more_names=[row.name for row in table_rows()])
    return source


def counted_device(text: str) -> tuple[int | None, str]:
    """(count, device) of `2xh100` or `8 x b200`; count None if absent."""
    match = _COUNTED.fullmatch(text.strip())
    return (None, text.strip()) if match is None else (int(match[1]), match[2])


def read_device(source: DeviceSource) -> LoadedYaml:
    """Data of a device with lines of its file or row. Raises SpecError for a missing or invalid file or table."""
    if source.row is None:
        return load_yaml(source.file)
    family, positions = _family_with(source.file, source.row)
    return LoadedYaml(_device_data(family, source.row, source.size), positions)


def load_tables() -> dict[str, DeviceFamily]:
    """Family tables by name. Raises SpecError for a malformed one."""
    return {row.file.stem: load_spec(DeviceFamily, row.file) for row in table_rows()}


def _of_size(plain: str) -> DeviceSource | None:
    """Device whose name precedes one of its memory sizes."""
    split = split_size(plain)
    source = None if split is None else named(split[0])
    if split is None or source is None:
        return None
    size = split[1]
    if source.row is None:
        memory: Any = load_yaml(source.file).data["declared"]["memory"][0]["capacity_bytes"]
        return source if round(memory / 1e9) == size else None
    sizes = _family_with(source.file, source.row)[0].sizes(source.row)
    if size not in sizes:
        return None
    return source if size == sizes[0] else DeviceSource(source.file, f"{source.row}-{size}gb", source.row, size)


def _family_with(file: Path, row: str) -> tuple[DeviceFamily, Positions]:
    """A table with one of its (perhaps hundreds of) rows, and its positions."""
    loaded = load_yaml_text("\n".join(lines_of(file, row)), str(file))
    data = {key: value for key, value in loaded.data.items() if key != "aliases" or value is not None}
    return parse(DeviceFamily, data, loaded.positions), loaded.block(("devices",)).positions

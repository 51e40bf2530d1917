"""`--set engine.max_num_seqs=64`, `--set hardware.hbm.bandwidth=2x`: changes to what the files say.

A value is read as YAML. `2x` and `0.5x` multiply the number that is there. Paths are those of the files; hardware has
short names as well (`hardware.hbm.bandwidth`, `hardware.nvlink.latency`, `hardware.bf16`, `hardware.price`), and
`hardware.nvlink=null` takes a link out: what talked over it takes the next one.
"""

__all__ = ["Override", "apply_override", "hardware_path", "is_removed_link", "parse_override"]

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.specs.hardware import Declared, HardwareSpec
from perfmodel.specs.validation import show_value
from perfmodel.specs.yaml_loader import Path, Positions, parse_value

_FACTOR = re.compile(r"(\d+(?:\.\d*)?|\.\d+)x")
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S.*)?")
_NOTHING = ("null", "~")
_LEVEL_FIELDS = {"bandwidth": "bandwidth_bytes_per_s", "capacity": "capacity_bytes", "visible": "visible_bytes"}
_LINK_FIELDS = {"bandwidth": "bandwidth_bytes_per_s", "latency": "latency_s"}
_DECLARED_FIELDS = {
    "clock": "clock_hz",
    "tdp": "tdp_w",
    "idle": "idle_w",
    "vector_flops": "vector_flops_per_s",
    "sparsity": "sparsity_speedup",
}


@dataclass(frozen=True, slots=True)
class Override:
    """One `--set`: the text, its path, and a value or a factor."""

    text: str
    path: tuple[str, ...]
    value: Any = None
    factor: float | None = None


def parse_override(text: str) -> Override:
    """`path.to.field=value`, or `path.to.field=2x`.

    Raises SpecError where there is no `=`, no path, or a value that is not YAML.
    """
    name, equals, value = text.partition("=")
    path = tuple(part.strip() for part in name.strip().split("."))
    if not equals or not all(path):
        raise SpecError(f"--set {text}: found no `field=value`; write it as in --set engine.max_num_seqs=64.")
    factor = _FACTOR.fullmatch(value.strip())
    if factor is not None:
        return Override(text, path, factor=float(factor[1]))
    return Override(text, path, value=parse_value(value, f"--set {text}"))


def apply_override(override: Override, data: dict[str, Any], path: Path, positions: Positions) -> None:
    """Change `data` in place at `path` (the override's, within `data`) and note in `positions` who did it.

    Mappings on the way are made where they are missing; whether the field exists is for validation to say.
    """
    target: Any = data
    for depth, key in enumerate(path[:-1]):
        if isinstance(target, dict) and target.get(str(key)) is None:
            target[str(key)] = {}
        target = _step(target, key, override, path[: depth + 1])
    last = _key(target, path[-1], override, path)
    if override.factor is None:
        target[last] = override.value
    else:
        found = target[last] if _has(target, last) else None
        target[last] = _scaled(found, override)
    positions.overridden[_resolved(data, path)] = override.text


def is_removed_link(override: Override, place: Path) -> bool:
    """Whether the override takes out the link at `place` of a hardware file."""
    is_link = len(place) == 3 and place[:2] == ("declared", "links") and isinstance(place[2], int)
    return is_link and override.factor is None and override.value is None


def hardware_path(path: tuple[str, ...], data: Mapping[str, Any], text: str) -> Path:
    """The place in a hardware file that a path after `hardware.` means: the file's own, or a short name's."""
    first, rest = path[0], path[1:]
    declared = data.get("declared")
    if first == "price":
        return ("price", *(rest or ("usd_per_hour",)))
    if first in HardwareSpec.model_fields or not isinstance(declared, Mapping):
        return _with_names(path, data)
    levels, links = _names(declared.get("memory"), "level"), _names(declared.get("links"), "name")
    peaks = declared.get("peak_flops_per_s")
    if first in levels:
        return ("declared", "memory", levels.index(first), *_short(rest, _LEVEL_FIELDS, first, text))
    if first in links:
        whole = not rest and text.partition("=")[2].strip() in _NOTHING
        return ("declared", "links", links.index(first), *(() if whole else _short(rest, _LINK_FIELDS, first, text)))
    if isinstance(peaks, Mapping) and first in peaks:
        return ("declared", "peak_flops_per_s", first)
    if first in _DECLARED_FIELDS or first in Declared.model_fields:
        return _with_names(("declared", _DECLARED_FIELDS.get(first, first), *rest), data)
    short = [*levels, *links, *(peaks or ())]
    near = did_you_mean(first, [*short, "price", *HardwareSpec.model_fields, *_DECLARED_FIELDS, *Declared.model_fields])
    more = near or f" Known: {', '.join(short)}, price, and the fields of the file."
    raise SpecError(f"--set {text}: hardware.{first}: unknown field.{more}")


def _with_names(path: tuple[str, ...], data: Any) -> Path:
    """Indices for the names of memory levels and links: declared.memory.hbm -> declared.memory.0."""
    result: list[str | int] = []
    for part in path:
        key: str | int = part
        if isinstance(data, list):
            names = [item.get("level", item.get("name")) if isinstance(item, dict) else None for item in data]
            key = names.index(part) if part in names else int(part) if part.isdecimal() else part
            data = data[key] if isinstance(key, int) and key < len(data) else None
        else:
            data = data.get(part) if isinstance(data, Mapping) else None
        result.append(key)
    return tuple(result)


def _short(rest: tuple[str, ...], fields: dict[str, str], owner: str, text: str) -> tuple[str, ...]:
    if len(rest) != 1:
        raise SpecError(f"--set {text}: hardware.{owner} needs a field: {', '.join(fields)}.")
    return (fields.get(rest[0], rest[0]),)


def _names(items: Any, key: str) -> list[Any]:
    return [item.get(key) for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _resolved(data: Any, path: Path) -> Path:
    """`path` with list positions as numbers, as validation reports them."""
    result: list[str | int] = []
    for key in path:
        index = int(key) if isinstance(data, list) and str(key).isdecimal() else key
        result.append(index)
        data = data[index]
    return tuple(result)


def _step(target: Any, key: str | int, override: Override, so_far: Path) -> Any:
    resolved = _key(target, key, override, so_far)
    return target[resolved]


def _key(target: Any, key: str | int, override: Override, so_far: Path) -> Any:
    """`key` as it indexes `target`, which must be a mapping or a list long enough."""
    if isinstance(target, dict):
        return str(key)
    if isinstance(target, list) and str(key).isdecimal() and int(key) < len(target):
        return int(key)
    where = ".".join(map(str, so_far[:-1]))
    if isinstance(target, list):
        raise SpecError(
            f"--set {override.text}: {where} is a list of {len(target)}; {key!r} is not a position in it (from 0)."
        )
    raise SpecError(f"--set {override.text}: {where} is {show_value(target)}, it has no field {key!r}.")


def _has(target: Any, key: Any) -> bool:
    return key in target if isinstance(target, dict) else True


def _scaled(found: Any, override: Override) -> Any:
    assert override.factor is not None
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        product = found * override.factor
        return int(product) if isinstance(found, int) and product == int(product) else product
    quantity = _QUANTITY.fullmatch(found) if isinstance(found, str) else None
    if quantity is None:
        raise SpecError(
            f"--set {override.text}: found {show_value(found)} to multiply, a number in the file is needed; "
            f"write the value itself."
        )
    return f"{float(quantity[1]) * override.factor!r} {quantity[2] or ''}".strip()

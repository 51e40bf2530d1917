"""`--set engine.max_num_seqs=64`, `--set hardware.hbm.bandwidth=2x`: overrides of file values.

Values are YAML; `2x` and `0.5x` multiply. Paths are the files'; hardware has short names (`hardware.hbm.bandwidth`,
`hardware.links.nvlink.latency` or `hardware.nvlink.latency`, `hardware.peak_flops.bf16` or `hardware.bf16`,
`hardware.price`); `hardware.peak_flops=2x` scales all rates, `hardware.nvlink=null` removes a link, whose traffic takes
the next one. List items go by position, name or role (`cluster.pools.decode.hardware.hbm.bandwidth=2x`)."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.files.validation import show_value
from perfmodel.files.yaml_loader import Path, Positions, parse_value
from perfmodel.specs.hardware import Declared, HardwareSpec, MemoryLevel
from perfmodel.specs.networks import Link

_FACTOR = re.compile(r"(\d+(?:\.\d*)?|\.\d+)x")
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S.*)?")
_NOTHING = ("null", "~")
_PEAKS = "peak_flops_per_s"
_BLOCKS = {"memory": "memory", "links": "links", "peak_flops": _PEAKS, _PEAKS: _PEAKS}
_SHORT = {
    "memory": {"bandwidth": "bandwidth_bytes_per_s", "capacity": "capacity_bytes", "visible": "visible_bytes"},
    "links": {"bandwidth": "bandwidth_bytes_per_s", "latency": "latency_s"},
}
_DECLARED_FIELDS = {
    "peak_flops": "peak_flops_per_s",
    "clock": "clock_hz",
    "tdp": "tdp_w",
    "idle": "idle_w",
    "vector_flops": "vector_flops_per_s",
    "sparsity": "sparsity_speedup",
}


class Override(NamedTuple):
    """One `--set`: text, path, and a value or factor."""

    text: str
    path: tuple[str, ...]
    value: Any = None
    factor: float | None = None


def parse_override(text: str) -> Override:
    """Parse `path=value` or `path=2x`. Raises SpecError without `=` or path, or for invalid YAML."""
    name, equals, value = text.partition("=")
    path = tuple(part.strip() for part in name.strip().split("."))
    if not equals or not all(path):
        raise SpecError(f"--set {text}: is no `field=value`; write it as in --set engine.max_num_seqs=64.")
    factor = _FACTOR.fullmatch(value.strip())
    if factor is not None:
        return Override(text, path, factor=float(factor[1]))
    return Override(text, path, value=parse_value(value, f"--set {text}"))


def as_overrides(setting: Mapping[str, Any]) -> tuple[str, ...]:
    """`{"engine.batching": "static"}` as `--set` arguments; factors stay factors (`2x`)."""
    return tuple(f"{field}={_as_text(value)}" for field, value in setting.items())


def _as_text(value: Any) -> str:
    """One-line YAML: JSON, with unambiguous words unquoted."""
    is_word = isinstance(value, str) and re.sub(r"[-_.]", "", value).isalnum() and parse_value(value, "--set") == value
    return value if is_word else json.dumps(value, ensure_ascii=False)


def apply_override(
    override: Override,
    data: dict[str, Any],
    path: Path,
    positions: Positions,
    default: Callable[[Path], Any] = lambda path: None,
) -> None:
    """Change `data` in place at `path` (the override's, within `data`) and note in `positions` who did it.

    default: what is multiplied where `data` has nothing at a path

    Mappings on the way are made where they are missing; whether the field exists is for validation to say."""
    target: Any = data
    place: Path = ()
    for depth, name in enumerate(path):
        if depth:
            if isinstance(target, dict) and target.get(place[-1]) is None:
                target[place[-1]] = {}
            target = target[place[-1]]
        place = (*place, _key(target, name, override, path[:depth]))
    last: Any = place[-1]
    if override.factor is None:
        target[last] = override.value
    else:
        present = target.get(last) if isinstance(target, dict) else target[last]
        target[last] = _scaled(default(path) if present is None else present, override, target)
    for inside in [other for other in positions.overridden if other[: len(place)] == place]:
        del positions.overridden[inside]  # what an earlier one set there is gone
    positions.overridden[place] = override.text


def _key(target: Any, key: str | int, override: Override, before: Path) -> str | int:
    """`key` behind `before` as an index of `target`, a mapping or a list long enough."""
    if isinstance(target, dict):
        return str(key)
    position = list_position(target, key)
    if position is not None:
        return position
    where = ".".join(map(str, before))
    if isinstance(target, list):
        raise SpecError(
            f"--set {override.text}: {where} is a list of {len(target)}; {key!r} is not a position in it (from 0), "
            f"nor a name there."
        )
    raise SpecError(f"--set {override.text}: {where} is {show_value(target)}, it has no field {key!r}.")


def _scaled(value: Any, override: Override, siblings: Any) -> Any:
    """`value` scaled; `siblings`: keys to suggest in errors."""
    assert override.factor is not None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        product = value * override.factor
        return int(product) if isinstance(value, int) and product == int(product) else product
    quantity = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if quantity is None:
        is_missing = value is None and isinstance(siblings, dict)
        near = did_you_mean(str(override.path[-1]), siblings) if is_missing else ""
        raise SpecError(
            f"--set {override.text}: got {show_value(value)} to multiply; expected a number in the file; "
            f"write the value itself.{near}"
        )
    return f"{float(quantity[1]) * override.factor!r} {quantity[2] or ''}".strip()


def hardware_places(override: Override, path: tuple[str, ...], data: Mapping[str, Any]) -> list[Path]:
    """Paths in a hardware file that an override changes: one, or all rates for `hardware.peak_flops=2x`."""
    declared = data.get("declared")
    if path not in (("peak_flops",), ("declared", "peak_flops_per_s")) or not isinstance(declared, Mapping):
        return [hardware_path(path, data, override.text)]
    if override.factor is None:
        return [("declared", "peak_flops_per_s")]
    rates: list[Path] = [("declared", "peak_flops_per_s", name) for name in declared.get("peak_flops_per_s") or {}]
    return [*rates, *([("declared", "vector_flops_per_s")] if declared.get("vector_flops_per_s") else [])]


def list_position(items: Any, key: str | int) -> int | None:
    """Index of `key` in a list: a position, name or role; None if absent or no list."""
    if not isinstance(items, list):
        return None
    if str(key).isdecimal():
        return int(key) if int(key) < len(items) else None
    named = ([item.get(field) if isinstance(item, dict) else None for item in items] for field in ("name", "role"))
    return next((names.index(key) for names in named if names.count(key) == 1), None)


def hardware_path(path: tuple[str, ...], data: Mapping[str, Any], text: str) -> Path:
    """Path in a hardware file for one after `hardware.`, full or short."""
    first, rest = path[0], path[1:]
    declared: Any = data.get("declared")
    if first == "price":
        return ("price", *(rest or ("usd_per_hour",)))
    if first in _BLOCKS and rest:
        block = _BLOCKS[first]
        items = declared.get(block) if isinstance(declared, Mapping) else None
        names = [*items] if isinstance(items, Mapping) else [*_names(items, "level"), *_names(items, "name")]
        known = [name for name in names if name is not None]
        if rest[0] not in known and not rest[0].isdecimal():
            near = did_you_mean(rest[0], known) or f" Known: {', '.join(known) or 'none'}."
            raise SpecError(f"--set {text}: hardware.{block}.{rest[0]}: unknown.{near}")
        fields = _SHORT.get(block, {})
        return _with_names(("declared", block, rest[0], *(fields.get(part, part) for part in rest[1:])), data)
    if first in HardwareSpec.model_fields or not isinstance(declared, Mapping):
        return _with_names(path, data)
    levels, links = _names(declared.get("memory"), "level"), _names(declared.get("links"), "name")
    peaks = declared.get("peak_flops_per_s")
    if first in levels:
        return ("declared", "memory", levels.index(first), _short(rest, "memory", first, text))
    if first in links:
        place: Path = ("declared", "links", links.index(first))
        is_removed = not rest and text.partition("=")[2].strip() in _NOTHING
        return place if is_removed else (*place, _short(rest, "links", first, text))
    if isinstance(peaks, Mapping) and first in peaks:
        return ("declared", "peak_flops_per_s", first)
    if first in _DECLARED_FIELDS or first in Declared.model_fields:
        return _with_names(("declared", _DECLARED_FIELDS.get(first, first), *rest), data)
    short = [*levels, *links, *(peaks or ()), "price"]
    near = did_you_mean(first, [*short, *HardwareSpec.model_fields, *_DECLARED_FIELDS, *Declared.model_fields])
    more = near or f" Known: {', '.join(short)}, and the fields of the file."
    raise SpecError(f"--set {text}: hardware.{first}: unknown field.{more}")


def _short(rest: tuple[str, ...], block: str, owner: str, text: str) -> str:
    fields = _SHORT[block]
    if len(rest) != 1:
        raise SpecError(f"--set {text}: hardware.{owner} needs a field: {', '.join(fields)}.")
    known = [*fields, *(MemoryLevel if block == "memory" else Link).model_fields]
    if rest[0] not in known:
        near = did_you_mean(rest[0], known) or f" Known: {', '.join(known)}."
        raise SpecError(f"--set {text}: hardware.{owner}.{rest[0]}: unknown field.{near}")
    return fields.get(rest[0], rest[0])


def _with_names(path: tuple[str, ...], data: Any) -> Path:
    """Indices for names of memory levels and links: declared.memory.hbm -> declared.memory.0."""
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


def _names(items: Any, key: str) -> list[Any]:
    return [item.get(key) for item in items if isinstance(item, dict)] if isinstance(items, list) else []

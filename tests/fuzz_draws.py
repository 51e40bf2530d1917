"""How inputs are drawn from a JSON Schema at its extremes, and how good ones are spoilt: slips, scales, some bytes."""

__all__ = ["JUNK", "damaged", "draw_into", "places_of", "scale", "spoil"]

import copy
import math
from functools import cache
from typing import Any

from hypothesis import strategies as st

from perfmodel.specs.json_schema import schema

JUNK: tuple[Any, ...] = (
    *(None, True, "", " ", "x", "nan", "-1", "1e999", "..", "../x", "/dev/zero", "\x00", "é\u202e", "x" * 5000, "1 ZB"),
    *(0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 1e-300, 1e300, 1e308, -1e308, 5e-324, 0.5, 3),
    *(math.nan, math.inf, -math.inf, [], {}, [[]], [{}], [None], {"": None}, {"x": {"x": {"x": 1}}}, [1] * 300),
)
_AMOUNTS = (0, 1, 2, 3, 7, 8, 64, 1000, 10**6, 10**9, 1e-12, 1e-6, 0.1, 0.5, 0.999, 1.5, 1e12, 1e15, 1e18)
_BYTES = (b"\xff" * 8, b"\0" * 8, b"[" * 3000, b"&a *a", b"\n")
_UNITS = ("B", "GB", "GB/s", "TB/s", "TFLOPS", "GHz", "s", "ms", "us", "h", "GiB")


# ------------------------------------------------------------------------------------------ from a JSON Schema


def _values(spec: Any, defs: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """What a schema allows, with a liking for its ends."""
    if "$ref" in spec:
        return _values(defs[spec["$ref"].rpartition("/")[2]], defs, depth)
    if "const" in spec or "enum" in spec:
        return st.sampled_from(spec.get("enum") or [spec["const"]])
    if "anyOf" in spec or "oneOf" in spec:
        return st.one_of([_values(each, defs, depth) for each in spec.get("anyOf") or spec["oneOf"]])
    kind = spec.get("type")
    if isinstance(kind, list) or kind in ("integer", "number"):
        return _numbers(spec, kind)
    if kind == "array":
        items = spec.get("items")
        if "prefixItems" in spec:
            return st.tuples(*(_values(each, defs, depth + 1) for each in spec["prefixItems"])).map(list)
        return st.lists(_values(items or {}, defs, depth + 1), min_size=spec.get("minItems", 0), max_size=3)
    if kind == "object":
        return _objects(spec, defs, depth)
    simple = {"boolean": st.booleans(), "null": st.none(), "string": _texts(spec)}
    return simple.get(kind, st.sampled_from(JUNK)) if isinstance(kind, str) else st.sampled_from(JUNK)


def _texts(spec: Any) -> st.SearchStrategy[Any]:
    usual = st.sampled_from(["auto", "fp8", "a", "none", "2:1", "bf16", "int4", "2026-03-10", "vllm", "sglang"])
    return st.one_of(st.sampled_from(spec["examples"]), usual) if spec.get("examples") else usual


def _numbers(spec: Any, kind: Any) -> st.SearchStrategy[Any]:
    low = spec.get("minimum", spec.get("exclusiveMinimum", 0))
    high = spec.get("maximum", spec.get("exclusiveMaximum", 10**18))
    if kind == "integer":
        least, most = math.ceil(low) + ("exclusiveMinimum" in spec), math.floor(high)
        allowed = [int(x) for x in _AMOUNTS if x == int(x) and least <= x <= most]
        return st.sampled_from([least, most, min(least + 1, most), *allowed])
    allowed_floats = [float(x) for x in _AMOUNTS if low <= x <= high]
    found = st.sampled_from([float(low), float(high), *allowed_floats])
    if kind == "number":
        return found
    return st.one_of(found, st.tuples(found, st.sampled_from(_UNITS)).map(lambda pair: f"{pair[0]:g} {pair[1]}"))


def _objects(spec: Any, defs: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
    fields = spec.get("properties", {})
    if not fields:
        inner = spec.get("additionalProperties")
        value = _values(inner, defs, depth + 1) if isinstance(inner, dict) else st.sampled_from(JUNK)
        return st.dictionaries(st.sampled_from(["bf16", "fp8", "a"]), value, max_size=2)
    needed = spec.get("required", [])
    others = [name for name in fields if name not in needed]
    few = st.lists(st.sampled_from(others), unique=True, max_size=2 if depth else 3) if others else st.just([])

    def filled(names: list[str]) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries({name: _values(fields[name], defs, depth + 1) for name in (*needed, *names)})

    return few.flatmap(filled)


@cache
def _schema(kind: str) -> dict[str, Any]:
    return schema(kind)


def draw_into(draw: st.DrawFn, data: dict[str, Any], kind: str, inside: tuple[str, ...] = ()) -> None:
    """Set a field of `data`, or of a block in it, to something that its schema allows.

    inside: the keys of the block of such a file that `data` is
    """
    whole = _schema(kind)
    defs, spec, target = whole.get("$defs", {}), whole, data
    for name in inside:
        spec = _block(spec["properties"][name], defs)
    while True:
        fields = spec.get("properties", {})
        name = draw(st.sampled_from(sorted(fields)))
        inner = _block(fields[name], defs)
        if inner is None or draw(st.integers(0, 3)) == 0:
            target[name] = draw(_values(fields[name], defs, 1))
            return
        if not isinstance(target.get(name), dict):
            target[name] = {}
        spec, target = inner, target[name]


def _block(spec: Any, defs: dict[str, Any]) -> Any:
    """The one object that a field may be, if its schema has fields."""
    options = spec.get("anyOf", [spec])
    found = [defs[each["$ref"].rpartition("/")[2]] if "$ref" in each else each for each in options]
    objects = [each for each in found if each.get("properties")]
    return objects[0] if len(objects) == 1 else None


# ------------------------------------------------------------------------------------------------ single slips


def places_of(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = data.items() if isinstance(data, dict) else enumerate(data[:40]) if isinstance(data, list) else ()
    return [place for key, value in keys for place in [(*path, key), *places_of(value, (*path, key))]]


def spoil(draw: st.DrawFn, data: Any) -> Any:
    """One value replaced, one key left out, misspelt or moved."""
    places = places_of(data)
    if not places:
        return draw(st.sampled_from(JUNK))
    *inside, last = draw(st.sampled_from(places))
    target = _at(data, tuple(inside))
    slip = draw(st.integers(0, 9))
    if slip < 7:
        target[last] = copy.deepcopy(draw(st.sampled_from(JUNK)))
    elif slip < 9 or not isinstance(target, dict):
        del target[last]
    else:
        target[f"{last}s"] = target.pop(last)
    return data


def scale(draw: st.DrawFn, data: Any) -> Any:
    """A number many times larger or smaller, whole numbers kept whole."""
    found = [(path, value) for path in places_of(data) if _is_number(value := _at(data, path))]
    if found:
        (*inside, last), value = draw(st.sampled_from(found))
        factor = 10.0 ** draw(st.sampled_from([-12, -9, -6, -3, -1, 1, 3, 6, 9, 12]))
        _at(data, tuple(inside))[last] = max(int(value * factor), 1) if isinstance(value, int) else value * factor
    return data


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def damaged(draw: st.DrawFn, raw: bytes, most: int = 3) -> bytes:
    """A few bytes changed, put in, or the end cut off."""
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, len(raw)))
        chunk = draw(
            st.one_of(st.binary(max_size=8), st.sampled_from([b"\xff" * 8, b"\0" * 8, b"[" * 3000, b"&a *a", b"\n"]))
        )
        what = draw(st.integers(0, 2))
        raw = (raw[:at], raw[:at] + chunk + raw[at:], raw[:at] + chunk + raw[at + len(chunk) :])[what]
    return raw

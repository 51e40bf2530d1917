"""A new device's file: the template beside this module, every field explained, with a known one's figures."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from string import Template

from perfmodel.errors import SpecError
from perfmodel.files.base import as_file_name
from perfmodel.files.units import shortest_amount
from perfmodel.specs.hardware import HardwareSpec, MemoryLevel
from perfmodel.specs.networks import Link

_LEVEL = (
    *("level", "capacity_bytes", "visible_bytes", "bandwidth_bytes_per_s", "per", "bus_width_bits"),
    *("transfers_per_s", "unified", "device_share", "technology", "inline_ecc"),
)
_LINK = ("name", "bandwidth_bytes_per_s", "direction", "latency_s", "peer_to_peer", "topology")
_UNITS = {"capacity_bytes": "B", "visible_bytes": "B", "bandwidth_bytes_per_s": "B/s"}
_UNITS |= {"transfers_per_s": "Hz", "latency_s": "s"}


def hardware_template(name: str, like: HardwareSpec, is_here: bool = False) -> str:
    """YAML of device `name` with the figures of `like`. Raises SpecError for an invalid file name.

    is_here: `like` is this machine's device, so its visible memory is known"""
    try:
        as_file_name(name)
    except ValueError as error:
        raise SpecError(f"hardware new {name[:60]!r}: {error}.") from None
    text = Path(__file__).with_name("device.yaml.template").read_text(encoding="utf-8")
    values = {name: value for name, value in _values(name, like, is_here).items() if value is not None}
    lines = (Template(line) for line in text.splitlines(keepends=True))
    return "".join(line.substitute(values) for line in lines if values.keys() >= set(line.get_identifiers()))


def _values(name: str, like: HardwareSpec, is_here: bool) -> dict[str, str | None]:
    """What the template has places for; a line whose value is None is left out."""
    declared, main = like.declared, like.declared.peak_flops_per_s
    about = f"A device that nobody has described yet. The figures are those of {like.name}: replace each by what the"
    if is_here:
        about = f"What this machine says of itself, and for the rest what is known of {like.name}."
    source = f"this machine; {declared.source}" if is_here else "REPLACE: vendor, document, year"
    cores = declared.performance_cores
    others = ", ".join(f"{form}: {speedup:g}" for form, speedup in declared.sparsity_speedups.items())
    memory, links = list[str](), list[str]()
    for level in declared.memory:
        always = [*(["device_share"] if level.unified else []), *(["inline_ecc"] if level.technology else [])]
        memory += _item(level, [field for field in _LEVEL if is_here or field != "visible_bytes"], always)
    for link in declared.links:
        links += _item(link, _LINK, ("direction", "latency_s"))
    plain = ("compute_units", "compile_target", "max_devices", "exponentials_per_clock", "sparsity_speedup")
    figures = {field: getattr(declared, field) for field in (*plain, "tdp_w", "idle_w")}
    return {
        **{key: f"{x:g}" if isinstance(x, float) else x and str(x) for key, x in figures.items()},
        "about": about,
        "units": "" if is_here else "vendor's datasheet says. ",
        **{"name": name, "kind": like.kind, "maker": like.maker or "somebody", "source": json.dumps(source)},
        "architecture": declared.architecture or "my-own",
        "performance_cores": f"{'' if cores else '# '}performance_cores: {cores or 8}",
        "instructions": f"[{', '.join(declared.instructions)}]",
        "clock_hz": shortest_amount(declared.clock_hz, "Hz"),
        "peaks": "\n".join(f"    {dtype}: {shortest_amount(rate, 'FLOPS')}" for dtype, rate in main.items()),
        "vector_flops_per_s": shortest_amount(declared.vector_flops_per_s or main.get("fp32", 0.0), "FLOPS"),
        "sparsity_speedups": f"{'' if others else '# '}sparsity_speedups: {{{others or 'fp4: 1'}}}",
        "memory": "\n".join(memory),
        "links": "\n".join(["", *links]) if links else " []",
        "unconfirmed": f"[{', '.join(declared.unconfirmed) if is_here else 'idle_w'}]",
    }


def _item(item: MemoryLevel | Link, fields: Collection[str], always: Collection[str]) -> Iterator[str]:
    """YAML lines of an item: non-default `fields`, and `always` ones."""
    dash = "- "
    for field in fields:
        value = getattr(item, field)
        if field not in always and value == type(item).model_fields[field].default:
            continue
        if field in _UNITS:
            value = shortest_amount(value, _UNITS[field])
        elif isinstance(value, bool):
            value = str(value).lower()
        yield f"    {dash}{field}: {f'{value:g}' if isinstance(value, float) else value}"
        dash = "  "

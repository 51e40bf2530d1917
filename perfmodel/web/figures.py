"""Numbers on the page with their place in a command's JSON; form fields.

A figure is a `data` element: text to the digits that its interval allows, `value` the exact number, `data-path` its
place in the JSON, for tests and readers. Defaults are not stated here: they are those of the engine's version on the
device, as resolved by an answer."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup
from pydantic import model_validator

from perfmodel.commands.request import SCENARIO_FLAGS
from perfmodel.files.base import Spec
from perfmodel.files.validation import load_spec
from perfmodel.planning.metrics import metric_of
from perfmodel.report.numbers import MISSING, format_metric, format_number, format_short, format_si, is_number
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.json_schema import meanings_of

_KEPT = 10  # steps of the last digit in an interval, at least


def figure(data: Any, path: str, form: str = "") -> Markup:
    """Element for the number at `path`. form: of NUMBER_FORMS, else that of the last part's metric, with interval."""
    value = value_at(data, path)
    text = NUMBER_FORMS[form](value) if form else _metric(data, path, value)
    raw = "" if value is None else repr(value) if isinstance(value, float) else str(value)
    element = Markup('<data class="figure" value="{}" data-path="{}" data-form="{}">{}</data>')
    return element.format(raw, path, form, text)


def value_at(data: Any, path: str) -> Any:
    """Value at `a.b.0` of JSON, or None."""
    for part in path.split(".") if path else ():
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, Sequence) and not isinstance(data, str) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data


def shown_number(value: float | None, interval: Sequence[float] | None, most_digits: int) -> str:
    """A number with the digits that its interval (low, high; or None) supports, at most `most_digits` decimals; beyond
    that zeros replace insignificant digits."""
    if not is_number(value):
        return MISSING
    if interval is None or not all(is_number(item) for item in interval) or interval[1] <= interval[0]:
        return format_number(value, most_digits)
    digits = -math.floor(math.log10((interval[1] - interval[0]) / _KEPT) + 1e-9)
    return format_number(round(value, digits), min(max(digits, 0), most_digits))


def _metric(data: Any, path: str, value: Any) -> str:
    key = path.rpartition(".")[2]
    metric, interval = metric_of(key), value_at(data, f"interval.{key}")
    if not is_number(value):
        return MISSING
    if interval is None:
        return f"{format_metric(metric, value)} {metric.unit}".strip()
    scaled = [item * metric.scale for item in interval]
    return f"{shown_number(value * metric.scale, scaled, metric.digits)} {metric.unit}".strip()


def _in(unit: str, scale: float = 1.0, digits: int = 1) -> Callable[[Any], str]:
    return lambda value: f"{format_number(value * scale, digits)} {unit}" if is_number(value) else MISSING


NUMBER_FORMS: Mapping[str, Callable[[Any], str]] = {
    "bytes": lambda value: format_si(value, "B"),
    "bandwidth": lambda value: format_si(value, "B/s"),
    "flops": lambda value: format_si(value, "FLOP"),
    "flop_rate": lambda value: format_si(value, "FLOP/s"),
    "count": lambda value: format_number(value, 0),
    "short": format_short,
    "seconds": lambda value: format_si(value, "s"),
    "ms": _in("ms"),
    "latency_ms": lambda value: format_si(value / 1e3, "s") if is_number(value) else MISSING,
    "tok_s": lambda value: f"{format_short(value)} tok/s" if is_number(value) else MISSING,
    "percent": _in("%", 100),
    "usd": lambda value: f"${format_number(value, 2)}" if is_number(value) else MISSING,
    "rate": _in("req/s", 1, 2),
    "req_s": lambda value: f"{format_short(value)} req/s" if is_number(value) else MISSING,
    "watts": _in("W", 1, 0),
    "joules": _in("J", 1, 2),
    "factor": lambda value: f"{value:.2f}x" if is_number(value) else MISSING,
    "text": lambda value: MISSING if value is None else str(value),
}


class Field(Spec):
    """One form field. key: of the page's state; help: meaning in one sentence. choices: values, or the kind of a
    catalogue of names; resolved: path of the effective value in the resolved scenario; low, high, step: sliders are
    logarithmic unless `is_even`; unit: as displayed"""

    key: str
    label: str = ""
    kind: Literal["text", "names", "choice", "number", "slider", "switch"]
    help: str = ""
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    step: float = 0
    unit: str = ""
    resolved: str = ""
    is_even: bool = False

    @model_validator(mode="before")
    @classmethod
    def _with_what_it_stands_for(cls, own: dict[str, Any]) -> dict[str, Any]:
        """Flags of the command line and arguments of the engine bring their names and meanings along."""
        block, _, name = own["key"].rpartition(".")
        if block == "engine":
            meaning = meanings_of(EngineSpec).get(name, "")  # empty in a Python without docstrings
            help_text = meaning and f"{meaning[:1].upper()}{meaning[1:]}."
            return {"label": name, "help": help_text, "resolved": own["key"], **own}
        names = SCENARIO_FLAGS[name].completes if not block else ""
        return {"label": name, **({"choices": (names,)} if names else {}), **own}


class FieldGroup(Spec):
    """Fields under a heading; `is_open`: initially expanded."""

    name: str
    fields: tuple[Field, ...]
    is_open: bool = True


class _Form(Spec):
    groups: tuple[FieldGroup, ...]


GROUPS = load_spec(_Form, Path(__file__).with_name("fields.yaml")).groups


@cache
def choices_of(kind: str) -> tuple[str, ...]:
    """Sorted names of a catalogue."""
    from perfmodel.files.catalog import Kind as Catalog
    from perfmodel.files.catalog import list_names
    from perfmodel.files.device_tables import device_names
    from perfmodel.specs.engine.description import load_engine_description
    from perfmodel.specs.hardware import listed_grids

    if kind == "versions":
        described = [load_engine_description(name).versions for name in choices_of("engines")]
        return tuple(dict.fromkeys(version for versions in described for version in reversed(versions)))
    if kind == "regions":
        return tuple(sorted(listed_grids().gco2_per_kwh))
    if kind == "hardware":
        return tuple(device_names())
    catalogs: Mapping[str, Catalog] = {"models": "models", "traffic": "traffic", "engines": "engines"}
    names = list_names(catalogs[kind])
    return tuple(name for name in names if not name.startswith("tiny-"))


def default_of(field: Field, scenario: Any) -> str:
    """Effective value of an empty field in a resolved scenario."""
    value = value_at(scenario, field.resolved) if field.resolved else None
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)

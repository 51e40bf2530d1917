"""Numbers on the page with their place in a command's JSON; form fields.

A figure is a `data` element: text to the digits that its interval allows, `value` the exact number, `data-path` its
place in the JSON, for tests and readers. Defaults are not stated here: they are those of the engine's version on the
device, as resolved by an answer."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from markupsafe import Markup

from perfmodel.commands.request import FLAG_FIELDS, SCENARIO_FLAGS
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


Kind = Literal["text", "names", "choice", "number", "slider", "switch"]


@dataclass(frozen=True, slots=True)
class Field:
    """One form field. key: of the page's state; help: meaning in one sentence. choices: values, or the kind of a
    catalogue of names; resolved: path of the effective value in the resolved scenario; low, high, step: sliders are
    logarithmic unless `is_even`; unit: as displayed"""

    key: str
    label: str
    kind: Kind
    help: str
    choices: Sequence[str] = ()
    low: float = 0
    high: float = 0
    step: float = 0
    unit: str = ""
    resolved: str = ""
    is_even: bool = False


@dataclass(frozen=True, slots=True)
class FieldGroup:
    """Fields under a heading; `is_open`: initially expanded."""

    name: str
    fields: Sequence[Field]
    is_open: bool = True


def _engine(name: str, kind: Kind, choices: Sequence[str] = (), **more: Any) -> Field:
    meaning = meanings_of(EngineSpec).get(name, "")  # empty in a Python without docstrings
    meaning = f"{meaning[:1].upper()}{meaning[1:]}." if meaning else ""
    return Field(f"engine.{name}", name, kind, meaning, choices, resolved=f"engine.{name}", **more)


_POWERS = ("1", "2", "4", "8", "16", "32", "64")


def _flag(key: str, label: str, kind: Kind, meaning: str, **more: Any) -> Field:
    """Field of a command-line flag; names are those of shell completion."""
    names = SCENARIO_FLAGS[key].completes
    return Field(key, label, kind, meaning, (names,) if names else (), **more)


_MODEL = "A model of the catalog or a Hub id that it knows; or drop a config.json or a GGUF file on the page."
_REPLICAS = "Copies of the deployment behind a router."
_TRAFFIC, _PRICE = "Arrivals, prompt and answer lengths, by name.", "What a device costs in an hour."
_RATE = {"low": 0.1, "high": 200, "unit": "req/s", "resolved": FLAG_FIELDS["rate"]}
_TTFT = "Time to first token that 90 % of requests are to keep within, as in 500ms or 1s."
GROUPS: Sequence[FieldGroup] = (
    FieldGroup(
        "Deployment",
        (
            _flag("model", "model", "names", _MODEL, resolved="model.name"),
            _flag("hardware", "hardware", "names", "The device, by its name or an alias.", resolved="hardware.name"),
            _engine("tensor_parallel_size", "choice", _POWERS),
            Field("cluster.replicas", "replicas", "number", _REPLICAS, (), 1, 10_000, 1, resolved="cluster.replicas"),
        ),
    ),
    FieldGroup(
        "Traffic",
        (
            _flag("traffic", "traffic", "names", _TRAFFIC, resolved="traffic.name"),
            _flag("rate", "request rate", "slider", "Requests that arrive in a second, on average.", **_RATE),
        ),
    ),
    FieldGroup(
        "Service level",
        (
            _flag("ttft", "TTFT limit", "text", _TTFT),
            _flag("tpot", "TPOT limit", "text", "Time per output token after the first, kept likewise, as in 40ms."),
            _flag("e2e", "E2E limit", "text", "Time until the last token, kept likewise, as in 20s."),
        ),
    ),
    FieldGroup(
        "Engine arguments",
        (
            _engine("profile", "names", ("engines",)),
            _engine("version", "names", ("versions",)),
            _engine("pipeline_parallel_size", "choice", _POWERS),
            _engine("data_parallel_size", "choice", _POWERS),
            _engine("enable_expert_parallel", "switch"),
            _engine("quantization", "choice", ("fp8", "w4a16", "awq", "gptq", "int8", "w8a16", "nvfp4", "mxfp4")),
            _engine("kv_cache_dtype", "choice", ("auto", "fp8", "int8")),
            _engine("max_num_seqs", "slider", low=1, high=4096),
            _engine("max_num_batched_tokens", "slider", low=256, high=65_536),
            _engine("max_model_len", "text"),
            _engine("gpu_memory_utilization", "slider", low=0.1, high=1.0, step=0.01, is_even=True),
            _engine("enable_prefix_caching", "switch"),
            _engine("enable_chunked_prefill", "switch"),
            _engine("async_scheduling", "switch"),
            _engine("enforce_eager", "switch"),
            Field("price.usd_per_gpu_hour", "price", "number", _PRICE, (), 0, 1000, 0.01, "USD/h"),
        ),
        is_open=False,
    ),
)


@cache
def choices_of(kind: str) -> tuple[str, ...]:
    """Sorted names of a catalogue."""
    from perfmodel.files.catalog import Kind as Catalog
    from perfmodel.files.catalog import list_names
    from perfmodel.files.device_tables import device_names
    from perfmodel.specs.engine.description import load_engine_description

    if kind == "versions":
        described = [load_engine_description(name).versions for name in choices_of("engines")]
        return tuple(dict.fromkeys(version for versions in described for version in reversed(versions)))
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

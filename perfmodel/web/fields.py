"""The fields of the form: what is asked of a deployment, in vLLM's names, with what each means and the values it takes.

What a field takes by default is not said here: it is that of the engine's version on the device, as answers resolve it.
"""

__all__ = ["GROUPS", "Field", "FieldGroup", "choices_of", "default_of"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.json_schema import meanings_of
from perfmodel.web.figures import value_at

Kind = Literal["text", "names", "choice", "number", "slider", "switch"]


@dataclass(frozen=True, slots=True)
class Field:
    """One field. key: of the page's state; help: what it means, in one sentence

    choices: values of a choice; where names are chosen from a catalog, its kind
    low, high, step: of numbers; sliders move evenly in the logarithm unless `is_even`
    unit:            of the number, as shown beside it
    resolved:        where the scenario as resolved has the value that counts
    """

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
    """Fields under one heading; `is_open`: shown from the beginning."""

    name: str
    fields: Sequence[Field]
    is_open: bool = True


def _engine(name: str, kind: Kind, choices: Sequence[str] = (), **more: Any) -> Field:
    meaning = meanings_of(EngineSpec).get(name, "")  # of a Python without docstrings nothing
    meaning = f"{meaning[:1].upper()}{meaning[1:]}." if meaning else ""
    return Field(f"engine.{name}", name, kind, meaning, choices, resolved=f"engine.{name}", **more)


_POWERS = ("1", "2", "4", "8", "16", "32", "64")

GROUPS: Sequence[FieldGroup] = (
    FieldGroup(
        "Deployment",
        (
            Field(
                *("model", "model", "names"),
                "A model of the catalog or a Hub id that it knows; or drop a config.json or a GGUF file on the page.",
                ("models",),
            ),
            Field("hardware", "hardware", "names", "The device, by its name or an alias.", ("hardware",)),
            _engine("tensor_parallel_size", "choice", _POWERS),
            Field(
                *("cluster.replicas", "replicas", "number"),
                "Copies of the deployment behind a router.",
                low=1,
                high=10_000,
                step=1,
                resolved="cluster.replicas",
            ),
        ),
    ),
    FieldGroup(
        "Traffic",
        (
            Field(
                "traffic",
                "traffic",
                "names",
                "Arrivals, prompt and answer lengths, by name.",
                ("traffic",),
                resolved="traffic.name",
            ),
            Field(
                *("rate", "request rate", "slider", "Requests that arrive in a second, on average."),
                low=0.1,
                high=200,
                unit="req/s",
                resolved="traffic.arrivals.rate",
            ),
        ),
    ),
    FieldGroup(
        "Service level",
        (
            Field(
                "ttft",
                "TTFT limit",
                "text",
                "Time to first token that 90 % of requests are to keep within, as in 500ms or 1s.",
            ),
            Field("tpot", "TPOT limit", "text", "Time per output token after the first, kept likewise, as in 40ms."),
            Field("e2e", "E2E limit", "text", "Time until the last token, kept likewise, as in 20s."),
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
            Field(
                *("price.usd_per_gpu_hour", "price", "number", "What a device costs in an hour."),
                low=0,
                high=1000,
                step=0.01,
                unit="USD/h",
            ),
        ),
        is_open=False,
    ),
)


@cache
def choices_of(kind: str) -> tuple[str, ...]:
    """The names of a catalog, sorted."""
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
    """What counts where the field is left empty: of the scenario as an answer resolved it."""
    value = value_at(scenario, field.resolved) if field.resolved else None
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)

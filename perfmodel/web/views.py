"""Views of the page: the requests of each part, and their templates.

Figures are of the whole run; plots of many runs use fewer requests for speed, and templates label these previews. The
requested rate is not part of a curve's request: within a range only its mark moves."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import floor, log10
from typing import Any

from perfmodel.commands.catalog import HardwareShowRequest, ScenariosListRequest, TechniquesRequest
from perfmodel.commands.request import LIMITS, CommandRequest, count
from perfmodel.commands.runs import ExplainRequest, MemoryRequest, SimulateRequest
from perfmodel.commands.searches import PlanRequest, WhatIfRequest
from perfmodel.errors import SpecError
from perfmodel.files.units import parse_quantity
from perfmodel.web.figures import value_at
from perfmodel.web.jobs import Lane
from perfmodel.web.state import PageState, request_of


@dataclass(frozen=True, slots=True)
class ViewPart:
    """Part of a view, rendered by `templates/views/<view>/<name>.html`, else `views/any.html`.

    ask:     requests in the order of the template's `findings`
    lane:    of workers; None: closed forms, answered with the page
    on_demand: starts on a click of `button`, described by `help`
    shows_refusals: the template also shows refusals
    later:   deferred requests in the long lane, started once the part is shown, and the `later` of its template
    is_kept: keep rendered content while requests are unchanged; for templates that show only answers
    drawn:   document block kinds that the template renders itself"""

    name: str
    ask: Callable[[PageState], Sequence[CommandRequest]]
    lane: Lane | None = None
    on_demand: bool = False
    button: str = "Start"
    help: str = ""
    shows_refusals: bool = False
    later: Callable[[PageState], Sequence[CommandRequest]] | None = None
    is_kept: bool = False
    drawn: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """One page, with the fields of `<view>/controls.html` if there is one. lead: the question it answers"""

    name: str
    title: str
    lead: str
    parts: Sequence[ViewPart]


_COUNT, _DURATION = "traffic.num_requests", "traffic.duration_s"


def whole_run(state: PageState) -> CommandRequest:
    """The deployment under its traffic, as `perfmodel simulate`: one run, shared by all views."""
    return request_of(SimulateRequest, state)


def fewer_requests(state: PageState, num_requests: int) -> tuple[str, ...]:
    """`--set` value that bounds traffic; none where the page sets a count or duration."""
    return (f"{_COUNT}={num_requests}",) if is_preview(state) else ()


def is_preview(state: PageState) -> bool:
    """Whether plots of many runs use fewer requests than the whole run."""
    return not (state.get(_COUNT) or state.get(_DURATION))


def _device(state: PageState) -> tuple[CommandRequest, ...]:
    return (HardwareShowRequest(state.flags["hardware"]),) if "hardware" in state.flags else ()


_DEPLOYMENT_PARTS = (
    ViewPart("glance", lambda state: (request_of(MemoryRequest, state), request_of(ExplainRequest, state))),
    ViewPart("device", _device),
)
DEPLOYMENT = View("deployment", "Deployment", "What does it take, and what does a step last?", _DEPLOYMENT_PARTS)


@cache
def presets() -> tuple[Mapping[str, str], ...]:
    """Rows of `perfmodel scenarios list` that a state can name, without tiny models."""
    rows = ScenariosListRequest().answer().data["scenarios"]
    return tuple(row for row in rows if "/" not in row["name"] and not row["model"].startswith("tiny-"))


_MEMORY_PARTS = (ViewPart("plan", lambda state: (request_of(MemoryRequest, state),), is_kept=True),)
MEMORY = View("memory", "Memory", "Does it fit, and how many tokens can it keep?", _MEMORY_PARTS)


def _step(state: PageState, **texts: str) -> CommandRequest:
    """One step of given sizes. Raises SpecError for non-numbers."""
    sizes: dict[str, int] = {}
    for name, text in texts.items():
        try:
            sizes |= {name: count(text)} if text else {}
        except ValueError:
            message = f"{name}: got {text!r}; expected a whole number of at least 1, as in 64 or 8K."
            raise SpecError(message) from None
    return request_of(ExplainRequest, state, **sizes)


def _decode(state: PageState) -> tuple[CommandRequest, ...]:
    return (_step(state, batch=state.get("batch"), context=state.get("context")),)


def _prefill(state: PageState) -> tuple[CommandRequest, ...]:
    return (_step(state, prefill=state.get("prefill", "2048")),)


def _curve(state: PageState) -> tuple[CommandRequest, ...]:
    """Step time over batch and context, around the given or typical step."""
    batch, context = state.get("batch"), state.get("context")
    given = (f"step.batch={batch or 32}", f"step.context={context or 1024}") if batch or context else ()
    vary = ("step.batch=1..1024:11", "step.context=256..131072:10")
    return (request_of(WhatIfRequest, state, *given, vary=vary, metric=("step_ms",)),)


_STEP_PARTS = (
    ViewPart("decode", _decode, is_kept=True, drawn=("plot",)),
    ViewPart("curve", _curve, "quick", help="how a step grows with batch and context"),
    ViewPart("prefill", _prefill, is_kept=True, drawn=("plot",)),
)
STEP = View("step", "Step", "Where does the time of a step go?", _STEP_PARTS)
PAUSE_S = "30"  # of a user between an answer and the next request, unless the address says it
_RATE, _PAUSE = "traffic.arrivals.rate", "traffic.arrivals.think_time_s"
_QUICK, _POINTS = 400, 7
_LATENCIES = tuple(f"{statistic}_{name}_ms" for name in ("ttft", "tpot", "e2el") for statistic in ("mean", "p99"))
_LOADS = ("request_throughput", "request_goodput", "slo_attainment", "output_throughput")
_BELOW, _ABOVE = 4, 4  # how far the rates reach from the one that is asked for
_FAR_BELOW, _FAR_ABOVE, _FAR_POINTS = 8, 32, 3  # of the rates among which the largest within the SLO is looked for
_IDLE_RATE, _IDLE_COUNT, _LENGTHS = "0.02", 6, "256..32768:8"


def asked_rate(state: PageState) -> float | None:
    """Requested rate in requests/s, or None."""
    text = state.get("rate") or state.get(_RATE)
    try:
        rate = float(parse_quantity(text, "requests/s")) if text else 0.0
    except (TypeError, ValueError):
        return None
    return rate if 0 < rate < 1e9 else None


def largest_rate(state: PageState) -> CommandRequest:
    """Largest rate within the SLO, searched widely; shared by views."""
    rate = asked_rate(state)
    ends = f"{rate / _FAR_BELOW:.3g}..{rate * _FAR_ABOVE:.3g}" if rate else f"{1 / _FAR_BELOW:g}x..{_FAR_ABOVE}x"
    return _over_rates(state, f"{ends}:{_FAR_POINTS}", _LOADS[:2])


def _rate_curve(state: PageState) -> tuple[CommandRequest, ...]:
    return (_over_rates(state, f"{_range(state)}:{_POINTS}", (*_LATENCIES, *_LOADS)),)


def _bands(state: PageState) -> tuple[CommandRequest, ...]:
    """80 % intervals at every second rate of the curve: each costs about ten points."""
    return (_over_rates(state, f"{_range(state)}:{_POINTS // 2 + 1}", _LATENCIES[::2], intervals=True),)


def _over_rates(state: PageState, rates: str, metrics: Sequence[str], intervals: bool = False) -> CommandRequest:
    """Metrics over rates with few enough requests to be fast, unless the address sets a count; intervals of means need
    neither limits nor pauses."""
    fixed = state if asked_rate(state) is None else state.changed({"rate": None, _RATE: None})
    fixed = fixed.changed(dict.fromkeys((*LIMITS, _PAUSE))) if intervals else fixed
    pause = () if intervals or state.get(_PAUSE) else (f"{_PAUSE}={PAUSE_S}",)
    more = {"vary": (f"{_RATE}={rates}",), "metric": tuple(metrics), "intervals": intervals}
    return request_of(WhatIfRequest, fixed, *fewer_requests(state, _QUICK), *pause, **more)


def _range(state: PageState) -> str:
    """Rate range: from the address, else around the rate in steps of 1, 2, 5 (stable while dragging), else multiples of
    the traffic's rate."""
    low, high, rate = state.get("low"), state.get("high"), asked_rate(state)
    if not (low or high or rate):
        return f"{1 / _BELOW:g}x..{_ABOVE}x"
    ends = [_number(low), _number(high)]
    if rate is None:
        rate = ends[0] * _BELOW if ends[0] else (ends[1] or 1.0) / _ABOVE
    return f"{low or f'{_rounded(rate / _BELOW):g}'}..{high or f'{_rounded(rate * _ABOVE):g}'}"


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 1e9 else None


def _rounded(rate: float) -> float:
    scale = 10.0 ** floor(log10(rate) + 1e-9)
    return max(step for step in (1, 2, 5) if step * scale <= rate * (1 + 1e-9)) * scale


def _prompts(state: PageState) -> tuple[CommandRequest, ...]:
    """TTFT of an idle server by prompt length."""
    idle = state.changed({"rate": None, _RATE: None, _COUNT: None, _DURATION: None})
    sets = (
        f"{_RATE}={_IDLE_RATE}",
        f"{_COUNT}={_IDLE_COUNT}",
        "traffic.arrivals.process=constant",
        "traffic.input_tokens.distribution=fixed",
        "traffic.input_tokens.value=1024",
        "traffic.input_tokens.max=32768",
    )
    vary = f"traffic.input_tokens.value={_LENGTHS}"
    return (request_of(WhatIfRequest, idle, *sets, vary=(vary,), metric=("mean_ttft_ms",)),)


TRAFFIC = View(
    "traffic",
    "Traffic",
    "How much traffic does it carry, and how long do people wait?",
    (
        ViewPart("now", lambda state: (whole_run(state),), "quick", help="the traffic as it is"),
        ViewPart("limit", lambda state: (largest_rate(state),), "quick", help="the largest rate within the limits"),
        ViewPart("curve", _rate_curve, "quick", help="latencies against the rate of requests", later=_bands),
        ViewPart("prompts", _prompts, "quick", help="time to first token against the length of prompts"),
    ),
)
_FEW_REQUESTS = 100  # eighteen runs of these take some seconds

WHATIF_METRICS = (
    *("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms", "output_throughput"),
    *("joules_per_output_token", "usd_per_million_output_tokens"),
)
ALONG = (
    ("traffic.arrivals.rate=0.25x..4x:5", "arrival rate, a quarter to four times"),
    ("hardware.hbm.bandwidth=0.5x..2x:5", "HBM bandwidth, half to twice"),
    ("hardware.peak_flops=0.5x..2x:5", "peak FLOPs, half to twice"),
    ("hardware.hbm.capacity=0.75x..2x:5", "HBM capacity, three quarters to twice"),
    ("traffic.arrivals.concurrency=0.25x..4x:5", "concurrency, a quarter to four times"),
)
ALTERNATIVES = (
    ("hardware=h200-sxm", "H200"),
    ("hardware=b200-sxm", "B200"),
    ("hardware=mi300x", "MI300X"),
    ("engine.quantization=fp8", "FP8 weights"),
    ("engine.kv_cache_dtype=fp8", "FP8 KV cache"),
    ("engine.tensor_parallel_size=2", "two devices each"),
    ("engine.max_num_batched_tokens=2048", "2,048 tokens a step"),
)


def _tornado(state: PageState) -> tuple[CommandRequest, ...]:
    _check_metric(state)
    moved = request_of(WhatIfRequest, state, *fewer_requests(state, _FEW_REQUESTS), metric=WHATIF_METRICS)
    return (whole_run(state), moved)


def _against(state: PageState) -> tuple[CommandRequest, ...]:
    against = state.get("against")
    if not against:
        return ()
    _check_metric(state)
    along = state.get("vary", ALONG[0][0])
    fewer = fewer_requests(state, _FEW_REQUESTS)
    return (request_of(WhatIfRequest, state, *fewer, vary=(along,), metric=WHATIF_METRICS, against=against),)


def _check_metric(state: PageState) -> None:
    """Raise SpecError for a metric without plots."""
    metric = state.get("metric")
    if metric and metric not in WHATIF_METRICS:
        raise SpecError(f"metric: got {metric[:60]!r}; expected {', '.join(WHATIF_METRICS)}.")


WHATIF = View(
    "whatif",
    "What if",
    "Which resource counts, and from where on does an alternative pay?",
    (
        ViewPart("tornado", _tornado, "quick", help="varying what could be bought, and the load"),
        ViewPart("against", _against, "quick", help="looking for where the alternative begins to pay"),
    ),
)


# What a plan chooses itself, whatever the page says of it.
_CHOSEN = (
    *(f"engine.{name}_parallel_size" for name in ("tensor", "pipeline", "data")),
    *("engine.max_num_seqs", "engine.max_num_batched_tokens", "cluster.replicas", "cluster.pools"),
)
SERVICE_LEVELS: tuple[tuple[str, Mapping[str, str | None]], ...] = (
    ("chat: first token in 1 s, then 50 ms each", {"ttft": "1s", "tpot": "50ms", "e2e": None}),
    ("fast chat: 300 ms, then 20 ms", {"ttft": "300ms", "tpot": "20ms", "e2e": None}),
    ("long answers: 5 s, then 100 ms", {"ttft": "5s", "tpot": "100ms", "e2e": None}),
    ("whole answer in 20 s", {"ttft": None, "tpot": None, "e2e": "20s"}),
)


def _plan(state: PageState) -> tuple[CommandRequest, ...]:
    """One request over the ticked devices, else the deployment's own."""
    devices = state.get("devices")
    planned = state.changed(dict.fromkeys(_CHOSEN))
    if not devices:
        return (request_of(PlanRequest, planned),)
    if state.get("scenario"):
        return (request_of(PlanRequest, planned, f"plan.space.hardware=[{devices}]"),)
    return (request_of(PlanRequest, planned.changed({"hardware": devices})),)


@cache
def priced_devices() -> tuple[tuple[str, float, float], ...]:
    """(name, memory in bytes, USD per hour) of priced GPUs, largest memory first."""
    from perfmodel.specs import list_names, load_hardware

    priced = [
        (device.name, device.declared.memory[0].capacity_bytes, device.price.usd_per_hour)
        for device in map(load_hardware, list_names("hardware"))
        if device.kind == "gpu" and device.price is not None
    ]
    return tuple(sorted(priced, key=lambda device: (-device[1], device[0])))


def opened(state: PageState, data: Any, row: Mapping[str, Any]) -> str:
    """Address query of a deployment in row `row` of `perfmodel plan --json` (`data`), other fields unchanged."""
    base = value_at(data, "provenance.inputs.scenario")
    fields: dict[str, str | None] = dict.fromkeys(_CHOSEN)
    fields |= {"hardware": state.get("devices")} if state.get("devices") else {}  # of several it is a choice
    choices = {path: value for path, value in row["choices"].items() if path != "cluster"}
    choices |= {f"cluster.{name}": value for name, value in (row["choices"].get("cluster") or {}).items()}
    for path, value in choices.items():
        if path in _CHOSEN or path == "hardware" or value_at(base, path) != value:
            fields[path] = value if isinstance(value, str) else json.dumps(value)
    return state.changed(fields).query


PLAN = View(
    "plan",
    "Plan",
    "Which devices, and how many, serve this rate within its service level?",
    (
        ViewPart(
            "choice",
            _plan,
            "long",
            on_demand=True,
            button="Find the deployment",
            help="Screens every candidate in closed form and simulates the best: a minute or so. It can be stopped; "
            "what was simulated is kept, and the next start goes on from there.",
        ),
    ),
)
_SOME_LOADS = "traffic.arrivals.rate=0.5x,1x,2x"
_METRICS = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput", "joules_per_output_token")


def _gain(state: PageState) -> tuple[CommandRequest, ...]:
    name = state.get("technique")
    if not name:
        return ()
    against, fewer = shlex.join(_switch(name)), fewer_requests(state, _FEW_REQUESTS)
    return (request_of(WhatIfRequest, state, *fewer, vary=(_SOME_LOADS,), metric=_METRICS, against=against),)


def _switch(name: str) -> Sequence[str]:
    """Overrides of a technique. Raises SpecError for an unknown one or one without a switch."""
    for row in TechniquesRequest().answer().data:
        if row["technique"] == name and row["switch"]:
            return list(row["switch"])
        if row["technique"] == name:
            raise SpecError(f"technique: {name} has no switch: {row['why_not_simulated']}")
    raise SpecError(f"technique: there is none called {name[:60]!r}; choose one of the gallery.")


def fields_of(switch: Sequence[str]) -> dict[str, str]:
    """State fields that set a switch."""
    from perfmodel.files.yaml_loader import flow_yaml, parse_value

    fields: dict[str, str] = {}
    for text in switch:
        key, _, value = text.partition("=")
        parsed: Any = parse_value(value, key) if "." not in key and key != "model" else None
        blocks = parsed.items() if isinstance(parsed, dict) else ()
        fields |= {f"{key}.{name}": item if isinstance(item, str) else flow_yaml(item) for name, item in blocks}
        fields |= {} if isinstance(parsed, dict) else {key: value}
    return fields


TECHNIQUES = View(
    "techniques",
    "Techniques",
    "What could be switched on, what would it gain here, and what has been shown of it?",
    (
        ViewPart("gain", _gain, "quick", help="simulating the deployment with it and without it"),
        ViewPart("gallery", lambda state: (TechniquesRequest(),)),
    ),
)
_BATCH, _CONTEXT = "32", "2048"  # of the step that all are asked for
_SHARED = ("rate", "traffic", *LIMITS, "seed")
_OF_TRAFFIC = ("traffic.", "slo.")


def columns_of(state: PageState) -> tuple[PageState, ...]:
    """Deployments, the form's own first."""
    first = state.alone()
    shared = {key: value for key, value in first.fields if _is_shared(key)}
    others = (
        PageState((*other.fields, *((k, v) for k, v in shared.items() if not other.get(k)))) for other in state.others
    )
    return (first, *others)


def deployment_of(state: PageState) -> PageState:
    """The deployment part of a state, for comparison under another's traffic."""
    shown = {**state.flags, **dict(state.alone().fields)}
    return PageState(tuple((key, value) for key, value in shown.items() if not _is_shared(key)))


def main_of(state: PageState, number: int) -> PageState:
    """State with column `number` (from 1) and the first swapped."""
    columns, others = columns_of(state), list(state.others)
    others[number - 1] = deployment_of(state)
    return PageState(columns[number].fields, tuple(others))


def _is_shared(key: str) -> bool:
    return key in _SHARED or key.startswith(_OF_TRAFFIC)


def _deployments(state: PageState) -> tuple[CommandRequest, ...]:
    sizes = {"batch": state.get("batch", _BATCH), "context": state.get("context", _CONTEXT)}
    return tuple(
        request
        for column in columns_of(state)
        for request in (request_of(MemoryRequest, column), _step(column, **sizes))
    )


def _served(state: PageState) -> tuple[CommandRequest, ...]:
    return tuple(request for column in columns_of(state) for request in (whole_run(column), largest_rate(column)))


_COMPARE_PARTS = (
    ViewPart("deployments", _deployments, shows_refusals=True),
    ViewPart("served", _served, "quick", help="each of them under this traffic", shows_refusals=True),
)
COMPARE = View("compare", "Compare", "Which one is faster, cheaper, carries more?", _COMPARE_PARTS)
_IN_FLIGHT = "traffic.arrivals.concurrency"
OF_A_FRONT = 384
_FRONT = (
    *("mean_tpot_ms", "mean_ttft_ms", "output_throughput_per_gpu"),
    *("usd_per_million_output_tokens", "joules_per_output_token"),
)
OVERLAYS = (
    *(("hardware", "h200-sxm", "H200"), ("hardware", "b200-sxm", "B200"), ("hardware", "mi300x", "MI300X")),
    *(("engine.quantization", "fp8", "FP8 weights"), ("engine.kv_cache_dtype", "fp8", "FP8 KV cache")),
    *(("engine.profile", "sglang", "SGLang"), ("engine.profile", "trtllm", "TensorRT-LLM")),
    *(("engine.tensor_parallel_size", "2", "two devices"), ("engine.tensor_parallel_size", "4", "four devices")),
)


def overlaid(state: PageState, key: str, value: str) -> PageState:
    """State with one more column: the form's deployment with `key` at `value`."""
    return PageState(state.fields, (*state.others, deployment_of(state).changed({key: value})))


def without(state: PageState, number: int) -> PageState:
    """State without column `number`, from 1."""
    return PageState(state.fields, (*state.others[: number - 1], *state.others[number:]))


def name_of(column: PageState) -> str:
    """Model, device and what else a column's address says of its deployment."""
    fields = dict(deployment_of(column).fields)
    first = [fields.pop(key) for key in ("scenario", "model", "hardware") if key in fields]
    return ", ".join(
        [" on ".join(first), *(f"{key.partition('.')[2] or key} {value}" for key, value in fields.items())]
    )


def in_flight(column: PageState, count: str) -> PageState:
    """A column under so many requests in flight, each sent again as soon as it is answered."""
    others = [key for key, _ in column.fields if key.startswith("traffic.arrivals")]
    arrivals = {"traffic.arrivals": f"{{process: closed_loop, concurrency: {count}}}"}
    return column.changed({**dict.fromkeys(("rate", *others)), **arrivals})


def asked_speed(state: PageState) -> float:
    """Tokens/s that a user is to get. Raises SpecError for what is no such number."""
    speed = _number(text := state.get("speed", "50"))
    if speed is None:
        raise SpecError(f"speed: got {text[:60]!r}; expected tokens/s above 0, as in 50.")
    return speed


def _fronts(state: PageState) -> tuple[CommandRequest, ...]:
    asked_speed(state)
    return tuple(_front(column, "1..128:8") for column in columns_of(state))


def _front_bands(state: PageState) -> tuple[CommandRequest, ...]:
    return tuple(_front(column, "1,8,32,128", intervals=True) for column in columns_of(state))


def _front(column: PageState, counts: str, intervals: bool = False) -> CommandRequest:
    fewer, vary = fewer_requests(column, OF_A_FRONT), (f"{_IN_FLIGHT}={counts}",)
    metrics = ("mean_tpot_ms", "mean_e2el_ms", "output_throughput_per_gpu") if intervals else _FRONT
    return request_of(WhatIfRequest, in_flight(column, "1"), *fewer, vary=vary, metric=metrics, intervals=intervals)


_PARETO_PARTS = (
    ViewPart(
        *("fronts", _fronts, "quick"), help="each deployment from one request in flight to 128", shows_refusals=True,
        later=_front_bands,
    ),
)  # fmt: skip
PARETO = View("pareto", "Pareto", "How many tokens a second for a user, and how many of a device?", _PARETO_PARTS)
VIEWS: tuple[View, ...] = (*(DEPLOYMENT, MEMORY, STEP), *(TRAFFIC, COMPARE, PARETO), *(WHATIF, PLAN, TECHNIQUES))


def find_view(name: str) -> View | None:
    """The view of a name."""
    return next((view for view in VIEWS if view.name == name), None)


def find_part(view: View, name: str) -> ViewPart | None:
    """The part of a view by its name."""
    return next((part for part in view.parts if part.name == name), None)

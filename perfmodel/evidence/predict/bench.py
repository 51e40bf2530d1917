"""A load tool's run as a scenario, with the source of each fact. Traffic comes from the file: its requests one by one
if listed, sent at their recorded times or, in a closed loop, when a slot becomes free; else the sent number at mean
lengths. The deployment comes from `--scenario` and flags."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.observation import Observation, Prediction, Progress, reported
from perfmodel.evidence.predict.results import predict_rows
from perfmodel.evidence.sources.bench_run import LoadTest
from perfmodel.evidence.sources.recorded import write_trace
from perfmodel.evidence.sources.setups import known_device, model_names, quantization_of
from perfmodel.models.cards import load_model
from perfmodel.models.hub import is_hub_name
from perfmodel.models.spec import ModelSpec
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario, load_traffic
from perfmodel.specs.overrides import parse_override
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_source import as_text, read_scenario
from perfmodel.specs.traffic import Traffic

_ASSUMED = "assumed"
_COUNTS = ("engine.tensor_parallel_size", "engine.max_num_seqs", "engine.max_num_batched_tokens")
_MAX_REQUESTS = 4000  # of a run whose requests are all alike: its means have long settled
_PER_SLOT = 10  # requests of a closed loop, likewise
# What no file of a load tool says of requests, and what these, one answer each, never have; as it is when left out
UNSTATED = {**dict.fromkeys(("prefix", "adapters", "images", "structured_outputs")), "priorities": (), "classes": ()}
NEVER_SENT = {"samples_per_prompt": 1, "beam_width": 1, "rollouts": None, "conversations": None}
_PROCESSES = {1.0: "poisson", 0.0: "constant"}  # by the gaps' coefficient of variation


@dataclass(frozen=True)
class ConfigFact:
    """A fact of the setup, its value, and its source ("assumed": none)."""

    name: str
    value: str
    said_by: str = _ASSUMED

    @property
    def is_assumed(self) -> bool:
        return self.said_by == _ASSUMED

    def to_json(self) -> dict[str, str]:
        return {"fact": self.name, "value": self.value, "said_by": self.said_by}


@dataclass(frozen=True)
class GivenSetup:
    """Setup given by the user.

    scenario:  a name, a path or a text; None without one
    flags:     "model", "hardware", "traffic" -> value given in place of a scenario's
    overrides: as of `--set`
    speed:     simulated seconds per second of the emulator; None: as recorded"""

    scenario: str | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    speed: float | None = None


def at_real_speed(run: Observation, speed: float | None = None) -> Observation:
    """The run in deployment time: one measured second is `speed` simulated seconds (None: as recorded). Raises
    SpecError if user and file differ, and for a test without a server."""
    test: LoadTest = run.setup
    factor = test.speed if speed is None else speed
    if test.speed not in (1.0, factor):
        raise SpecError(f"{run.name}: got --speed {factor:g}, but the file has {test.speed:g}; leave --speed out.")
    if factor == 1:
        return run
    if test.local is not None:
        raise SpecError(f"{run.name}: is a test of llama-bench, which measures no server; leave --speed out.")
    note = f"measured at {factor:g} simulated seconds per second: times here are multiplied by it, rates divided by it"
    return replace(
        run,
        setup=replace(test, notes=(*test.notes, note), speed=1.0),
        load=replace(run.load, rate=None if run.load.rate is None else run.load.rate / factor),
        metrics={k: v * factor if k.endswith("_ms") else v / factor for k, v in run.metrics.items()},
        requests=None if run.requests is None else run.requests.scaled(factor),
    )


def bench_scenario(run: Observation, given: GivenSetup, folder: Path) -> tuple[Scenario, tuple[ConfigFact, ...]]:
    """The scenario of `run` and the facts it rests on; requests are written as a trace to `folder`, but for those with
    images, which are drawn. Raises SpecError if the model or device is unknown."""
    source = given.scenario if given.scenario is not None else as_text(_data(run, given))
    own = _given_traffic(given)
    for name, plain in NEVER_SENT.items() if own is not None else ():
        if getattr(own, name) != plain:
            raise SpecError(
                f"{run.name}: got traffic.{name}, and a load tool's requests stand alone, with one answer each; leave "
                f"it out."
            )
    unstated = own.model_dump(mode="json", include={*UNSTATED}, exclude_none=True) if own is not None else {}
    if "images" in unstated:
        run = replace(run, requests=None)
    traffic = {**_lengths(run, own), **_arrivals(run)}
    traffic |= unstated
    if run.requests is not None:
        path = write_trace(run.requests, folder / f"{len(list(folder.iterdir()))}.jsonl")
        traffic |= {"trace": {"path": str(path), "format": "jsonl"}, "num_requests": len(run.requests)}
    try:
        scenario = load_scenario(source, [f"traffic={json.dumps(traffic)}", *given.overrides])
    except SpecError as error:
        raise SpecError(f"{run.name}: {error}") from None
    return scenario, tuple(sorted(_facts(run, scenario, given), key=lambda fact: not fact.is_assumed))


def _contradictions(run: Observation, scenario: Scenario) -> tuple[str, ...]:
    """Contradictions between file and scenario, as sentences without a full stop."""
    values, result = _values(scenario), []
    for key, stated in run.setup.says.items():
        theirs, is_same = str(stated), True
        if key == "model":
            known = next(filter(None, (_card(item, ask_hub=False) for item in model_names(theirs))), None)
            is_same = known is None or _shape(known) == _shape(scenario.model)
        elif key == "hardware":
            device = known_device(theirs)
            is_same = device is None or device.name == scenario.hardware.name
        elif key in _COUNTS:
            is_same = theirs == values[key][1].replace(",", "")
        if not is_same:
            result.append(f"{run.name} says {key.removeprefix('engine.')} {theirs}, simulated is {values[key][1]}")
    return tuple(result)


def _shape(model: ModelSpec) -> tuple[Any, ...]:
    """Key of models that differ only in training and number format."""
    return model.hidden_size, model.vocab_size, model.layers


def _card(name: str, ask_hub: bool = True) -> ModelSpec | None:
    try:
        return load_model(name, ask_hub=ask_hub)
    except (PerfmodelError, OSError, ValueError):
        return None


def _data(run: Observation, given: GivenSetup) -> dict[str, Any]:
    says = run.setup.says
    engine = {key.removeprefix("engine."): value for key, value in says.items() if key.startswith("engine.")}
    model, hardware = given.flags.get("model"), given.flags.get("hardware")
    if model is None:
        stated = _stated(run, "model", "which model was served")
        model = next((item for item in model_names(stated) if _card(item) is not None), None)
        if model is None and not is_hub_name(stated):  # which the scenario's reader looks up there
            try:
                load_model(stated)
            except (PerfmodelError, OSError, ValueError) as error:
                raise SpecError(f"{run.name}: {error}; give --model, or --scenario with the deployment.") from None
        if model not in (None, stated) and (quantization := quantization_of(stated)) is not None:
            engine.setdefault("quantization", quantization)
        model = model or stated
    if hardware is None:
        stated = _stated(run, "hardware", "on which hardware it ran")
        device = known_device(stated)
        if device is None:
            raise SpecError(
                f"{run.name}: ran on {stated[:60]!r}, which no file in hardware_specs describes; give --hardware, or a "
                f"--scenario whose hardware is a file of your own (`perfmodel hardware new`)."
            )
        hardware = device.name
    return {"name": "bench", "model": model, "hardware": hardware, "engine": engine}


def _stated(run: Observation, key: str, what: str) -> str:
    """What the file says of `key`. Raises SpecError if it does not say `what`."""
    stated = str(run.setup.says.get(key, ""))
    if not stated:
        raise SpecError(
            f"{run.name}: {run.source}'s file does not say {what}; give --{key}, or --scenario with the deployment."
        )
    return stated


def _given_traffic(given: GivenSetup) -> Traffic | None:
    """The user's own: of --traffic, else of the scenario."""
    if "traffic" in given.flags:
        return load_traffic(given.flags["traffic"])
    if given.scenario is None or "traffic" not in read_scenario(given.scenario)[0].data:
        return None
    return load_scenario(given.scenario, given.overrides).traffic


def _lengths(run: Observation, traffic: Traffic | None) -> dict[str, Any]:
    """Lengths of the sent requests: the file's means, or the distributions of the user's `traffic`."""
    load = run.load
    if run.requests is not None:
        return {}
    most = max(_MAX_REQUESTS, _PER_SLOT * (load.concurrency or 0))
    result: dict[str, Any] = {"num_requests": min(load.num_requests, most)}
    means = {"input_tokens": load.prompt, "output_tokens": load.answer}
    result |= {key: {"distribution": "fixed", "value": max(1, round(n))} for key, n in means.items() if n is not None}
    missing = [key for key in means if key not in result]
    if not missing:
        return result
    if traffic is None:
        raise SpecError(
            f"{run.name}: {run.source}'s file does not say how long prompts were; give --scenario with the data set's "
            f"traffic.input_tokens, or --traffic."
        )
    for key in missing:
        lengths = getattr(traffic, key)
        if lengths is None:
            raise SpecError(f"{run.name}: the traffic that was given for its lengths has no {key}.")
        result[key] = lengths.model_dump(mode="json", exclude_none=True)
    return result


def _is_replayed(run: Observation) -> bool:
    return run.load.process != "closed" and run.requests is not None and run.requests.start_s is not None


def _arrivals(run: Observation) -> dict[str, Any]:
    load = run.load
    arrivals: dict[str, Any] = {"process": "gamma", "cv": load.cv, "rate": load.rate}
    if load.process == "closed":
        arrivals = {"process": "closed_loop", "concurrency": load.concurrency}
    elif _is_replayed(run):
        arrivals = {"process": "trace"}
    elif load.process == "burst":
        arrivals = {"process": "burst"}
    elif load.cv in _PROCESSES:
        arrivals = {"process": _PROCESSES[load.cv], "rate": load.rate}
    return {"arrivals": arrivals}


def _facts(run: Observation, scenario: Scenario, given: GivenSetup) -> Iterator[ConfigFact]:
    """Facts the answer rests on; `--set` takes precedence."""
    if given.scenario is None:
        stated_by = dict.fromkeys(run.setup.says, "the file")
    else:
        data = read_scenario(given.scenario)[0].data
        blocks = (f"{key}.{name}" for key, block in data.items() if isinstance(block, dict) for name in block)
        stated_by = dict.fromkeys((*data, *blocks), "the scenario")
    stated_by |= {name: f"--{name}" for name in given.flags}
    stated_by |= {".".join(parse_override(text).path): "--set" for text in given.overrides}
    for key, (label, value) in _values(scenario).items():
        yield ConfigFact(label, value, stated_by.get(key, _ASSUMED))
    load, users = run.load, "--traffic" if "traffic" in given.flags else "the scenario"
    if (prefix := scenario.traffic.prefix) is None:
        yield ConfigFact("prompts", "share no beginning")
    else:
        groups = f", in {prefix.num_groups:,} groups" if prefix.num_groups > 1 else ""
        yield ConfigFact("prompts", f"share {prefix.shared_tokens:,} tokens{groups}", users)
    for name, plain in UNSTATED.items():
        if name != "prefix" and getattr(scenario.traffic, name) != plain:
            yield ConfigFact(name, "the traffic's", users)
    if run.requests is not None:
        yield ConfigFact("lengths", "of each request", "the file")
    elif load.prompt is None:
        yield ConfigFact("lengths", "the traffic's", users)
    else:
        answer = f"{load.answer:,.0f}" if load.answer is not None else "the traffic's"
        yield ConfigFact("lengths", f"all {load.prompt:,.0f} tokens in, {answer} out, the means")
    if load.process == "closed":
        arrivals = f"{load.concurrency:,} in flight"
    elif _is_replayed(run):
        arrivals = "as they were sent"
    else:
        arrivals = "all at once" if load.process == "burst" else f"{load.rate:g} requests/s"
    yield ConfigFact("arrivals", arrivals, "the file")


def _values(scenario: Scenario) -> dict[str, tuple[str, str]]:
    """Scenario field -> (label, value) of what an answer rests on."""
    engine, model, sampling = scenario.engine, scenario.model, scenario.sampling.method
    longest = engine.max_model_len or model.max_position_embeddings
    return {
        "model": ("model", model.name),
        "hardware": ("hardware", scenario.hardware.name),
        "engine.quantization": ("number format of the weights", model.quantization.weights or model.dtype),
        "engine.kv_cache_dtype": ("number format of the KV cache", engine.kv_cache_dtype),
        "engine.profile": ("engine", engine.described.description.name),
        "engine.version": ("version of the engine", engine.described.version.described),
        "engine.tensor_parallel_size": ("tensor_parallel_size", str(engine.tensor_parallel_size)),
        "engine.max_num_seqs": ("max_num_seqs", f"{engine.max_num_seqs:,}"),
        "engine.max_num_batched_tokens": ("max_num_batched_tokens", f"{engine.max_num_batched_tokens:,}"),
        "engine.max_model_len": ("max_model_len", f"{longest:,}"),
        "engine.enable_prefix_caching": ("enable_prefix_caching", str(engine.enable_prefix_caching).lower()),
        "sampling": ("sampling", f"{sampling} ({model.sampling})" if sampling == "default" else sampling),
    }


def predict_runs(
    runs: Sequence[Observation], given: GivenSetup, progress: Progress | None = None, intervals: bool = True
) -> list[Prediction]:
    """A prediction for each run, or the reason for none. `details`: `facts` the answer rests on, `notes` on conflicts.

    runs, given: measurements, and the user's setup
    progress:    called with (runs done, of how many)
    intervals:   compute 80 % intervals of means"""
    pairs = []
    for run in reported(runs, len(runs), progress):
        try:
            timed = at_real_speed(run, given.speed)
            pairs.append(_predict_run(timed, given, intervals) if timed.setup.local is None else _local(timed, given))
        except PerfmodelError as error:
            pairs.append(Prediction(run, reason=str(error)))
    return pairs


def _predict_run(run: Observation, given: GivenSetup, intervals: bool) -> Prediction:
    with TemporaryDirectory() as folder:
        scenario, facts = bench_scenario(run, given, Path(folder))
        result = simulate(scenario, keep_steps=True, intervals=intervals)
    metrics = {key: float(result.summary[key]) for key in run.metrics if result.summary.get(key) is not None}
    factors = result.ensemble.factors() if result.ensemble is not None else {}
    ends = {f"mean_{metric}_ms": values for metric, values in factors.items() if f"mean_{metric}_ms" in metrics}
    requests = {}
    if run.requests is not None and result.requests is not None and scenario.traffic.trace is not None:
        for metric in ("ttft", "tpot", "e2el"):
            requests[metric] = np.full(len(run.requests), np.nan)
            requests[metric][result.requests.request_id] = getattr(result.requests, f"{metric}_s")
    details = {"facts": facts, "notes": _contradictions(run, scenario)}
    return Prediction(run, metrics, "", ends, requests, scenario, result=result, details=details)


def _local(run: Observation, given: GivenSetup) -> Prediction:
    """A llama-bench test, by pricing its steps."""
    if given.scenario is not None or given.overrides:
        raise SpecError(
            f"{run.name}: is a test of llama-bench, which says itself what ran; got --scenario or --set, expected "
            f"at most --hardware and --model."
        )
    setup = run.setup.local
    device = known_device(given.flags.get("hardware", setup.device))
    if device is None:
        raise SpecError(f"{run.name}: ran on {setup.device[:60]!r}, which no file describes; give --hardware.")
    setup = replace(setup, device=device.name, model=given.flags.get("model", setup.model))
    pair = predict_rows([Observation(run.name, setup, run.metrics)], Path())[0]
    if pair.reason or pair.scenario is None:
        raise SpecError(f"{run.name}: {pair.reason}")
    stated_by = {name: f"--{name}" if name in given.flags else "the file" for name in ("model", "hardware")}
    facts = [
        *([] if pair.is_known else [ConfigFact("shape of the model", "a decoder of the usual proportions")]),
        ConfigFact("model", f"{pair.scenario.model.name}, {setup.gguf_type}", stated_by["model"]),
        ConfigFact("hardware", device.name, stated_by["hardware"]),
        ConfigFact("engine", pair.scenario.engine.described.label, "the file"),
        ConfigFact("backend", setup.backend, "the file"),
    ]
    return replace(pair, row=run, details={"facts": facts, "notes": ()})

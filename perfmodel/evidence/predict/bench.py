"""A load tool's run as a scenario: what its file says, what `--scenario` and flags add, and what nobody says.

The traffic is the file's: its requests one by one where it has them, sent when they were sent or, in a closed loop,
when a place came free; else as many of its mean lengths as were sent. The deployment is the scenario's. Each fact that
the answer rests on is listed with who said it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.observation import Floats, Interval, Progress, RequestTimes
from perfmodel.evidence.predict.results import predict_rows
from perfmodel.evidence.sources.bench_run import BenchRun
from perfmodel.evidence.sources.local import LocalSetup
from perfmodel.evidence.sources.recorded import write_trace
from perfmodel.evidence.sources.setups import known_device, model_names, quantization_of
from perfmodel.models.cards import load_model
from perfmodel.models.hub import is_hub_name
from perfmodel.models.spec import ModelSpec
from perfmodel.sim import RequestColumns, RunResult, simulate
from perfmodel.specs import load_scenario, load_traffic
from perfmodel.specs.overrides import parse_override
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_source import as_text, read_scenario
from perfmodel.specs.traffic import Traffic

_ASSUMED = "assumed"
_COUNTS = ("engine.tensor_parallel_size", "engine.max_num_seqs", "engine.max_num_batched_tokens")
_MOST_REQUESTS = 4000  # of a run whose requests are all alike: its means have long settled
_PER_SLOT = 10  # requests of a closed loop, likewise
_PROCESSES = {1.0: "poisson", 0.0: "constant"}  # by the gaps' coefficient of variation
# What an answer rests on: the field of a scenario, and what it is called.
_FACTS = {
    "model": "model",
    "hardware": "hardware",
    "engine.quantization": "number format of the weights",
    "engine.kv_cache_dtype": "number format of the KV cache",
    "engine.profile": "engine",
    "engine.version": "version of the engine",
    "engine.tensor_parallel_size": "tensor_parallel_size",
    "engine.max_num_seqs": "max_num_seqs",
    "engine.max_num_batched_tokens": "max_num_batched_tokens",
    "engine.max_model_len": "max_model_len",
    "engine.enable_prefix_caching": "enable_prefix_caching",
    "sampling": "sampling",
}


@dataclass(frozen=True)
class SetupFact:
    """One of the setup's: what stands for it in the simulation, and who says so ("assumed": nobody)."""

    name: str
    value: str
    said_by: str

    @property
    def is_assumed(self) -> bool:
        return self.said_by == _ASSUMED

    def to_json(self) -> dict[str, str]:
        return {"fact": self.name, "value": self.value, "said_by": self.said_by}


@dataclass(frozen=True)
class GivenSetup:
    """What the user adds to the files.

    scenario:  a name, a path or a text; None without one
    flags:     "model", "hardware", "traffic" -> what was given in place of one
    overrides: as of `--set`
    speed:     as in `BenchRun`; None: as recorded in the files
    """

    scenario: str | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    speed: float | None = None


def bench_scenario(run: BenchRun, given: GivenSetup, folder: Path) -> tuple[Scenario, tuple[SetupFact, ...]]:
    """The scenario of `run` and the facts that it rests on; its requests are written as a trace to `folder`.

    Raises SpecError where neither the file nor the user says what ran, or where.
    """
    source = given.scenario if given.scenario is not None else as_text(_data(run, given))
    lengths = _lengths(run, given)
    traffic = {**_arrivals(run), **(_traced(run.times, folder) if run.times is not None else lengths)}
    try:
        scenario = load_scenario(source, [f"traffic={json.dumps(traffic)}", *given.overrides])
    except SpecError as error:
        raise SpecError(f"{run.name}: {error}") from None
    return scenario, tuple(_facts(run, scenario, given))


def contradictions(run: BenchRun, scenario: Scenario) -> tuple[str, ...]:
    """What the file says of its setup and the scenario has otherwise, in sentences without an end."""
    values, result = _values(scenario), []
    for key, stated in run.says.items():
        theirs = str(stated)
        if key == "model":
            known = _card_of(theirs)
            is_same = known is None or _shape(known) == _shape(scenario.model)
        elif key == "hardware":
            device = known_device(theirs)
            is_same = device is None or device.name == scenario.hardware.name
        else:
            is_same = key not in _COUNTS or theirs == values[key].replace(",", "")
        if not is_same:
            result.append(f"{run.name} says {key.removeprefix('engine.')} {theirs}, simulated is {values[key]}")
    return tuple(result)


def _shape(model: ModelSpec) -> tuple[Any, ...]:
    """What models share that differ in training and number format only."""
    return model.hidden_size, model.vocab_size, model.layers


def _card_of(name: str) -> ModelSpec | None:
    """The model that a name stands for; None where no card has it."""
    for item in model_names(name):
        try:
            return load_model(item, ask_hub=False)
        except (PerfmodelError, OSError, ValueError):
            continue
    return None


def _data(run: BenchRun, given: GivenSetup) -> dict[str, Any]:
    """The mapping of a scenario that has what the file and the flags say."""
    engine = {key.removeprefix("engine."): value for key, value in run.says.items() if key.startswith("engine.")}
    model, hardware = given.flags.get("model"), given.flags.get("hardware")
    if model is None:
        model, quantization = _known_model(run, _needed(run, "model"))
        if quantization is not None:
            engine.setdefault("quantization", quantization)
    if hardware is None:
        named = _needed(run, "hardware")
        device = known_device(named)
        if device is None:
            raise SpecError(
                f"{run.name}: ran on {named[:60]!r}, which no file in hardware_specs describes; give --hardware, or a "
                f"--scenario whose hardware is a file of your own (`perfmodel hardware new`)."
            )
        hardware = device.name
    return {"name": "bench", "model": model, "hardware": hardware, "engine": engine}


def _needed(run: BenchRun, name: str) -> str:
    result = run.says.get(name)
    if not isinstance(result, str) or not result:
        raise SpecError(
            f"{run.name}: {run.tool}'s file does not say on which {name} it ran; give --{name}, or --scenario with the "
            f"deployment."
            if name == "hardware"
            else f"{run.name}: {run.tool}'s file does not say which {name} was served; give --{name}, or --scenario "
            f"with the deployment."
        )
    return result


def _known_model(run: BenchRun, name: str) -> tuple[str, str | None]:
    """(the model, the number format that its name has where its card does not)"""
    reason: Exception | None = None
    for item in model_names(name):
        try:
            load_model(item)
        except (PerfmodelError, OSError, ValueError) as error:
            reason = reason or error
            continue
        return item, None if item == name else quantization_of(name)
    if is_hub_name(name):  # which the scenario's reader looks up there
        return name, None
    raise SpecError(f"{run.name}: {reason}; give --model, or --scenario with the deployment.")


def _lengths(run: BenchRun, given: GivenSetup) -> dict[str, Any]:
    """Lengths for as many requests as were sent: the means of the file, or the distributions of the user's traffic."""
    load = run.load
    most = max(_MOST_REQUESTS, _PER_SLOT * (load.concurrency or 0))
    result: dict[str, Any] = {"num_requests": min(load.num_requests, most)}
    means = {"input_tokens": load.prompt, "output_tokens": load.answer}
    result |= {
        key: {"distribution": "fixed", "value": max(1, round(mean))} for key, mean in means.items() if mean is not None
    }
    missing = [key for key in means if key not in result]
    if not missing or run.times is not None:
        return result
    traffic = _given_traffic(given)
    if traffic is None:
        raise SpecError(
            f"{run.name}: {run.tool}'s file does not say how long prompts were; give --scenario with the data set's "
            f"traffic.input_tokens, or --traffic."
        )
    for key in missing:
        lengths = getattr(traffic, key)
        if lengths is None:
            raise SpecError(f"{run.name}: the traffic that was given for its lengths has no {key}.")
        result[key] = lengths.model_dump(mode="json", exclude_none=True)
    return result


def _given_traffic(given: GivenSetup) -> Traffic | None:
    """The traffic of the flag, or of the scenario."""
    if "traffic" in given.flags:
        return load_traffic(given.flags["traffic"])
    if given.scenario is None or "traffic" not in read_scenario(given.scenario)[0].data:
        return None
    return load_scenario(given.scenario).traffic


def _arrivals(run: BenchRun) -> dict[str, Any]:
    load, times = run.load, run.times
    if load.process == "closed":
        return {"arrivals": {"process": "closed_loop", "concurrency": load.concurrency}}
    if times is not None and times.start_s is not None:
        return {"arrivals": {"process": "trace"}}
    if load.process == "burst":
        return {"arrivals": {"process": "burst"}}
    process: dict[str, Any] = {"process": "gamma", "cv": load.cv}
    if load.cv in _PROCESSES:
        process = {"process": _PROCESSES[load.cv]}
    return {"arrivals": {**process, "rate": load.rate}}


def _traced(times: RequestTimes, folder: Path) -> dict[str, Any]:
    """The requests as a trace in `folder`."""
    path = write_trace(times, folder / f"{len(list(folder.iterdir()))}.jsonl")
    return {"trace": {"path": str(path), "format": "jsonl"}, "num_requests": len(times)}


def _facts(run: BenchRun, scenario: Scenario, given: GivenSetup) -> Iterator[SetupFact]:
    """What the answer rests on, what is assumed first."""
    stated_as = _said_by(run, given)
    values = _values(scenario)
    facts = [SetupFact(label, values[key], stated_as.get(key, _ASSUMED)) for key, label in _FACTS.items()]
    if run.row is None:
        facts.append(SetupFact("prompts", "share no beginning", _ASSUMED))
        facts.append(_lengths_fact(run, given))
        facts.append(SetupFact("arrivals", _arrivals_text(run), "the file"))
    yield from sorted(facts, key=lambda fact: not fact.is_assumed)


def _said_by(run: BenchRun, given: GivenSetup) -> dict[str, str]:
    """Field -> who says it; `--set` has the last word."""
    result: dict[str, str] = {}
    if given.scenario is None:
        result |= dict.fromkeys(run.says, "the file")
    else:
        result |= dict.fromkeys(_fields(read_scenario(given.scenario)[0].data), "the scenario")
    result |= {name: f"--{name}" for name in given.flags}
    return result | {".".join(parse_override(text).path): "--set" for text in given.overrides}


def _fields(data: Mapping[str, Any]) -> Iterator[str]:
    """The fields that a scenario file gives, those of its engine with their block."""
    for key, value in data.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{name}" for name in value)


def _values(scenario: Scenario) -> dict[str, str]:
    engine, model = scenario.engine, scenario.model
    sampling = scenario.sampling.method
    return {
        "model": model.name,
        "hardware": scenario.hardware.name,
        "engine.quantization": model.quantization.weights or model.dtype,
        "engine.kv_cache_dtype": engine.kv_cache_dtype,
        "engine.profile": engine.described.description.name,
        "engine.version": engine.described.version.described,
        "engine.tensor_parallel_size": str(engine.tensor_parallel_size),
        "engine.max_num_seqs": f"{engine.max_num_seqs:,}",
        "engine.max_num_batched_tokens": f"{engine.max_num_batched_tokens:,}",
        "engine.max_model_len": f"{engine.max_model_len or model.max_position_embeddings:,}",
        "engine.enable_prefix_caching": str(engine.enable_prefix_caching).lower(),
        "sampling": f"{sampling} ({model.sampling})" if sampling == "default" else sampling,
    }


def _lengths_fact(run: BenchRun, given: GivenSetup) -> SetupFact:
    load = run.load
    if run.times is not None:
        return SetupFact("lengths", "of each request", "the file")
    if load.prompt is None:
        return SetupFact("lengths", "the traffic's", "--traffic" if "traffic" in given.flags else "the scenario")
    answer = f"{load.answer:,.0f}" if load.answer is not None else "the traffic's"
    return SetupFact("lengths", f"all {load.prompt:,.0f} tokens in, {answer} out, the means", _ASSUMED)


def _arrivals_text(run: BenchRun) -> str:
    load = run.load
    if load.process == "closed":
        return f"{load.concurrency:,} in flight"
    if run.times is not None and run.times.start_s is not None:
        return "as they were sent"
    return "all at once" if load.process == "burst" else f"{load.rate:g} requests/s"


@dataclass(frozen=True)
class BenchPair:
    """A run and what was predicted for it; a reason where nothing could be.

    predicted: figures by the keys of `run.measured`
    intervals: 80 % of them, as factors of what is predicted, by key, where there are any
    requests:  "ttft", "tpot", "e2el" -> predicted seconds of each request of `run.times`, nan of those refused
    """

    run: BenchRun
    predicted: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    requests: Mapping[str, Floats] = field(default_factory=dict)
    scenario: Scenario | None = None
    facts: tuple[SetupFact, ...] = ()
    result: RunResult | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()  # what the file says and the scenario has otherwise


def predict_runs(
    runs: Sequence[BenchRun],
    given: GivenSetup,
    progress: Progress | None = None,
    intervals: bool = True,
) -> list[BenchPair]:
    """A prediction for each run, or the reason why there is none.

    runs, given: what was measured, and what the user says of the setup
    progress:    called with (runs done, of how many)
    intervals:   whether means get 80 % intervals
    """
    pairs = []
    for number, run in enumerate(runs, 1):
        try:
            pairs.append(predict_run(run, given, intervals))
        except PerfmodelError as error:
            pairs.append(BenchPair(run, reason=str(error)))
        if progress is not None:
            progress(number, len(runs))
    return pairs


def predict_run(run: BenchRun, given: GivenSetup, intervals: bool = True) -> BenchPair:
    """The prediction for one run. Raises PerfmodelError where there can be none.

    run, given, intervals: as of `predict_runs`
    """
    run = run.at_real_speed(given.speed)
    if run.row is not None:
        return _local(run, given)
    with TemporaryDirectory() as folder:
        scenario, facts = bench_scenario(run, given, Path(folder))
        result = simulate(scenario, keep_steps=True, intervals=intervals)
    predicted = {key: float(result.summary[key]) for key in run.measured if result.summary.get(key) is not None}
    factors = result.ensemble.factors() if result.ensemble is not None else {}
    ends = {f"mean_{metric}_ms": values for metric, values in factors.items() if f"mean_{metric}_ms" in predicted}
    requests = _by_request(run, result.requests) if run.times is not None and result.requests is not None else {}
    notes = contradictions(run, scenario)
    return BenchPair(run, predicted, ends, requests, scenario, facts, result, notes=notes)


def _by_request(run: BenchRun, requests: RequestColumns) -> dict[str, Floats]:
    assert run.times is not None
    result = {}
    for metric, seconds in (("ttft", requests.ttft_s), ("tpot", requests.tpot_s), ("e2el", requests.e2el_s)):
        column = np.full(len(run.times), np.nan)
        column[requests.request_id] = seconds
        result[metric] = column
    return result


def _local(run: BenchRun, given: GivenSetup) -> BenchPair:
    """A test of llama-bench: its steps, priced."""
    if given.scenario is not None or given.overrides:
        raise SpecError(
            f"{run.name}: is a test of llama-bench, which says itself what ran; found --scenario or --set beside it, "
            f"allowed are --hardware and --model."
        )
    assert run.row is not None
    setup: LocalSetup = run.row.setup
    device = known_device(given.flags.get("hardware", setup.device))
    if device is None:
        raise SpecError(f"{run.name}: ran on {setup.device[:60]!r}, which no file describes; give --hardware.")
    setup = replace(setup, device=device.name, model=given.flags.get("model", setup.model))
    pair = predict_rows([replace(run.row, setup=setup)], Path())[0]
    if pair.reason or pair.scenario is None:
        raise SpecError(f"{run.name}: {pair.reason}")
    stated_as = {name: f"--{name}" if name in given.flags else "the file" for name in ("model", "hardware")}
    facts: tuple[SetupFact, ...] = (
        SetupFact("model", f"{pair.scenario.model.name}, {setup.gguf_type}", stated_as["model"]),
        SetupFact("hardware", device.name, stated_as["hardware"]),
        SetupFact("engine", pair.scenario.engine.described.label, "the file"),
        SetupFact("backend", setup.backend, "the file"),
    )
    if not pair.is_known:
        facts = (SetupFact("shape of the model", "a decoder of the usual proportions", "assumed"), *facts)
    return BenchPair(run, pair.metrics, pair.intervals, {}, pair.scenario, facts)

"""Evaluates metrics (`perfmodel.planning.metrics`) of a scenario: of a run, a step, or memory; and the highest arrival
rate within the SLO, as papers state a server's capacity."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from typing import Any

from perfmodel import sim
from perfmodel.cost import StepEstimate, peak_flops_per_s, plan_memory, step_costs
from perfmodel.cost.memory.footprint import kv_bytes, kv_bytes_per_token, weights
from perfmodel.errors import PerfmodelError, SpecError, UnsupportedError
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import Positions
from perfmodel.ops.formats import served_model
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import BatchShape, Work, windowed_contexts
from perfmodel.planning.metrics import basis_by_name
from perfmodel.planning.typical_step import StepSpec, engine_of_step
from perfmodel.sim.records.columns import meets_slo
from perfmodel.sim.records.result import RunResult
from perfmodel.specs import load_scenario
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.overrides import apply_override, parse_override
from perfmodel.specs.scenario import Scenario

# Of the search for a capacity.
_PRECISION = 0.02
_MAX_DOUBLINGS = 16
_MAX_USERS = 16_384
MAX_GROWTH = 0.1  # of the rate, beyond what is sustained
Found = tuple[float, str]  # in the metric's own unit, and what it is made of


def max_request_rate(scenario: Scenario) -> float:
    """Requests/s at which the share `attainment` of requests meets the scenario's `slo` (goodput as in DistServe, Zhong
    et al. 2024), and its mean and percentile limits hold, in a queue that does not grow (`is_kept`); within 2 %. Raises
    SpecError without an SLO or initial arrival rate, if no rate is low enough, or if even simultaneous arrivals of so
    few requests meet the SLO."""
    slo, arrivals = scenario.slo, scenario.traffic.arrivals
    if not slo.is_given:
        raise SpecError("max_request_rate needs an `slo`, as in slo: {ttft_ms: 500, tpot_ms: 50}.")
    if arrivals.rate is None:
        raise SpecError(
            f"max_request_rate needs arrivals with a `rate` to begin with; {arrivals.process} has "
            f"none, write for example arrivals: {{process: poisson, rate: 1}}."
        )

    def is_served(rate: float) -> bool:
        return is_kept(scenario, sim.simulate(at_rate(scenario, rate), keep_steps=False).summary)

    rate = highest(is_served, arrivals.rate)
    if rate is None:
        lowest = arrivals.rate / 2**_MAX_DOUBLINGS
        raise SpecError(f"max_request_rate: the slo is missed even at {lowest:.1g} requests/s; relax it.")
    if rate == inf:
        raise SpecError(
            f"max_request_rate: all {scenario.traffic.num_requests or 'requests'} meet the slo even at "
            f"{arrivals.rate * 2**_MAX_DOUBLINGS:,.0f} requests/s, which is all at once; raise traffic.num_requests."
        )
    return rate


def max_concurrency(scenario: Scenario) -> float:
    """Users of a closed loop, such as agents at once, at which the scenario's `slo` is met as in `max_request_rate`;
    exact up to 50, else within 2 %. Raises SpecError without an SLO or a closed loop, or if one user is too many."""
    arrivals = scenario.traffic.arrivals
    if not scenario.slo.is_given or arrivals.concurrency is None:
        raise SpecError(
            "max_concurrency needs an `slo`, as in slo: {ttft_ms: 2000}, and users to begin with, as in "
            "traffic.arrivals: {process: closed_loop, concurrency: 8}."
        )

    @cache
    def is_served(users: int) -> bool:
        if users > _MAX_USERS:
            raise SpecError(f"max_concurrency: the slo is met even with {users // 2:,} users; make it stricter.")
        changed = scenario.traffic.model_copy(update={"arrivals": arrivals.model_copy(update={"concurrency": users})})
        at_users = scenario.model_copy(update={"traffic": changed})
        is_met = meets_slo(scenario, sim.simulate(at_users, keep_steps=False).summary)
        if is_met and users >= (scenario.traffic.num_requests or inf):  # more are never in flight
            raise SpecError(
                f"max_concurrency: the slo is met with all {scenario.traffic.num_requests:,} requests at once; raise "
                f"traffic.num_requests."
            )
        return is_met

    samples = scenario.traffic.samples_per_prompt  # of each user
    users = highest(lambda value: is_served(max(round(value), 1) * samples), arrivals.concurrency / samples)
    if users is None:
        raise SpecError("max_concurrency: the slo is missed even with one user; relax it.")
    return float(max(round(users), 1) * samples)


def is_kept(scenario: Scenario, summary: Mapping[str, Any]) -> bool:
    """Whether a run meets the scenario's `slo` in a queue that does not grow: requests that may wait long would all
    meet it at any rate until their run ends."""
    return meets_slo(scenario, summary) and queue_growth(summary) <= MAX_GROWTH


def queue_growth(summary: Mapping[str, Any]) -> float:
    """Share of the offered rate beyond what a run sustains."""
    rates = summary.get("overload")
    return rates["offered_req_s"] / rates["sustained_req_s"] - 1.0 if rates else 0.0


def at_rate(scenario: Scenario, rate: float) -> Scenario:
    """The scenario at another arrival rate, in requests/s."""
    arrivals = scenario.traffic.arrivals.model_copy(update={"rate": rate})
    return scenario.model_copy(update={"traffic": scenario.traffic.model_copy(update={"arrivals": arrivals})})


def highest(passes: Callable[[float], bool], start: float) -> float | None:
    """The largest value that `passes`, within 2 %, by doubling from `start` (down and up to 2^16 times) and bisection;
    None if none passes, inf if all do. Assumes `passes` is monotonic."""
    low = high = start
    is_fine = passes(start)
    for _ in range(_MAX_DOUBLINGS):
        if is_fine:  # search above: `low` passes
            low, high = high, 2 * high
            if not passes(high):
                break
        else:  # search below: `high` fails
            low, high = low / 2, low
            if passes(low):
                break
    else:
        return inf if is_fine else None
    return narrowed(passes, low, high)


def narrowed(passes: Callable[[float], bool], low: float, high: float) -> float:
    """Bisect to within 2 % of the largest value that `passes`; `low` does, `high` does not."""
    while high > low * (1 + _PRECISION):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def batch_shape(step: StepSpec, scenario: Scenario) -> BatchShape:
    """The batch of a file's `step` block."""
    prompts = ((step.prefill, step.cached),) * step.prompts if step.prefill else ()
    spans, context = scenario.model.attention_spans, step.context or 0
    return BatchShape(
        num_tokens=step.batch + step.prefill * len(prompts),
        num_samples=step.batch + len(prompts),
        prefills=prompts,
        num_decodes=step.batch,
        decode_context=step.batch * context,
        decode_windowed=windowed_contexts(step.batch, step.batch * context, spans),
    )


def roofline_s(work: Work, hardware: HardwareSpec) -> float:
    """max(FLOPs / declared peak, bytes / declared bandwidth), without communication and launches."""
    return max(work.flops / peak_flops_per_s(hardware, work.rate), work.hbm_bytes / hardware.memory_bandwidth)


def step_metrics(
    scenario: Scenario, estimate: StepEstimate, shape: BatchShape, tokens_per_decode: float = 1.0
) -> dict[str, float]:
    """All metrics of the step `shape` of `scenario`, from its `estimate`. tokens_per_decode: tokens per decoding
    sequence (above 1 with speculation)"""
    seconds = estimate.duration_s
    num_tokens = shape.num_tokens + shape.num_decodes * (tokens_per_decode - 1.0)
    return {
        "step_ms": seconds * 1e3,
        "device_ms": estimate.device_s * 1e3,
        "roofline_ms": sum(row.count * roofline_s(row.work, scenario.hardware) for row in estimate.rows) * 1e3,
        "tokens_per_s": num_tokens / seconds,
        "tokens_per_s_per_user": tokens_per_decode / seconds,
        "tflops": estimate.flops / seconds / 1e12,
        "gb_per_s": estimate.hbm_bytes / seconds / 1e9,
        "mfu": estimate.mfu,
        "mbu": estimate.mbu,
    }


def memory_metric(scenario: Scenario, metric: str, step: StepSpec | None = None) -> Found:
    """A memory metric; `step` gives sequences and tokens if the metric needs them. Raises DoesNotFitError for a metric
    of free memory if there is none."""
    context = step.context or 0 if step is not None else 0
    batch = step.batch if step is not None else 0
    model, undivided = served_model(scenario.model, scenario.engine), Sharding()
    layers = list(model.iter_layers())
    per_token = kv_bytes_per_token(model, undivided, layers)
    made_of = f"{per_token:,.0f} B of KV per token, one copy of it"
    whole = {
        "kv_bytes_per_token": per_token,
        "kv_gb": batch * kv_bytes(model, undivided, layers, context) / 1e9,
        "weight_gb": sum(weights(model, undivided, layers, is_first=True, is_last=True).values()) / 1e9,
    }
    if metric in whole:
        return whole[metric], made_of
    plan = plan_memory(scenario.model, scenario.hardware, scenario.engine)
    left = {
        "kv_blocks": plan.num_kv_blocks,
        "max_tokens": plan.max_tokens,
        "max_batch": plan.max_batch(context) if context else 0,
        "max_context": plan.max_context(),
    }
    return float(left[metric]), made_of


def run_metric(result: RunResult, metric: str) -> float | None:
    """A metric of a simulated or executed run; None if missing (request_goodput needs an SLO)."""
    summary = result.summary
    if metric == "kv_cache_filled":
        waste = summary["kv_cache_waste"]
        return None if waste is None else 1.0 - float(waste)
    if metric == "queue_growth":
        return queue_growth(summary)
    value = summary.get(metric)
    return None if value is None else float(value)


def device_shares(summary: Mapping[str, Any]) -> dict[str, float]:
    """Share of device time by bound, with pipeline bubbles if there are stages."""
    bubbles = summary.get("pipeline_bubble_share")
    shares: dict[str, float] = dict(summary["bound_share"])
    if bubbles is None:
        return shares
    return {**{bound: share * (1.0 - bubbles) for bound, share in shares.items()}, "pipeline bubbles": bubbles}


def shares_text(shares: Mapping[str, Any]) -> str:
    """`memory 71%, compute 29%`"""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


# Metrics of runs that are searched for.
CAPACITIES = {"max_request_rate": max_request_rate, "max_concurrency": max_concurrency}
Run = Callable[[Scenario], RunResult]  # serves a scenario's traffic, on either clock
_STEP = "step."  # overrides that begin so are of the point's own step


@dataclass(frozen=True, slots=True)
class Point:
    """A scenario with overrides, and the metrics to evaluate.

    scenario: a file's path or name, `inside`: keys of the scenario's block in it
    overrides:  as `--set` takes them; `step.batch=8` changes `step`
    metrics:    of runs, steps and memory, by name
    step:       for metrics of steps and of memory
    intervals:  also 80 % intervals of a run's means, from several simulations"""

    scenario: str
    metrics: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    step: StepSpec | None = None
    intervals: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """The result of a point.

    values:  metric -> value in its own unit; None if the run lacks it
    problem: why there are no values: the model does not fit, the traffic cannot be served
    origin:  of the times: datasheet, calibrated, measured
    intervals: metric -> ends of its 80 % interval, if requested"""

    values: Mapping[str, float | None] = field(default_factory=dict)
    problem: str = ""
    clock: str = "simulated"
    origin: str = ""
    notes: tuple[str, ...] = ()
    intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)


def load_point(point: Point) -> tuple[Scenario, StepSpec | None]:
    """The point's scenario and step with overrides. Raises SpecError naming the wrong override."""
    others = [text for text in point.overrides if not text.startswith(_STEP)]
    return load_scenario(point.scenario, others, point.inside), step_of(point)


def step_of(point: Point) -> StepSpec | None:
    """The point's step with overrides, without loading the scenario. Raises SpecError as `load_point` does."""
    own = [text for text in point.overrides if text.startswith(_STEP)]
    if not own:
        return point.step
    data = {"step": {} if point.step is None else point.step.model_dump(exclude_defaults=True)}
    positions = Positions("step")
    for text in own:
        change = parse_override(text)
        apply_override(change, data, change.path, positions)
    return parse(StepSpec, data["step"], positions)


def evaluate(point: Point, run: Run | None = None) -> Record:
    """The point's metrics. `run` serves the traffic if a metric needs it (default: the simulator). Raises SpecError for
    wrong overrides; a point that cannot be served, or that its engine refuses, gives a record with the problem."""
    try:
        scenario, step = load_point(point)
    except UnsupportedError as error:
        return Record(problem=f"{error.sentence}.")
    try:
        return _measured(scenario, step, point, run)
    except SpecError:
        raise
    except PerfmodelError as error:
        return Record(problem=str(error))


def evaluate_timed(point: Point) -> tuple[Record, float]:
    """See `evaluate`; also returns the seconds it took."""
    began = time.perf_counter()
    return evaluate(point), time.perf_counter() - began


def _measured(scenario: Scenario, step: StepSpec | None, point: Point, run: Run | None) -> Record:
    names: dict[str, list[str]] = {"run": [], "step": [], "memory": []}
    for name in point.metrics:
        names[basis_by_name(name)].append(name)
    values: dict[str, float | None] = {}
    record = Record()
    for name, search in CAPACITIES.items():
        if name in names["run"]:
            values[name] = search(scenario)
    if of_run := [name for name in names["run"] if name not in values]:
        serve = run or partial(sim.simulate, keep_steps=False, intervals=point.intervals)
        result = serve(scenario)
        values |= {name: run_metric(result, name) for name in of_run}
        ends: Mapping[str, Sequence[float]] = result.summary.get("interval") or {}
        intervals = {name: ends[name] for name in of_run if name in ends}
        record = Record({}, "", result.clock, str(result.summary.get("origin") or ""), result.notes, intervals)
    if names["step"]:
        if step is None:
            example = "`step: {batch: 1, context: 1024}` or `step: {prefill: 512}`"
            raise SpecError(f"{names['step'][0]} is of a step: give {example}.")
        taker = engine_of_step(scenario, is_prompt=not step.batch)
        shape = batch_shape(step, taker)
        outcome = step_metrics(taker, step_costs(taker).estimate(shape), shape)
        values |= {name: outcome[name] for name in names["step"]}
    values |= {name: memory_metric(scenario, name, step)[0] for name in names["memory"]}
    return replace(record, values={name: values[name] for name in point.metrics})

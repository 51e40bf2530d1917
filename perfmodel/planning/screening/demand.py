"""`Demand`: what a scenario's requests ask of an engine, as moments and as a few typical requests; and their rate.

Traffic keeps its own process at any rate. Of a trace that is the trace itself, its gaps longer or shorter: its bursts
stay.
"""

__all__ = ["NUM_TYPICAL", "Demand", "at_rate", "demand_of", "wanted_rate"]

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import SpecError, WorkloadError
from perfmodel.planning.spec import PlanSpec
from perfmodel.sim.traffic.traces import read_trace
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Trace

Floats = NDArray[np.float64]

_LOOKED_AT = 4000
NUM_TYPICAL = 100
_RATED = ("constant", "poisson", "poisson_fixed_count", "gamma")


@dataclass(frozen=True)
class Demand:
    """Requests as the engine sees them, prefixes that it has cached left out.

    prompt, outputs: tokens to compute and to generate, of all requests looked at
    typical:         (tokens to compute, tokens cached, tokens to generate) of requests that stand for all: one from
                     each of NUM_TYPICAL equal parts by prompt length
    context:         mean KV length of a sequence while it decodes
    asks_for_tokens: whether limits of the SLO are on single tokens; reading_speed: tokens a second of those who read
                     the answers, if it has any
    """

    prompt: Floats
    outputs: Floats
    typical: tuple[Floats, Floats, Floats]
    context: float
    asks_for_tokens: bool = False
    reading_speed: float | None = None

    @property
    def mean_prompt(self) -> float:
        return float(self.prompt.mean())

    @property
    def mean_outputs(self) -> float:
        return float(self.outputs.mean())


def demand_of(scenario: Scenario) -> Demand:
    """The demand of the scenario's traffic; of shared prefixes all that the second half of its requests finds cached by
    the first (as in a cache that forgets nothing)."""
    longest = scenario.engine.max_model_len or scenario.model.max_position_embeddings
    traffic = scenario.traffic.model_copy(update={"num_requests": None})
    drafts = list(islice(Workload(scenario.model_copy(update={"traffic": traffic})).drafts(), _LOOKED_AT))
    drafts = [draft for draft in drafts if draft.num_prompt_tokens < longest]
    if not drafts:
        raise WorkloadError(f"{scenario.name}: no request fits max_model_len={longest}; raise it, or shorten prompts.")
    whole = np.array([draft.num_prompt_tokens for draft in drafts], np.float64)
    outputs = np.minimum([draft.num_output_tokens for draft in drafts], longest - whole)
    cached = np.zeros(len(drafts))
    if scenario.engine.enable_prefix_caching and any(draft.block_hashes for draft in drafts):
        cached = _cached([draft.block_hashes for draft in drafts], scenario.engine.block_size)
        half = slice(len(drafts) // 2, None)
        whole, outputs, cached = whole[half], outputs[half], cached[half]
    prompt = np.maximum(whole - cached, 1.0)
    order = np.argsort(prompt, kind="stable")
    places = ((np.arange(NUM_TYPICAL) + 0.5) / NUM_TYPICAL * len(order)).astype(np.intp)
    chosen = order[places]
    context = float(((whole + outputs / 2) * outputs).sum() / outputs.sum())
    typical = prompt[chosen], cached[chosen], outputs[chosen]
    return Demand(prompt, outputs, typical, context, scenario.slo.needs_token_times, scenario.slo.reading_speed)


def _cached(prompts: list[tuple[int, ...]], block_size: int) -> Floats:
    """Tokens of each prompt that those before it have left in the cache."""
    seen: set[int] = set()
    found = []
    for hashes in prompts:
        count = next((index for index, block in enumerate(hashes) if block not in seen), len(hashes))
        found.append(float(count * block_size))
        seen.update(hashes)
    return np.array(found)


def wanted_rate(scenario: Scenario, spec: PlanSpec) -> float:
    """Requests per second that the plan is for; of a trace, on average. Raises SpecError where nothing says so."""
    traffic, arrivals = scenario.traffic, scenario.traffic.arrivals
    if spec.rate is not None:
        return spec.rate
    if arrivals.stages:
        return max(stage.rate for stage in arrivals.stages)
    if traffic.is_offline:
        raise SpecError(
            "a burst has no rate to serve: it is a job; set plan.objective to cheapest_job or shortest_job, or give "
            "plan.rate in requests per second."
        )
    if arrivals.process == "trace" and traffic.trace is not None:
        count, rate = _recorded(traffic.trace, traffic.num_requests, traffic.duration_s)
        if not rate:
            raise SpecError(
                f"{traffic.trace.path}: its first {count} requests come at once, which is no rate to plan for; raise "
                f"traffic.num_requests, or give plan.rate in requests per second."
            )
        return rate
    if arrivals.rate is None:
        raise SpecError(
            f"a plan needs a rate to serve; arrivals of process {arrivals.process} have none, give plan.rate in "
            f"requests per second, as in --set plan.rate=10."
        )
    return arrivals.rate


def at_rate(scenario: Scenario, rate: float, num_requests: int) -> dict[str, Any]:
    """The fields of `scenario`'s traffic that let so many requests arrive at `rate`, by its own process if it has one
    that takes a rate, else as a Poisson stream; of a trace all of its requests."""
    traffic, arrivals = scenario.traffic, scenario.traffic.arrivals
    no_end = {"traffic.duration_s": None} if traffic.duration_s is not None else {}
    if arrivals.process == "trace" and traffic.trace is not None:
        count, recorded = _recorded(traffic.trace, traffic.num_requests, traffic.duration_s)
        speedup = traffic.trace.speedup * rate / recorded if recorded else traffic.trace.speedup
        return {"traffic.trace.speedup": speedup, "traffic.num_requests": count} | no_end
    process: dict[str, Any] = {"process": "poisson"}
    if arrivals.process in _RATED:
        process = arrivals.model_dump(mode="json", include={"process", "cv"}, exclude_defaults=True)
        process.setdefault("process", arrivals.process)
    return {"traffic.arrivals": {**process, "rate": rate}, "traffic.num_requests": num_requests} | no_end


@lru_cache(maxsize=16)
def _recorded(trace: Trace, num_requests: int | None, duration_s: float | None) -> tuple[int, float]:
    """Requests of the trace that are sent, and how many a second: gaps over the time from first to last."""
    count, last_s = 0, 0.0
    for row in read_trace(trace.path, trace.format):
        at_s = row.arrival_s / trace.speedup
        if count == num_requests or (duration_s is not None and at_s > duration_s):
            break
        count, last_s = count + 1, at_s
    return count, (count - 1) / last_s if last_s else 0.0

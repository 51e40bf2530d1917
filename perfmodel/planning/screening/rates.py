"""The rate that a plan is for, and the scenario's traffic at another rate.

Traffic keeps its own process at any rate. Of a trace that is the trace itself, its gaps longer or shorter: its bursts
stay.
"""

__all__ = ["at_rate", "wanted_rate"]

from functools import lru_cache
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.planning.spec import PlanSpec
from perfmodel.sim.traffic.traces import read_trace
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Trace

_RATED = ("constant", "poisson", "poisson_fixed_count", "gamma")


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

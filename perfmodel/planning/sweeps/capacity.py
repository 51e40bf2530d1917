"""The highest arrival rate at which most requests still meet the SLO, as papers state a server's capacity."""

__all__ = ["highest", "max_request_rate"]

from collections.abc import Callable

from perfmodel import sim
from perfmodel.errors import SpecError
from perfmodel.specs.scenario import Scenario

_GOOD = 0.9  # of the requests must meet the SLO (goodput as in DistServe, Zhong et al. 2024)
_PRECISION = 0.02
_MOST_DOUBLINGS = 16


def max_request_rate(scenario: Scenario) -> float:
    """Requests per second at which 90 % of the scenario's requests meet its `slo`, within 2 %.

    Raises SpecError without an SLO or an arrival rate to begin with, or where no rate is low enough.
    """
    slo, arrivals = scenario.slo, scenario.traffic.arrivals
    if not slo.is_given:
        raise SpecError("max_request_rate needs an `slo`, as in slo: {ttft_ms: 500, tpot_ms: 50}.")
    if arrivals.rate is None:
        raise SpecError(
            f"max_request_rate needs arrivals with a `rate` to begin with; {arrivals.process} has "
            f"none, write for example arrivals: {{process: poisson, rate: 1}}."
        )

    def is_served(rate: float) -> bool:
        traffic = scenario.traffic.model_copy(update={"arrivals": arrivals.model_copy(update={"rate": rate})})
        summary = sim.simulate(scenario.model_copy(update={"traffic": traffic}), keep_steps=False).summary
        return float(summary["request_goodput"]) >= _GOOD * float(summary["request_throughput"])

    found = highest(is_served, arrivals.rate)
    if found is None:
        raise SpecError("max_request_rate: the slo is missed at any rate; relax it.")
    return found


def highest(passes: Callable[[float], bool], start: float) -> float | None:
    """The largest value that `passes`, within 2 %, by doubling from `start` and bisection; None if none does.

    What passes at one value is taken to pass at all lower ones.
    """
    low = high = start
    is_fine = passes(start)
    for _ in range(_MOST_DOUBLINGS):
        if is_fine:  # look above: `low` passes
            low, high = high, 2 * high
            if not passes(high):
                break
        else:  # look below: `high` does not pass
            low, high = low / 2, low
            if passes(low):
                break
    else:
        return high if is_fine else None
    while high > low * (1 + _PRECISION):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low

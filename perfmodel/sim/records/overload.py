"""Whether more requests came than were served, and about how many would have been: what a run's latencies hide.

Beyond what a system sustains, a queue grows as long as requests come, and a request that arrives at t waits

    TTFT(t) = TTFT(0) + (offered / sustained - 1) t

so that latencies are a matter of how long the run was. The slope of TTFT over arrivals gives what is sustained.
"""

__all__ = ["overload"]

import numpy as np
from numpy.typing import NDArray

from perfmodel.sim.records.columns import RequestColumns
from perfmodel.specs.scenario import Scenario

_FEWEST = 40  # requests, in four quarters
_LEAST_SLOPE = 0.1  # seconds of TTFT per second of arrivals: a tenth more than is sustained
_LEAST_GROWTH = 3.0  # of the mean TTFT from the first quarter to the last
_MANY_LOST = 0.1  # of the requests

Floats = NDArray[np.float64]


def overload(scenario: Scenario, requests: RequestColumns, num_lost: int) -> dict[str, float] | None:
    """Requests per second that were offered, and that are sustained at about; None where they were served as they came.

    Of stages, those of the highest rate count. Closed loops and bursts offer no rate.

    num_lost: requests that were refused, gave up or failed
    """
    arrivals = scenario.traffic.arrivals
    if arrivals.process in ("closed_loop", "burst"):
        return None
    order = np.argsort(requests.arrival_s, kind="stable")
    times, ttft = requests.arrival_s[order], requests.ttft_s[order]
    inside = _busiest(scenario, times)
    times, ttft = times[inside], ttft[inside]
    if len(times) < _FEWEST or times[-1] <= times[0]:
        return None
    span = float(times[-1] - times[0])
    given = max((stage.rate for stage in arrivals.stages), default=arrivals.rate)
    rate = given or (len(times) + num_lost) / span
    slope = _growth(times, ttft)
    if slope > _LEAST_SLOPE:
        return {"offered_req_s": rate, "sustained_req_s": len(times) / span / (1 + slope)}
    if num_lost > _MANY_LOST * (num_lost + len(requests)) and not arrivals.stages:
        return {"offered_req_s": rate, "sustained_req_s": len(times) / span}
    return None


def _busiest(scenario: Scenario, times: Floats) -> slice:
    """The arrivals of the stage with the highest rate; all without stages."""
    stages = scenario.traffic.arrivals.stages
    if not stages:
        return slice(None)
    ends = np.cumsum([stage.duration_s for stage in stages])
    number = max(range(len(stages)), key=lambda each: stages[each].rate)
    start, end = ends[number] - stages[number].duration_s, ends[number]
    return slice(int(np.searchsorted(times, start)), int(np.searchsorted(times, end)))


def _growth(times: Floats, ttft: Floats) -> float:
    """The slope of TTFT over arrivals from the second quarter to the last, the first left for the system to fill; 0
    unless it grows from quarter to quarter."""
    quarters = [float(part.mean()) for part in np.array_split(ttft, 4)]
    middles = [float(part.mean()) for part in np.array_split(times, 4)]
    grows = quarters[1] < quarters[2] < quarters[3] and quarters[3] > _LEAST_GROWTH * quarters[0]
    return (quarters[3] - quarters[1]) / (middles[3] - middles[1]) if grows else 0.0

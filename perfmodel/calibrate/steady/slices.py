"""One slice of a large deployment under its share of the load: what a steady state needs, in a fraction of the time.

A cluster of 16 prefill and 32 decode ranks under 8,192 requests is sixteen times one prefill and two decode ranks under
512. What a slice misses is that its engines could help those of others out. Where both were simulated, mean TPOT of
slice and whole differ by 0.3 % at most, mean TTFT is 5 to 12 % longer in a slice of a single prefill engine.
"""

__all__ = ["num_slices", "slice_of"]

from math import gcd

from perfmodel.specs import Scenario

_FEW = 256  # requests in flight; a smaller system is simulated whole, and no slice is cut below


def num_slices(scenario: Scenario) -> int:
    """Into how many equal slices a disaggregated deployment in a closed loop can be cut; 1 for any other."""
    concurrency = scenario.traffic.arrivals.concurrency
    if not scenario.cluster.is_disaggregated or concurrency is None or concurrency <= _FEW:
        return 1
    engines = [pool.replicas * pool.engine.data_parallel_size for pool in scenario.pools]
    most = gcd(concurrency, *engines)
    return max(count for count in range(1, most + 1) if most % count == 0 and concurrency // count >= _FEW)


def slice_of(scenario: Scenario, count: int) -> Scenario:
    """The scenario with one of `count` parts of its traffic; `simulate` cuts its engines (`one_of`)."""
    traffic = scenario.traffic
    concurrency = traffic.arrivals.concurrency
    assert concurrency is not None
    assert traffic.num_requests is not None
    arrivals = traffic.arrivals.model_copy(update={"concurrency": concurrency // count})
    update = {"arrivals": arrivals, "num_requests": traffic.num_requests // count}
    return scenario.model_copy(update={"traffic": traffic.model_copy(update=update)})

"""Recorded steady states on the simulated clock, for fitting an engine's profile and for judging it.

Less than the whole run is simulated, with the same means: one slice of a large deployment, or fewer rounds of a closed
loop. A cluster of 16 prefill and 32 decode ranks under 8,192 requests is sixteen times one prefill and two decode ranks
under 512. What a slice misses is that its engines could help those of others out. Where both were simulated, mean TPOT
of slice and whole differ by 0.3 % at most, mean TTFT is 5 to 12 % longer in a slice of a single prefill engine.

The first round of a closed loop finds an idle server and a queue of all others, the second still follows in its waves,
the last sees a server that empties; every round between meets the same system. So of four simulated rounds the third
counts for all that the long run has there (of five the fourth).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd

import numpy as np

from perfmodel.cost import EngineProfile, load_calibration
from perfmodel.cost.calibrations.unmeasured import GenerationFit
from perfmodel.errors import PerfmodelError
from perfmodel.evidence.observation import over_cores
from perfmodel.evidence.sources.steady import SteadyState
from perfmodel.sim import RequestColumns, simulate
from perfmodel.specs import Scenario

_FEW = 256  # requests in flight; a smaller system is simulated whole, and no slice is cut below
Progress = Callable[[int, int], None]
_MOST_REQUESTS = 500  # of a disaggregated run, for it to have an ensemble: draws of pools take long


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


# Rounds simulated of those that a run has, from so many slots on: fewer slots draw too few lengths in a round. Against
# whole runs, five rounds move mean TPOT by 0.3 % and mean TTFT by 2 % (medians of 33 rows), four by 0.6 % and 3 %.
_ROUNDS = {32: 5}
_ROUNDS_OF_UNCLEAR = {4: 4}


def shortened(scenario: Scenario, is_clear: bool = True) -> Scenario:
    """`scenario` with fewer requests, if it has many slots.

    is_clear: whether what was measured can be taken at face value, and so closely
    """
    slots, count = scenario.traffic.arrivals.concurrency or 0, scenario.traffic.num_requests or 0
    kept = _ROUNDS if is_clear else _ROUNDS_OF_UNCLEAR
    num_requests = min((rounds * slots for least, rounds in kept.items() if slots >= least), default=count)
    if num_requests >= count:
        return scenario
    traffic = scenario.traffic.model_copy(update={"num_requests": num_requests})
    return scenario.model_copy(update={"traffic": traffic})


def weighted_means(requests: RequestColumns, slots: int, num_requests: int) -> tuple[float, float]:
    """(mean TTFT, mean TPOT), s, of the run of `num_requests` that `requests` were simulated for."""
    count = len(requests)
    weights = np.ones(count)
    if count < num_requests:
        rounds = np.argsort(np.argsort(requests.request_id)) // slots
        simulated = count // slots
        weights[rounds == simulated - 2] = num_requests / slots - simulated + 1
    ttft, tpot = requests.ttft_s, requests.tpot_s
    has_gap = np.isfinite(tpot)
    return float(np.average(ttft, weights=weights)), float(np.average(tpot[has_gap], weights=weights[has_gap]))


@dataclass(frozen=True)
class SteadyStatePair:
    """One row with its prediction, ms; None and a reason where it could not be simulated.

    intervals: the ends of the 80 % interval of means, as factors of the predicted value, by metric
    is_shortened: whether fewer requests were simulated than the run had
    """

    row: SteadyState
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    reason: str = ""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    is_shortened: bool = False

    def predicted(self, metric: str) -> float:
        return (self.tpot_ms if metric == "tpot_mean" else self.ttft_ms) or float("nan")

    def measured(self, metric: str) -> float:
        return self.row.measured_tpot_ms if metric == "tpot_mean" else self.row.measured_ttft_ms


def simulate_steady_states(
    rows: Sequence[SteadyState],
    progress: Progress | None = None,
    profile: EngineProfile | None = None,
    generation: GenerationFit | None = None,
    intervals: bool = False,
) -> list[SteadyStatePair]:
    """Predictions of all rows, over the cores of this machine; servers that were measured twice are simulated once.

    profile, generation: instead of the committed ones
    intervals:           of the rows that can be taken at face value; what a run does not record has no 80 %
    """
    work = partial(_simulate_row, profile=profile, generation=generation, intervals=intervals)
    keys = [_same_run(row) for row in rows]
    distinct = dict(zip(reversed(keys), reversed(rows), strict=True))
    pairs = over_cores(work, list(distinct.values()), lambda row: _server(row.scenario), progress)
    found = dict(zip(distinct, pairs, strict=True))
    return [replace(found[key], row=row) for key, row in zip(keys, rows, strict=True)]


def _same_run(row: SteadyState) -> tuple[bool, str]:
    """Equal for rows that are simulated alike."""
    return row.is_clear, row.scenario.model_dump_json(exclude={"name"})


def _server(scenario: Scenario) -> tuple[str, ...]:
    """What rows have in common that share step costs; then the shorter load first."""
    engine, weights, traffic = scenario.engine, str(scenario.model.quantization.weights), scenario.traffic
    engines = [pool.engine for pool in scenario.pools]
    degrees = [(e.tensor_parallel_size, e.data_parallel_size, e.enable_expert_parallel) for e in engines]
    server = (scenario.model.name, weights, scenario.hardware.name, engine.profile, engine.version or "")
    return *server, *map(str, degrees), f"{traffic.input_tokens}", f"{traffic.arrivals.concurrency:05d}"


def _simulate_row(
    row: SteadyState,
    profile: EngineProfile | None = None,
    generation: GenerationFit | None = None,
    intervals: bool = False,
) -> SteadyStatePair:
    scenario, calibration = row.scenario, None
    if generation is not None:
        calibration = load_calibration(scenario.hardware, scenario.engine.profile, generation=generation)
    try:
        count = num_slices(scenario)
        scenario = scenario if count == 1 else slice_of(scenario, count)
        simulated = shortened(scenario, row.is_clear)
        result = simulate(
            simulated,
            calibration=calibration,
            profile=profile,
            keep_steps=False,
            one_of=count,
            intervals=intervals and _has_interval(row, scenario),
        )
    except PerfmodelError as error:
        return SteadyStatePair(row, reason=str(error))
    assert result.requests is not None
    traffic = scenario.traffic
    ttft_s, tpot_s = weighted_means(result.requests, traffic.arrivals.concurrency or 0, traffic.num_requests or 0)
    factors = result.ensemble.factors() if result.ensemble is not None else {}
    ends = {f"{metric}_mean": found for metric, found in factors.items()}
    return SteadyStatePair(row, ttft_s * 1e3, tpot_s * 1e3, "", ends, simulated is not scenario)


def _has_interval(row: SteadyState, scenario: Scenario) -> bool:
    """Whether the row gets an ensemble: those at face value, and small disaggregated ones, all of which are not."""
    is_small = (scenario.traffic.num_requests or 0) <= _MOST_REQUESTS
    return row.is_clear or (scenario.cluster.is_disaggregated and is_small)

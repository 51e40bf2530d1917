"""Recorded steady states on the simulated clock, for fitting an engine's profile and for judging it."""

__all__ = ["SteadyStatePair", "simulate_steady_states"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from perfmodel.calibrate.over_cores import over_cores
from perfmodel.calibrate.steady.reduced import num_slices, shortened, slice_of, weighted_means
from perfmodel.calibrate.steady.states import SteadyState
from perfmodel.cost import EngineProfile, load_calibration
from perfmodel.cost.calibrations.unmeasured import GenerationFit
from perfmodel.errors import PerfmodelError
from perfmodel.sim import simulate
from perfmodel.specs import Scenario

Progress = Callable[[int, int], None]
_MOST_REQUESTS = 500  # of a disaggregated run, for it to have an ensemble: draws of pools take long


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
    """Predictions of all rows, over the cores of this machine.

    profile, generation: instead of the committed ones
    intervals:           of the rows that can be taken at face value; what a run does not record has no 80 %
    """
    work = partial(_simulate_row, profile=profile, generation=generation, intervals=intervals)
    return over_cores(work, rows, lambda row: _server(row.scenario), progress)


def _server(scenario: Scenario) -> tuple[str, ...]:
    profile, weights = scenario.engine.profile, str(scenario.model.quantization.weights)
    engines = [pool.engine for pool in scenario.pools]
    degrees = [(e.tensor_parallel_size, e.data_parallel_size, e.enable_expert_parallel) for e in engines]
    return scenario.model.name, weights, scenario.hardware.name, profile, *map(str, degrees)


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

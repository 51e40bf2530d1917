"""`WholeRuns`: prediction intervals of clusters with varying replicas, from two whole runs under opposite draws.

No part of such a run is representative, so two whole runs follow the gradient of mean E2E: a linear function of
independent scores has all its standard deviation along its gradient. The (shortened) ensemble of a twin with constant
average pool sizes gives the gradient, and the other latencies' variance in other directions. Runs no longer than a
shortened run are simulated under all eight draws instead."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np

from perfmodel.cost.calibrations.draws import NUM_SCORES, Scores
from perfmodel.sim.records import ensemble
from perfmodel.sim.records.columns import Floats, RequestColumns
from perfmodel.sim.records.ensemble import MOST, Ensemble, Interval, interval_of, log_ratio, span_s
from perfmodel.specs.scenario import Scenario


@dataclass(frozen=True)
class WholeRuns:
    """A run, its twin's ensemble, and two whole runs under opposite draws."""

    whole: RequestColumns
    twin: Ensemble  # of the cluster with constant sizes, its averages
    direction: Scores  # of unit length
    pair: tuple[RequestColumns, RequestColumns]  # of the whole runs under `direction` and under its opposite

    def factors(self, arrived_s: Interval | None = None) -> dict[str, Interval]:
        """As `Ensemble.factors`: 80 % intervals of mean ttft, tpot, itl and e2el as factors of the mean."""
        base = _means(self.whole, arrived_s)
        ends = [_means(requests, arrived_s) for requests in self.pair]
        twin = self.twin.logs()
        factors = {}
        for metric, mean in base.items():
            if isfinite(mean) and mean > 0:
                logs = np.array([[log_ratio(end[metric], mean) for end in ends]])
                aside = _beside(twin[metric], self.direction) if metric in twin else 0.0
                factors[metric] = interval_of(logs, aside)
        return factors

    def duration_factor(self) -> Interval:
        """80 % interval of the makespan, as a factor."""
        return interval_of(np.array([[log_ratio(span_s(requests), span_s(self.whole)) for requests in self.pair]]))


def simulate_whole_runs(
    scenario: Scenario, requests: RequestColumns, sizes: Mapping[int, int], serve: ensemble.Serve
) -> "Ensemble | WholeRuns":
    """Intervals of a run of `scenario` with `requests`.

    sizes: time-averaged replicas of scaled pools, by number; serve: see `run_ensemble`"""
    if len(requests) <= MOST:
        return ensemble.run_ensemble(scenario, requests, serve, can_shorten=False)
    twin = ensemble.run_ensemble(_settled(scenario, sizes), requests, serve)
    direction = _steepest(twin.logs().get("e2el"))
    pair = (serve(scenario, direction), serve(scenario, tuple(-score for score in direction)))
    return WholeRuns(requests, twin, direction, pair)


def _settled(scenario: Scenario, sizes: Mapping[int, int]) -> Scenario:
    cluster = scenario.cluster
    pools = tuple(
        pool.model_copy(update={"replicas": sizes.get(number, pool.replicas), "autoscaling": None})
        for number, pool in enumerate(cluster.pools)
    )
    alone = {} if pools else {"replicas": sizes.get(0, cluster.replicas)}
    update = {"pools": pools, "autoscaling": None, "failures": None, **alone}
    return scenario.model_copy(update={"cluster": cluster.model_copy(update=update)})


def _slopes(logs: Floats) -> Floats:
    """Slopes of a metric's logarithm over each score, from the design's draws."""
    return np.array(ensemble.design()).T @ ((logs[:, 0] - logs[:, 1]) / 2) / NUM_SCORES


def _steepest(logs: Floats | None) -> Scores:
    """Unit direction in which a metric grows fastest; uniform where it is flat."""
    slopes = np.zeros(NUM_SCORES) if logs is None else _slopes(logs)
    length = float(np.linalg.norm(slopes))
    return tuple((slopes / length).tolist()) if length > 0 else (1 / sqrt(NUM_SCORES),) * NUM_SCORES


def _beside(logs: Floats, direction: Scores) -> float:
    """Standard deviation of a metric's logarithm orthogonal to `direction`."""
    slopes = _slopes(logs)
    along = float(slopes @ np.array(direction))
    return sqrt(max(float(slopes @ slopes) - along**2, 0.0))


def _means(requests: RequestColumns, arrived_s: Interval | None) -> dict[str, float]:
    weights = np.ones(len(requests))
    if arrived_s is not None:
        weights = ((requests.arrival_s > arrived_s[0]) & (requests.arrival_s <= arrived_s[1])).astype(np.float64)
    return ensemble.mean_latencies(requests, weights)

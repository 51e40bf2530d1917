"""`Ensemble`: a shortened run, repeated under draws of the calibration errors.

The effect of an error factor on a mean latency depends on the traffic: queues amplify it, the host hides it, cached
prompts are free of it. So we simulate the same arrivals and lengths (common random numbers) with and without each draw;
the log ratios of the means give the interval of the mean.

Draws are the rows of a Hadamard matrix and their opposites, one column per score (`perfmodel.cost.calibrations.draws`).
Columns are orthogonal, so eight draws give the exact variance of any latency that is a product of powers of the
factors. The pairs show asymmetry near saturation. Unbounded queues are extrapolated to the length of the long run."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, exp, isfinite
from statistics import median

import numpy as np

from perfmodel.cost.calibrations.draws import NUM_SCORES, Z_P90, Scores
from perfmodel.sim.records.columns import Bools, Floats, Ints, RequestColumns
from perfmodel.specs.scenario import Scenario

Interval = tuple[float, float]
Serve = Callable[[Scenario, Scores | None], RequestColumns]

_MAX_LOG_RATIO = 7.0  # a thousandfold; an unbounded queue has no meaningful ratio
_FEWEST, MOST = 160, 240  # requests of an open-loop draw
_MAX_EARLY = 200
_QUEUEING = 0.4  # share of TTFT spent queueing above which a queue may be growing, so more requests are needed
_PER_SLOT = 1.5  # requests of a closed-loop draw; of conversations at least one a slot, or some slots have none
_TURNED = NUM_SCORES - 1  # the column of turned signs, so that each draw has three scores of one sign, none has four


@dataclass(frozen=True)
class Ensemble:
    """Requests of shortened runs: `base` without factors, `pairs` under opposite draws; `whole`: the long run.

    num_early:  requests at the start that count once; later ones count `rest_weight` times
    time_share: share of the long run's stages
    stretch:    duration of the long run's arrivals over the short run's; 1 for closed loops"""

    whole: RequestColumns
    base: RequestColumns
    pairs: tuple[tuple[RequestColumns, RequestColumns], ...]
    num_early: int
    rest_weight: float
    time_share: float
    stretch: float

    def factors(self, arrived_s: Interval | None = None) -> dict[str, Interval]:
        """80 % intervals of mean ttft, tpot, itl and e2el as factors of the mean; metrics without a mean are left out.

        arrived_s: only requests that arrived between two times of the long run"""
        return {metric: interval_of(logs) for metric, logs in self.logs(arrived_s).items()}

    def logs(self, arrived_s: Interval | None = None) -> dict[str, Floats]:
        """Log ratios of the means under each draw to the base, a row per pair."""
        # Queueing seen only in the short run is chance, and common to all draws.
        seen = self._backlog_s(self.base, arrived_s)
        chance_s = max(seen - max(self._waiting_s(self.whole, arrived_s) - self._waiting_s(self.base, arrived_s), 0), 0)
        base = self._means(self.base, arrived_s, chance_s)
        pairs = [tuple(self._means(requests, arrived_s, chance_s) for requests in pair) for pair in self.pairs]
        return {
            metric: np.array([[log_ratio(one[metric], mean) for one in pair] for pair in pairs])
            for metric, mean in base.items()
            if isfinite(mean) and mean > 0
        }

    def duration_factor(self) -> Interval:
        """80 % interval of the makespan of an offline job, as a factor."""
        logs = [[log_ratio(span_s(one), span_s(self.base)) for one in pair] for pair in self.pairs]
        return interval_of(np.array(logs))

    def _chosen(self, requests: RequestColumns, arrived_s: Interval | None) -> Bools:
        if arrived_s is None:
            return np.ones(len(requests), dtype=bool)
        share = 1.0 if requests is self.whole else self.time_share
        return (requests.arrival_s > arrived_s[0] * share) & (requests.arrival_s <= arrived_s[1] * share)

    def _waiting_s(self, requests: RequestColumns, arrived_s: Interval | None) -> float:
        waiting = (requests.first_scheduled_s - requests.arrival_s)[self._chosen(requests, arrived_s)]
        return float(waiting.mean()) if len(waiting) else 0.0

    def _backlog_s(self, requests: RequestColumns, arrived_s: Interval | None) -> float:
        chosen = self._chosen(requests, arrived_s)
        return _backlog_s(requests.arrival_s[chosen], requests.first_scheduled_s[chosen], self.stretch)

    def _means(self, requests: RequestColumns, arrived_s: Interval | None, chance_s: float) -> dict[str, float]:
        weights = np.where(requests.request_id < self.num_early, 1.0, self.rest_weight)
        weights = weights * self._chosen(requests, arrived_s)
        waiting = max(self._backlog_s(requests, arrived_s) - chance_s, 0.0)
        means = mean_latencies(requests, weights)
        return means | {"ttft": waiting + means["ttft"], "e2el": waiting + means["e2el"]}


def mean_latencies(requests: RequestColumns, weights: Floats) -> dict[str, float]:
    """Weighted mean ttft, tpot, itl and e2el in seconds."""
    later = requests.num_output_tokens - 1
    decoding = requests.e2el_s - requests.ttft_s
    return {
        "ttft": _mean(requests.ttft_s, weights),
        "tpot": _mean(decoding / np.maximum(later, 1), weights * (later > 0)),
        "itl": _mean(decoding, weights, later),
        "e2el": _mean(requests.e2el_s, weights),
    }


def run_ensemble(scenario: Scenario, requests: RequestColumns, serve: Serve, can_shorten: bool = True) -> Ensemble:
    """Ensemble of a run of `scenario` with `requests`.

    serve:       simulates other traffic, under a draw of scores or None
    can_shorten: whether a shorter run is representative"""
    num_early, count = _sizes(scenario, requests)
    short, time_share = _shortened(scenario, count) if can_shorten else (scenario, 1.0)
    is_whole = not can_shorten or (count == len(requests) and time_share == 1.0)
    base = requests if is_whole else serve(short, None)
    num_early = min(num_early, len(base) // 2)
    rest_weight = (len(requests) - num_early) / max(len(base) - num_early, 1)
    pairs = [(serve(short, scores), serve(short, tuple(-score for score in scores))) for scores in design()]
    is_closed_loop = scenario.traffic.arrivals.process == "closed_loop"
    stretch = 1.0 if is_closed_loop else max(len(requests) / max(len(base), 1), 1.0)
    return Ensemble(requests, base, tuple(pairs), num_early, max(rest_weight, 1.0), time_share, stretch)


def design() -> list[Scores]:
    """One of each two opposite draws: rows of Sylvester's Hadamard matrix."""
    return [
        tuple((-1.0) ** ((row & column).bit_count() + (column == _TURNED)) for column in range(NUM_SCORES))
        for row in range(NUM_SCORES)
    ]


def _sizes(scenario: Scenario, requests: RequestColumns) -> tuple[int, int]:
    """(early, all) requests of a shortened run."""
    traffic = scenario.traffic
    if traffic.arrivals.process == "closed_loop":
        concurrency = traffic.arrivals.concurrency or 1
        num_turns = 0.0 if requests.session is None else len(requests) / len(np.unique(requests.session))
        return concurrency, min(len(requests), ceil(max(_PER_SLOT, num_turns) * concurrency))
    in_flight = float(requests.e2el_s.sum()) / max(span_s(requests), 1e-9)  # Little's law
    distinct = 0
    if traffic.prefix is not None and traffic.prefix.num_prompts_per_group:
        distinct = traffic.prefix.num_groups * traffic.prefix.num_prompts_per_group
    early = min(max(distinct, ceil(in_flight)), _MAX_EARLY)
    waiting = requests.first_scheduled_s - requests.arrival_s
    fewest = MOST if waiting.mean() > _QUEUEING * requests.ttft_s.mean() else _FEWEST
    longest = len(requests) if traffic.rollouts is None else traffic.num_requests or 1  # all iterations are alike
    return early, min(longest, max(fewest, 2 * early), MOST)


def _shortened(scenario: Scenario, count: int) -> tuple[Scenario, float]:
    """`scenario` with about `count` requests at the same rates, and the remaining share of each stage's time."""
    traffic, stages = scenario.traffic, scenario.traffic.arrivals.stages
    in_stages = sum(stage.rate * stage.duration_s for stage in stages)
    share = min(count / in_stages, 1.0) if stages else 1.0
    if stages and share < 1.0:
        cut = tuple(stage.model_copy(update={"duration_s": stage.duration_s * share}) for stage in stages)
        traffic = traffic.model_copy(update={"arrivals": traffic.arrivals.model_copy(update={"stages": cut})})
    else:
        rollouts = traffic.rollouts and traffic.rollouts.model_copy(update={"iterations": 1})
        traffic = traffic.model_copy(update={"num_requests": count, "rollouts": rollouts})
    return scenario.model_copy(update={"traffic": traffic}), share


def _backlog_s(arrival_s: Floats, scheduled_s: Floats, stretch: float) -> float:
    """Mean extra wait in seconds in a run `stretch` times as long if the queue grows without bound.

    It does if every request of the last third waits longer than the mean of the first third."""
    if len(arrival_s) < 12 or stretch <= 1:
        return 0.0
    order = np.argsort(arrival_s, kind="stable")
    arrival_s, waiting = arrival_s[order], (scheduled_s - arrival_s)[order]
    third, span = len(order) // 3, float(arrival_s[-1] - arrival_s[0])
    if span <= 0 or waiting[-third:].min() <= waiting[:third].mean():
        return 0.0
    pace = (waiting[-third:].mean() - waiting[:third].mean()) / (span * 2 / 3)
    return float(pace) * span * (stretch - 1) / 2


def span_s(requests: RequestColumns) -> float:
    if not len(requests):  # none answered under this draw
        return float("nan")
    return float(requests.finished_s.max() - requests.arrival_s.min())


def _mean(values: Floats, weights: Floats, amounts: Ints | int = 1) -> float:
    total = float(np.sum(weights * amounts))
    return float(np.sum(weights * values)) / total if total > 0 else float("nan")


def log_ratio(mean: float, base: float) -> float:
    if not isfinite(mean) or mean <= 0:
        return _MAX_LOG_RATIO
    return float(np.clip(np.log(mean / base), -_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def interval_of(logs: Floats, aside: float = 0.0) -> Interval:
    """Interval of a row of two logarithms per pair: median plus or minus the root mean square of the pairs' ends.

    aside: standard deviation of independent errors that the pairs leave out. The predicted mean always lies inside."""
    centre = median(logs.ravel().tolist())
    ends = logs.max(axis=1), logs.min(axis=1)
    up, down = (np.hypot(np.sqrt(np.mean(np.square(end - centre))), aside) for end in ends)
    return min(exp(centre - Z_P90 * float(down)), 1.0), max(exp(centre + Z_P90 * float(up)), 1.0)

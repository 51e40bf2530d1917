"""Run records as columns (a row per request or step), latency statistics and SLO attainment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil, floor, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.specs.scenario import Scenario
from perfmodel.specs.slo import SLO

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class RequestColumns:
    """One row per finished request, in order of finishing. Times in seconds since the start of the run."""

    request_id: Ints
    arrival_s: Floats
    first_scheduled_s: Floats
    first_token_s: Floats
    finished_s: Floats
    num_prompt_tokens: Ints
    num_output_tokens: Ints
    num_cached_tokens: Ints
    num_preemptions: Ints
    replica: Ints
    # Only where a limit asks for them: how long a reader waited for tokens, and the longest gap between two
    reader_wait_s: Floats | None = None
    max_itl_s: Floats | None = None
    # Only of turns of conversations: which one, and the turn's number from 0
    session: Ints | None = None
    turn: Ints | None = None

    def __len__(self) -> int:
        return len(self.request_id)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is not None)

    def some(self, rows: Ints) -> "RequestColumns":
        """Select `rows`."""
        return RequestColumns(**{name: getattr(self, name)[rows] for name in self.names})

    @property
    def ttft_s(self) -> Floats:
        return self.first_token_s - self.arrival_s

    @property
    def e2el_s(self) -> Floats:
        return self.finished_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """(E2E - TTFT) / (output tokens - 1); nan for one-token answers, which have no TPOT."""
        later, nans = self.num_output_tokens - 1, np.full(len(self), np.nan)
        tpot_s: Floats = np.divide(self.finished_s - self.first_token_s, later, out=nans, where=later > 0)
        return tpot_s


@dataclass(frozen=True)
class StepColumns:
    """One row per step record (see `perfmodel.engine.StepRecord`); times in seconds."""

    replica: Ints
    index: Ints
    num_steps: Ints
    start_s: Floats
    end_s: Floats
    first_duration_s: Floats
    num_tokens: Ints
    num_decodes: Ints
    decode_context: Ints
    num_chunks: Ints
    num_running: Ints
    num_waiting: Ints
    used_blocks: Ints
    num_drafts: Ints
    num_draft_tokens: Ints
    num_accepted_tokens: Ints

    def __len__(self) -> int:
        return len(self.index)


def ratio(amount: float, base: float) -> float | None:
    """`amount` / `base`; None if `base` is 0."""
    return amount / base if base else None


def finite(value: float) -> float | None:
    """`value`, or None if JSON cannot represent it."""
    return float(value) if isfinite(value) else None


def latencies(name: str, seconds: Floats) -> dict[str, float | None]:
    """Statistics of `seconds`, which is overwritten: with a million requests every copy shows in peak memory."""
    is_finite = np.isfinite(seconds)
    seconds = seconds if is_finite.all() else seconds[is_finite]
    if not len(seconds):
        return {f"{statistic}_{name}_ms": None for statistic in ("mean", "median", "std", *list(QUANTILES)[1:])}
    values = {"mean": seconds.mean(), "median": 0.0, "std": seconds.std()}
    values |= dict(zip(QUANTILES, quantiles(seconds, tuple(QUANTILES.values())), strict=True))
    return {f"{statistic}_{name}_ms": finite(value * 1e3) for statistic, value in values.items()}


def request_latencies(requests: RequestColumns) -> dict[str, float | None]:
    """Statistics of TTFT, TPOT and E2E latency."""
    ttft, tpot = latencies("ttft", requests.ttft_s), latencies("tpot", requests.tpot_s)
    return ttft | tpot | latencies("e2el", requests.e2el_s)


def quantiles(values: Floats, shares: Sequence[float]) -> list[float]:
    """Bit-identical to `np.quantile(values, shares, overwrite_input=True)`, without its import of `numpy.ma`.

    values: finite, not empty; reordered in place. shares: in [0, 1]"""
    last = len(values) - 1
    places = [last * share for share in shares]
    below = [min(floor(place), last) for place in places]
    above = [min(number + 1, last) for number in below]
    values.partition(sorted({*below, *above}))
    results = []
    for place, low, high in zip(places, below, above, strict=True):
        start, end, weight = float(values[low]), float(values[high]), place - low
        step = end - start
        results.append(end - step * (1 - weight) if weight >= 0.5 else start + step * weight)
    return results


def missed(slo: SLO, requests: RequestColumns) -> dict[str, Bools]:
    """Masks of requests that miss each limit of `slo`, by metric.

    One-token answers have no TPOT and no gap. For limits on means or percentiles: the requests beyond them. ITL limits
    apply to the run; no request misses them."""
    masks: dict[str, Bools] = {}
    if slo.has_ttft_limit:
        masks["ttft"] = requests.ttft_s * 1e3 > slo.ttft_limit_ms(requests.num_prompt_tokens)
    if slo.tpot_limit_ms is not None:
        masks["tpot"] = requests.tpot_s * 1e3 > slo.tpot_limit_ms
    if slo.max_itl_ms is not None and requests.max_itl_s is not None:
        masks["max_itl"] = requests.max_itl_s * 1e3 > slo.max_itl_ms
    if slo.e2el_ms is not None:
        masks["e2el"] = requests.e2el_s * 1e3 > slo.e2el_ms
    if slo.reading_speed is not None and requests.reader_wait_s is not None:
        masks["reader_wait"] = requests.reader_wait_s * 1e3 > slo.reading_wait_ms
    if not slo.is_of_requests:
        seconds = {"ttft": requests.ttft_s, "tpot": requests.tpot_s, "e2el": requests.e2el_s}
        masks |= {
            limit.field: seconds[limit.latency] * 1e3 > limit.limit_ms
            for limit in slo.statistics
            if limit.latency in seconds
        }
    return masks


def percentiles_met(slo: SLO, summary: Mapping[str, Any], num_lost: int) -> dict[str, Any]:
    """Attainment of each mean and percentile limit of `slo` in a run with `summary`; empty without such limits.

    Request classes have no inter-token gaps of their own."""
    lost_share = num_lost / max(num_lost + summary["completed"], 1)
    limits = [limit for limit in slo.statistics if limit.metric in summary]
    met = {limit.field: limit.is_met(summary[limit.metric], lost_share) for limit in limits}
    return {"slo_percentiles_met": met} if met else {}


def meets_slo(scenario: Scenario, summary: Mapping[str, Any]) -> bool:
    """Whether enough of all sent requests meet the per-request limits (`Scenario.attainment`), and mean and percentile
    limits of the scenario's `slo` hold."""
    if not all(summary.get("slo_percentiles_met", {}).values()):
        return False
    return not scenario.slo.is_of_requests or float(summary["slo_attainment"] or 0.0) >= scenario.attainment


def num_good(missed: Mapping[str, Bools]) -> int | None:
    """Requests within all limits; None without limits."""
    if not missed:
        return None
    bad: Bools = np.logical_or.reduce(list(missed.values()))
    return int(len(bad) - bad.sum())


def attained(missed: Mapping[str, Bools], num_lost: int) -> dict[str, Any]:
    """Share of requests within all limits, and within each; lost requests miss all. Empty without limits."""
    good = num_good(missed)
    if good is None:
        return {}
    sent = num_lost + len(next(iter(missed.values())))
    by = {name: ratio(len(mask) - int(mask.sum()), sent) for name, mask in missed.items()}
    return {"slo_attainment": ratio(good, sent), "slo_attainment_by": by}


def tail(requests: RequestColumns, end_s: float) -> dict[str, float | None]:
    """Drain time of an offline job: from the first unfilled slot with an empty queue to the end; averaged over engines,
    and as a share of the job's time."""
    replicas = np.unique(requests.replica).tolist()
    last_s = {number: float(requests.first_scheduled_s[requests.replica == number].max()) for number in replicas}
    seconds = end_s - float(np.mean(list(last_s.values()))) if last_s else 0.0
    return {"tail_s": seconds if last_s else None, "tail_share": ratio(seconds, end_s) if last_s else None}


def rollout_times(requests: RequestColumns, weight_update_s: float) -> dict[str, float]:
    """Means over the iterations of `traffic.rollouts`, whose requests arrive at one time each.

    rollout_s: up to the last answer; iteration_s: with the update of the weights; slowest_tenth_share: of the rollout,
    what is left when nine in ten are answered (Seer, arXiv 2511.14617); idle_share: of the engines' time in the
    rollout, what those without a request wait for the others; update_share: of the iteration"""
    engines = np.unique(requests.replica)
    begins, numbers = np.unique(requests.arrival_s, return_inverse=True)
    drain = tenth = idle = rollout = 0.0
    for number, begin in enumerate(begins.tolist()):
        answers = requests.some(np.flatnonzero(numbers == number))
        done = np.sort(answers.finished_s)
        end_s = float(done[-1])
        rollout += end_s - begin
        tenth += end_s - float(done[ceil(0.9 * len(done)) - 1])
        drain += tail(answers, end_s)["tail_s"] or 0.0
        last_s = [answers.finished_s[answers.replica == engine].max(initial=begin) for engine in engines]
        idle += end_s - float(np.mean(last_s))
    count, whole = max(len(begins), 1), rollout + len(begins) * weight_update_s
    shares = {"slowest_tenth_share": tenth, "idle_share": idle, "tail_share": drain}
    return {
        "iterations": len(begins),
        "rollout_s": rollout / count,
        "iteration_s": whole / count,
        "tail_s": drain / count,
        **{name: ratio(seconds, rollout) or 0.0 for name, seconds in shares.items()},
        "update_share": ratio(len(begins) * weight_update_s, whole) or 0.0,
    }


def token_latencies(requests: RequestColumns) -> dict[str, float | None]:
    """Statistics of longest inter-token gaps and reader waits, where an SLO limits them."""
    statistics: dict[str, float | None] = {}
    if requests.max_itl_s is not None:
        statistics |= latencies("max_itl", requests.max_itl_s[requests.num_output_tokens > 1])
    if requests.reader_wait_s is not None:
        statistics |= latencies("reader_wait", requests.reader_wait_s.copy())
    return statistics

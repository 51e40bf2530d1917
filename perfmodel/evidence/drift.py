"""A running server vs its prediction: where it leaves the interval, and which term explains it.

A server's counters say what it did between two readings. The scenario is simulated under the rate that the server saw,
or, in a closed loop, under the requests that it had in flight (Little 1961: rate times mean time). Drift is where a
mean lies outside its 80 % interval, to which the spread of so many requests is added in quadrature. Each term that
differs from the prediction is put into the scenario alone; the one that brings the simulated means nearest to the
server's explains the drift, and where none does the time of steps is left. Counters are in Prometheus' text format and
have vLLM's names here ("Production Metrics"); what other servers call them is in hardware_specs/engines/commands.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Any, NamedTuple

from scipy.optimize import brentq

from perfmodel.cost.calibrations.draws import Z_P90
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.planning.operations import VLLM_HISTOGRAMS
from perfmodel.sim import RunResult, simulate
from perfmodel.specs.commands.description import serving_command
from perfmodel.specs.scenario import Scenario

_SAMPLE = re.compile(r"^(\w[\w:]*)(?:\{[^}]*\})?\s+([-+.\deEInfNa]+)", re.MULTILINE)
_MEANS = {f"mean_{latency}_ms": histogram for latency, histogram in VLLM_HISTOGRAMS.items()}
_LENGTHS = {"output_tokens": "generation_tokens", "input_tokens": "prompt_tokens"}
_REQUESTS = 400  # of a simulation
_DIFFERS = 0.1  # of a length or a share of drafts, from which it may explain a drift
_COLDER = 0.05  # of the cache's hit rate
_EXPLAINS = 0.5  # of the gap between server and prediction, which a term has to close


@dataclass(frozen=True)
class Observed:
    """What a server did between two readings.

    rate: requests that arrived, per second; requests: that have finished; means: metric -> ms, of which there were any;
    lengths: mean tokens; running, waiting: requests at the second reading; hit_rate: of tokens looked up in the prefix
    cache; from_drafts: of generated tokens, those that were drafted and accepted; None without any"""

    rate: float
    requests: float
    means: Mapping[str, float]
    lengths: Mapping[str, float]
    running: float
    waiting: float
    hit_rate: float | None = None
    from_drafts: float | None = None

    @property
    def in_flight(self) -> float:
        return self.rate * self.means["mean_e2el_ms"] * 1e-3


def read_counts(text: str, engine: str = "vllm") -> Mapping[str, float]:
    """vLLM's name of a metric of `engine`'s server, without `vllm:` and `_total` -> its sum over all labels. Raises
    SpecError for a text without any."""
    counts: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        counts[name] = counts.get(name, 0.0) + float(value)
    known = {name.removeprefix("vllm:").removesuffix("_total"): n for name, n in counts.items() if "vllm:" in name}
    command = serving_command(engine)
    for name, own in command.serving.metrics.items() if command is not None and command.serving is not None else ():
        for part in ("", "_sum", "_count"):
            if own + part in counts:
                known[name.removesuffix("_total") + part] = counts[own + part]
    if not known:
        raise SpecError(f"metrics: none is of {engine}; expected what the scenario's server has at /metrics.")
    return known


def observed_between(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> Observed | None:
    """None where no request has finished in between, or the server has begun anew."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def share(part: str, whole: str) -> float | None:
        return grown(part) / grown(whole) if grown(whole) > 0 else None

    def mean(name: str) -> float:
        return share(f"{name}_sum", f"{name}_count") or 0.0

    finished = grown("e2e_request_latency_seconds_count")
    if finished <= 0 or any(grown(f"{name}_count") < 0 for name in _MEANS.values()):
        return None
    arrived = finished + grown("num_requests_running") + grown("num_requests_waiting")
    return Observed(
        max(arrived, 1.0) / seconds,
        finished,
        {metric: 1e3 * mean(name) for metric, name in _MEANS.items() if grown(f"{name}_count")},
        {name: mean(f"request_{tokens}") or grown(tokens) / finished for name, tokens in _LENGTHS.items()},
        after.get("num_requests_running", 0.0),
        after.get("num_requests_waiting", 0.0),
        (share("prefix_cache_hits", "prefix_cache_queries") or 0.0) if "prefix_cache_queries" in after else None,
        share("spec_decode_num_accepted_tokens", "generation_tokens"),
    )


class Term(NamedTuple):
    """A difference that may explain a drift. changes: of the scenario, that make it so"""

    sentence: str
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Judgement:
    """intervals: metric -> (low, high), ms; drifted: metrics outside; because: what explains it, empty without drift"""

    observed: Observed
    predicted: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    drifted: tuple[str, ...]
    because: str = ""

    def __str__(self) -> str:
        """`4.1 req/s: TTFT 70 ms (50 to 90) ...`"""
        words = [f"{self.observed.rate:.3g} req/s"]
        for metric, value in self.observed.means.items():
            name, within = (
                metric.split("_")[1].upper().removesuffix("L"),
                " to ".join(map(_digits, self.intervals[metric])),
            )
            words.append(f"{name} {_digits(value)} ms ({within}{', outside' if metric in self.drifted else ''})")
        return ", ".join(words) + (f". {self.because}" if self.because else "")


class DriftGuard:
    """Judges a server by `scenario`, which says how it was started and what traffic was expected."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    def counts(self, text: str) -> Mapping[str, float]:
        """Counts in the metrics of the scenario's server, by `read_counts`."""
        return read_counts(text, self._scenario.engine.described.description.name)

    def judge(self, observed: Observed) -> Judgement:
        """The prediction at the observed load, and what explains where it is left. Raises SpecError for a scenario
        without a rate or requests in flight."""
        scenario = self._at_load(observed)
        run = simulate(scenario, intervals=True)
        predicted = {metric: float(run.summary[metric]) for metric in observed.means}
        intervals = {metric: _of_mean(run.summary, metric, observed.requests) for metric in observed.means}
        drifted = tuple(m for m, value in observed.means.items() if not intervals[m][0] <= value <= intervals[m][1])
        because = self._explained(scenario, run, observed) if drifted else ""
        return Judgement(observed, predicted, intervals, drifted, because)

    def _at_load(self, observed: Observed) -> Scenario:
        arrivals = self._scenario.traffic.arrivals
        load: dict[str, Any] = {"traffic.num_requests": _REQUESTS}
        if arrivals.rate is not None:
            load["traffic.arrivals.rate"] = observed.rate
        elif arrivals.concurrency is not None:
            load["traffic.arrivals.concurrency"] = max(1, round(observed.in_flight))
        else:
            raise SpecError(
                "traffic.arrivals: has neither a rate nor a concurrency that the server's load could replace."
            )
        return self._scenario.with_(load)

    def _explained(self, scenario: Scenario, run: RunResult, observed: Observed) -> str:
        gaps, unserved = dict[str, float](), ""
        for term in _terms(scenario, run, observed):
            try:
                gap = _gap(simulate(scenario.with_(term.changes)).summary, observed)
                gaps[term.sentence] = min(gap, gaps.get(term.sentence, inf))
            except PerfmodelError as error:
                unserved = f"Not explained: {term.sentence}, which the scenario does not serve ({error})."
        nearest = min(gaps, key=lambda sentence: gaps[sentence], default="")
        if nearest and gaps[nearest] <= (1 - _EXPLAINS) * _gap(run.summary, observed):
            return f"Explained by {nearest}."
        if unserved:
            return unserved
        metric = next(metric for metric in ("mean_tpot_ms", "mean_e2el_ms") if metric in observed.means)
        factor = observed.means[metric] / run.summary[metric]
        return f"No length, cache, draft or limit explains it: steps take {factor:.2f} times as long."


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _of_mean(summary: Mapping[str, Any], metric: str, requests: float) -> tuple[float, float]:
    """The 80 % interval of the mean of so many requests that are independent of each other, ms."""
    mean, spread = summary[metric], Z_P90 * summary[metric.replace("mean", "std")] / sqrt(requests)
    low, high = (sqrt((end - mean) ** 2 + spread**2) for end in summary["interval"][metric])
    return max(0.0, mean - low), mean + high


def _gap(summary: Mapping[str, Any], observed: Observed) -> float:
    """Mean distance of the logarithms of all means."""
    return sum(abs(log(value / summary[metric])) for metric, value in observed.means.items()) / len(observed.means)


def _from_drafts(rate: float, depth: int) -> float:
    """Share of generated tokens that a chain of `depth` drafted ones brings, each accepted with `rate` if all before
    it were; a step brings one token beside them."""
    accepted = sum(rate**place for place in range(1, depth + 1))
    return accepted / (1 + accepted)


def _drafted(summary: Mapping[str, Any]) -> float:
    """Share of the answers' tokens that were drafted and accepted."""
    return float((summary["acceptance_rate"] or 0.0) * summary["num_draft_tokens"] / summary["total_output_tokens"])


def _terms(scenario: Scenario, run: RunResult, observed: Observed) -> Iterator[Term]:
    """What differs from the prediction `run` and would move it."""
    assert run.requests is not None
    columns = {"output_tokens": run.requests.num_output_tokens, "input_tokens": run.requests.num_prompt_tokens}
    for name, column in columns.items():
        seen, expected = observed.lengths[name], float(column.mean())
        if seen and abs(log(seen / expected)) > _DIFFERS:
            what = "answers" if name == "output_tokens" else "prompts"
            sentence = f"{what} of {_digits(seen)} tokens in the mean, {_digits(expected)} expected"
            spread = min(14.0, max(1.05, float(column.max()) / expected))
            lengths = {"distribution": "lognormal", "mean": seen, "p99": seen * spread}
            yield Term(sentence, {f"traffic.{name}": lengths})
    hits = run.summary["prefix_cache_hit_rate"]
    if hits and observed.hit_rate is not None and observed.hit_rate < hits - _COLDER:
        sentence = f"a prefix cache that has {observed.hit_rate:.0%} of the tokens, {hits:.0%} expected"
        yield Term(sentence, {"engine.enable_prefix_caching": False})
    if observed.waiting >= 1 and 0 < observed.running < scenario.engine.max_num_seqs:
        sentence = f"{observed.running:.0f} requests in a batch while {observed.waiting:.0f} wait, "
        sentence += f"{scenario.engine.max_num_seqs} allowed"
        yield Term(sentence, {"engine.max_num_seqs": int(observed.running)})
    config, share = scenario.engine.speculative_config, observed.from_drafts
    if config and share is not None and share < (expected := _drafted(run.summary)) * (1 - _DIFFERS):
        sentence = f"drafts that bring {share:.0%} of the answers' tokens, {expected:.0%} expected"
        share = min(share, _from_drafts(1.0, config.depth))
        rate = brentq(lambda rate: _from_drafts(rate, config.depth) - share, 0.0, 1.0)
        yield Term(sentence, {"engine.speculative_config.acceptance": {"rate": float(rate)}})
        yield Term(sentence, {"engine.speculative_config": None})  # there may be none to verify, as of n-grams

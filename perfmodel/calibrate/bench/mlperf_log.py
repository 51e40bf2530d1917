"""MLPerf Inference's `mlperf_log_summary.txt`, as the load generator writes it: `name : value` lines in sections.

It knows neither the model nor its data set nor the machine, and no lengths but the tokens of answers in all: the rest
comes from a scenario. Times are in ns. Server: Poisson arrivals at `target_qps`; Offline: all samples at once.

Fields: mlcommons/inference, loadgen/results.cc (6.0.17).
"""

__all__ = ["is_mlperf_log", "read_mlperf_log"]

import re

from perfmodel.calibrate.bench.runs import BenchLoad, BenchRun, figure
from perfmodel.errors import SpecError

_HEAD = "MLPerf Results Summary"
_LINE = re.compile(r"^\s*(.+?)\s*:\s*(\S.*?)\s*$", re.MULTILINE)
_NS_TO_MS = 1e-6
_QUANTILES = {"50.00": "median", "90.00": "p90", "95.00": "p95", "99.00": "p99"}
# The generator's words for a latency, as a mean and at a percentile; newer ones first.
_LATENCIES = (
    ("ttft", "Mean First Token latency (ns)", "{} percentile first token latency (ns)"),
    ("tpot", "Mean Time per Output Token (ns)", "{} percentile time to output token (ns)"),
    ("tpot", "Mean Time to Output Token (ns)", "{} percentile time to output token (ns)"),
    ("e2el", "Mean latency (ns)", "{} percentile latency (ns)"),
)
_MOST_REQUESTS = 4000  # of a Server run that is simulated: its means have long settled
_ONE_AT_A_TIME = ("SingleStream", "MultiStream")


def is_mlperf_log(text: str) -> bool:
    """Whether it is such a summary."""
    return _HEAD in text[:2000]


def read_mlperf_log(name: str, text: str) -> BenchRun:
    """The run of the summary `text`, called `name`. Raises SpecError for what cannot be compared."""
    lines = dict(_LINE.findall(text))
    kind = lines.get("Scenario", "")
    if lines.get("Mode", "PerformanceOnly") != "PerformanceOnly":
        raise SpecError(f"{name}: is of mode {lines['Mode'][:30]}, compared are runs of mode PerformanceOnly.")
    if kind in _ONE_AT_A_TIME or kind not in ("Server", "Interactive", "Offline"):
        raise SpecError(
            f"{name}: found scenario {kind[:30]!r}, compared are Server, Interactive and Offline; the file may have "
            f"been cut off."
        )
    measured = _latencies(name, lines)
    is_offline = kind == "Offline"
    tokens, samples = _rates(name, lines, is_offline)
    if not samples:
        raise SpecError(f"{name}: states no samples per second: the file was cut off, or nothing was answered.")
    measured["request_throughput"] = samples
    if tokens:
        measured["output_throughput"] = tokens
    count = _count(name, lines, samples, is_offline)
    if is_offline:  # all wait for all others: how long each took says what the rate does
        measured = {key: value for key, value in measured.items() if "throughput" in key}
    rate = None if is_offline else figure(name, lines, "target_qps")
    return BenchRun(
        name=name,
        tool="MLPerf LoadGen",
        version="",
        says={},
        load=BenchLoad(
            "burst" if is_offline else "open", count, rate=rate, answer=tokens / samples if tokens else None
        ),
        measured=measured,
        completed=count,
        failed=0,
        notes=_notes(lines),
    )


def _latencies(name: str, lines: dict[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric, mean, percentile in _LATENCIES:
        value = figure(name, lines, mean, scale=_NS_TO_MS)
        if value:
            found[f"mean_{metric}_ms"] = value
        for percent, statistic in _QUANTILES.items():
            value = figure(name, lines, percentile.format(percent), scale=_NS_TO_MS)
            if value:
                found[f"{statistic}_{metric}_ms"] = value
    return found


def _rates(name: str, lines: dict[str, str], is_offline: bool) -> tuple[float | None, float | None]:
    """(output tokens per second, samples per second)"""
    words = (
        ("Tokens per second", "Samples per second")
        if is_offline
        else (
            "Completed tokens per second",
            "Completed samples per second",
        )
    )
    tokens, samples = (figure(name, lines, each) for each in words)
    return tokens, samples or figure(name, lines, "Scheduled samples per second")


def _count(name: str, lines: dict[str, str], samples: float, is_offline: bool) -> int:
    """Samples of the run, which is as long as its longest latency (Offline) or as it was asked to be at least."""
    key, scale = ("Max latency (ns)", 1e-9) if is_offline else ("min_duration (ms)", 1e-3)
    span_s = figure(name, lines, key, scale=scale) or 0.0
    stated = int(figure(name, lines, "min_query_count") or 0) if not is_offline else 0
    found = max(round(samples * span_s), stated, 1)
    return found if is_offline else min(found, _MOST_REQUESTS)


def _notes(lines: dict[str, str]) -> tuple[str, ...]:
    result = lines.get("Result is", "")
    invalid = (f"the generator calls the result {result}",) if result and result != "VALID" else ()
    return (*invalid, "the file has no lengths of prompts, no model and no machine: those are the scenario's")

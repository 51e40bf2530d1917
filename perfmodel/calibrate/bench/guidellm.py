"""GuideLLM's `benchmarks.json`, versions 1 and 2: a benchmark for each rate or concurrency, with all its requests.

Its time per output token counts the first token; what leaves it out is called inter-token latency there. Compared is
the latter. Times of requests are seconds of a clock, of metrics ms but for `request_latency`, in s.

Fields: guidellm/schemas (0.8.1). `incomplete` requests were cut off by the end of the run.
"""

__all__ = ["guidellm_benchmarks", "is_guidellm_report", "read_guidellm_benchmark"]

from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.calibrate.bench.runs import (
    BenchLoad,
    BenchRun,
    RequestTimes,
    Said,
    duration_of,
    figure,
    figures_of,
    member,
    request_times,
    text_of,
)
from perfmodel.errors import SpecError

_METRICS = {
    "ttft": ("time_to_first_token_ms", 1.0),
    "tpot": ("inter_token_latency_ms", 1.0),
    "e2el": ("request_latency", 1e3),
}
_PERCENTILES = ("p90", "p95", "p99")
_NOTE = (
    "GuideLLM's time per output token counts the first token; compared is what leaves it out, its inter-token latency"
)
_RATES = {"requests_per_second": "request_throughput", "output_tokens_per_second": "output_throughput"}


def is_guidellm_report(data: Mapping[str, Any]) -> bool:
    """Whether it is such a report."""
    benchmarks = data.get("benchmarks")
    if not isinstance(benchmarks, list) or not benchmarks:
        return False
    return isinstance(benchmarks[0], dict) and {"metrics", "requests"} <= set(benchmarks[0])


def guidellm_benchmarks(name: str, data: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """(name, GuideLLM's version, benchmark) of each benchmark of a report in the file `name`."""
    version = text_of(name, data, "metadata", "guidellm_version")
    several = len(data["benchmarks"]) > 1
    return [
        (f"{name}, benchmark {number}" if several else name, version, each)
        for number, each in enumerate(data["benchmarks"], 1)
    ]


def read_guidellm_benchmark(name: str, version: str, data: Any) -> BenchRun:
    """The run of a benchmark; parameters as of `guidellm_benchmarks`. Raises SpecError for what cannot be compared."""
    totals = member(name, data, "metrics", "request_totals")
    completed, cut, errored = (int(figure(name, totals, key) or 0) for key in ("successful", "incomplete", "errored"))
    if not completed:
        raise SpecError(
            f"{name}: none of its requests was answered ({errored:,} failed, {cut:,} were cut off); there is nothing "
            f"to compare."
        )
    requests = member(name, data, "requests", "successful")
    # A report may keep a sample of its requests: replayed alone they would be another load.
    times = _times(name, requests) if isinstance(requests, list) and len(requests) == completed else None
    measured = figures_of(times, duration_of(name, data, times)) if times is not None else _figures(name, data)
    return BenchRun(
        name=name,
        tool="GuideLLM",
        version=version,
        says=_says(name, data),
        load=_load(name, data, completed + cut + errored),
        measured=measured,
        completed=completed,
        failed=cut + errored,
        times=times,
        notes=(_NOTE,),
    )


def _figures(name: str, data: Any) -> dict[str, float]:
    found: dict[str, float | None] = {}
    for metric, (key, scale) in _METRICS.items():
        of_answered = member(name, data, "metrics", key, "successful")
        for statistic in ("mean", "median"):
            found[f"{statistic}_{metric}_ms"] = figure(name, of_answered, statistic, scale=scale)
        for percentile in _PERCENTILES:
            found[f"{percentile}_{metric}_ms"] = figure(name, of_answered, "percentiles", percentile, scale=scale)
    for key, ours in _RATES.items():
        found[ours] = figure(name, data, "metrics", key, "successful", "mean")
    return {key: value for key, value in found.items() if value}


def _times(name: str, requests: Sequence[Any]) -> RequestTimes:
    columns: dict[str, list[Any]] = {key: [] for key in ("prompt", "output", "ttft", "e2el")}
    starts = []
    for request in requests:
        timings = member(name, request, "info", "timings")
        # Older reports have the same times beside the request's figures.
        start = _first(name, timings, request, "request_start", "start_time")
        first = _first(name, timings, request, "first_token_iteration", "first_token_time")
        end = _first(name, timings, request, "request_end", "end_time")
        if start is None or end is None:
            raise SpecError(f"{name}: a request that was answered has no time of its start or its end.")
        starts.append(start)
        columns["ttft"].append(None if first is None else first - start)
        columns["e2el"].append(end - start)
        columns["prompt"].append(_tokens(name, request, "input_metrics", "prompt_tokens"))
        columns["output"].append(_tokens(name, request, "output_metrics", "output_tokens"))
    return request_times(name, columns, [True] * len(requests), starts)


def _first(name: str, timings: Any, request: Any, key: str, older: str) -> float | None:
    found = figure(name, timings, key) if isinstance(timings, dict) else None
    return figure(name, request, older) if found is None else found


def _tokens(name: str, request: Any, group: str, key: str) -> float | None:
    for path in ((key,), (group, "total_tokens"), (group, "text_tokens")):
        found = figure(name, request, *path)
        if found is not None:
            return found
    return None


def _load(name: str, data: Any, sent: int) -> BenchLoad:
    """Its strategies: constant, poisson, concurrent, synchronous (one at a time) and throughput (as many as it can)."""
    strategy = member(name, data, "config", "strategy") or member(name, data, "args", "strategy")
    kind = text_of(name, strategy, "type_")
    lengths = [
        figure(name, data, "metrics", key, "successful", "mean") for key in ("prompt_token_count", "output_token_count")
    ]
    slots = figure(name, strategy, "streams") or (1 if kind == "synchronous" else None)
    rate = figure(name, strategy, "rate")
    if slots is None and rate is None:
        slots = figure(name, strategy, "max_concurrency")
    return BenchLoad(
        process="open" if rate is not None else "closed" if slots and slots < sent else "burst",
        num_requests=sent,
        concurrency=None if slots is None else int(slots),
        rate=rate,
        cv=0.0 if kind == "constant" else 1.0,
        prompt=lengths[0],
        answer=lengths[1],
    )


def _says(name: str, data: Any) -> dict[str, Said]:
    """The model, as it was asked for; of devices and the engine these reports know nothing."""
    model = text_of(name, data, "config", "backend", "model") or text_of(name, data, "benchmarker", "backend", "model")
    return {"model": model} if model else {}

"""AIPerf's `profile_export_aiperf.json` and `profile_export.jsonl`, and GenAI-Perf's `profile_export_genai_perf.json`.

The former has figures of the run (`{"unit", "avg", "p50", ...}` by metric) and what it was asked for, the latter one
line for each request. Of one run both, and either alone, are read. Its inter-token latency is a request's (latency -
TTFT) / (tokens - 1), which vLLM calls TPOT. Requests of a warm-up are left out.

Fields: aiperf 0.13.0 (schema 1.4), genai-perf 0.0.16.
"""

__all__ = ["is_aiperf_record", "is_aiperf_summary", "read_aiperf"]

from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.calibrate.bench.runs import (
    BenchLoad,
    BenchRun,
    RequestTimes,
    Said,
    figure,
    figures_of,
    member,
    request_times,
    text_of,
)
from perfmodel.errors import SpecError

_LATENCIES = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2el": "request_latency"}
_STATISTICS = {"mean": "avg", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
_MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "sec": 1e3, "s": 1e3}
_RATES = {"request_throughput": "request_throughput", "output_token_throughput": "output_throughput"}
_PROFILING = "profiling"


def is_aiperf_summary(data: Mapping[str, Any]) -> bool:
    """Whether it has the figures of a run."""
    return "input_config" in data and isinstance(data.get("request_latency"), dict)


def is_aiperf_record(data: Mapping[str, Any]) -> bool:
    """Whether it is of one request."""
    metadata = data.get("metadata")
    return "metrics" in data and isinstance(metadata, dict) and "request_start_ns" in metadata


def read_aiperf(name: str, summary: Mapping[str, Any] | None, records: Sequence[Mapping[str, Any]]) -> BenchRun:
    """The run of a summary, of records, or of both.

    name: of the run; records: lines of requests, in any order. Raises SpecError for what cannot be compared.
    """
    times, failed = _times(name, records) if records else (None, 0)
    measured = _figures(name, summary) if summary is not None else {}
    if times is not None:
        measured |= figures_of(times)
        completed = len(times)
    else:
        completed = int(_average(name, summary, "request_count") or 0)
        failed = int(_average(name, summary, "error_request_count") or 0)
    if not completed:
        raise SpecError(f"{name}: none of its requests was answered ({failed:,} failed); there is nothing to compare.")
    load, is_known = _load(name, summary, times, completed, failed)
    unknown = () if is_known else ("the file does not say how requests were sent; their starting times are replayed",)
    return BenchRun(
        name=name,
        tool="AIPerf" if summary is None or "aiperf_version" in summary else "GenAI-Perf",
        version=text_of(name, summary, "aiperf_version"),
        says=_says(name, summary),
        load=load,
        measured=measured,
        completed=completed,
        failed=failed,
        times=times,
        notes=unknown,
    )


def _figures(name: str, summary: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float | None] = {}
    for metric, key in _LATENCIES.items():
        unit = text_of(name, summary, key, "unit")
        if key not in summary:
            continue
        if unit not in _MILLISECONDS:
            raise SpecError(f"{name}: {key} is in {unit!r}, allowed {', '.join(_MILLISECONDS)}.")
        for statistic, theirs in _STATISTICS.items():
            found[f"{statistic}_{metric}_ms"] = figure(name, summary, key, theirs, scale=_MILLISECONDS[unit])
    for key, ours in _RATES.items():
        found[ours] = _average(name, summary, key)
    return {key: value for key, value in found.items() if value}


def _average(name: str, summary: Mapping[str, Any] | None, key: str) -> float | None:
    return figure(name, summary, key, "avg")


def _times(name: str, records: Sequence[Mapping[str, Any]]) -> tuple[RequestTimes, int]:
    """(the answered requests, how many failed) of the profiling phase."""
    mine = [each for each in records if _phase(name, each) == _PROFILING]
    answered = [not each.get("error") and not member(name, each, "metadata", "was_cancelled") for each in mine]
    columns = {
        "prompt": [_value(name, each, "input_sequence_length") for each in mine],
        "output": [_value(name, each, "output_sequence_length") for each in mine],
        "ttft": [_seconds(name, each, "time_to_first_token") for each in mine],
        "e2el": [_seconds(name, each, "request_latency") for each in mine],
    }
    starts = [figure(name, each, "metadata", "request_start_ns", scale=1e-9) for each in mine]
    return request_times(name, columns, answered, starts), answered.count(False)


def _phase(name: str, record: Mapping[str, Any]) -> str:
    return text_of(name, record, "metadata", "benchmark_phase") or _PROFILING


def _value(name: str, record: Mapping[str, Any], key: str) -> float | None:
    return figure(name, record, "metrics", key, "value")


def _seconds(name: str, record: Mapping[str, Any], key: str) -> float | None:
    unit = text_of(name, record, "metrics", key, "unit")
    if unit and unit not in _MILLISECONDS:
        raise SpecError(f"{name}: {key} is in {unit!r}, allowed {', '.join(_MILLISECONDS)}.")
    return figure(name, record, "metrics", key, "value", scale=_MILLISECONDS.get(unit, 1.0) / 1e3)


def _load(
    name: str, summary: Mapping[str, Any] | None, times: RequestTimes | None, completed: int, failed: int
) -> tuple[BenchLoad, bool]:
    """The load, and whether the file says what it was."""
    slots, rate, cv = _asked(name, summary)
    prompt, answer = (_average(name, summary, key) for key in ("input_sequence_length", "output_sequence_length"))
    if times is not None:
        prompt, answer = float(times.num_prompt_tokens.mean()), float(times.num_output_tokens.mean())
    sent = completed + failed
    is_known = rate is not None or slots is not None
    if not is_known and times is not None:
        rate = sent / max(float(times.start_s[-1]) if times.start_s is not None else 0.0, 1e-3)
    load = BenchLoad(
        process="open" if rate is not None else "closed" if slots and slots < sent else "burst",
        num_requests=sent,
        concurrency=None if slots is None else int(slots),
        rate=rate,
        cv=cv,
        prompt=prompt,
        answer=answer,
    )
    return load, is_known


def _asked(name: str, summary: Mapping[str, Any] | None) -> tuple[float | None, float | None, float]:
    """(concurrency, rate, variation of gaps) of the profiling phase."""
    asked = member(name, summary, "input_config")
    phases = asked.get("phases") if isinstance(asked, dict) else None
    mine = [each for each in phases or [] if isinstance(each, dict) and each.get("name", _PROFILING) == _PROFILING]
    # AIPerf's phases; GenAI-Perf's stimulus, in either place.
    for place in (*mine, member(name, asked, "perf_analyzer", "stimulus") or {}, member(name, asked, "loadgen") or {}):
        slots, rate = figure(name, place, "concurrency"), figure(name, place, "rate")
        rate = rate if rate is not None else figure(name, place, "request_rate")
        if slots or rate:
            is_constant = "constant" in text_of(name, place, "type")
            return (None if rate else slots), rate, 0.0 if is_constant else 1.0
    return None, None, 1.0


def _says(name: str, summary: Mapping[str, Any] | None) -> dict[str, Said]:
    """The model, as it was asked for."""
    asked = member(name, summary, "input_config")
    if not isinstance(asked, dict):
        return {}
    models = asked.get("models") or asked.get("model_names") or (asked.get("endpoint") or {}).get("model_names")
    items = models.get("items") if isinstance(models, dict) else models
    first = items[0] if isinstance(items, list) and items else None
    model = first.get("name") if isinstance(first, dict) else first
    return {"model": model} if isinstance(model, str) and model else {}

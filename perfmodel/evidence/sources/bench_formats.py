"""`BenchRun`: what a load tool's file says of one run, whichever tool wrote it.

Figures have the keys of vLLM's `bench serve`, latencies in ms. Time per output token leaves the first token out,
(E2E - TTFT) / (tokens - 1); readers convert what their tool calls so.

Only requests that were answered count. Of those that failed their number is kept: what they cost the server until they
did is not in any of these files.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, isinf
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import SpecError
from perfmodel.evidence.sources.local import LocalRow
from perfmodel.evidence.sources.setups import engine_of, quantization_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Said = str | int | float | bool

# With each token's time of 30,000 answers, and their texts.
LARGEST_RESULT_BYTES = 128_000_000
MOST_TOKENS = 1e9  # of a prompt or an answer
_LONGEST_S = 1e7  # of a run: four months
_CLOCK_S = 1e-3  # two clocks of one tool may differ by so much
_QUANTILES_runs = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class BenchLoad:
    """How requests came.

    process:      closed: `concurrency` in flight; open: at `rate`; burst: all at once
    rate:         requests per second; cv: coefficient of variation of the gaps (1: Poisson)
    num_requests: that were sent; prompt, answer: mean tokens of those answered, None where the file does not say
    """

    process: Literal["closed", "open", "burst"]
    num_requests: int
    concurrency: int | None = None
    rate: float | None = None
    cv: float = 1.0
    prompt: float | None = None
    answer: float | None = None


@dataclass(frozen=True)
class RequestTimes:
    """Requests that were answered, in the order in which they were sent; one entry each.

    start_s: since the first one was sent; None where the file does not say
    ttft_s:  nan where the answer was not streamed
    """

    start_s: Floats | None
    num_prompt_tokens: Ints
    num_output_tokens: Ints
    ttft_s: Floats
    e2el_s: Floats

    def __len__(self) -> int:
        return len(self.e2el_s)

    def scaled(self, factor: float) -> "RequestTimes":
        """The same requests with all times multiplied by `factor`."""
        start_s = None if self.start_s is None else self.start_s * factor
        return replace(self, start_s=start_s, ttft_s=self.ttft_s * factor, e2el_s=self.e2el_s * factor)

    @property
    def tpot_s(self) -> Floats:
        """nan for answers of one token."""
        later, nans = self.num_output_tokens - 1, np.full(len(self), np.nan)
        tpot_s: Floats = np.divide(self.e2el_s - self.ttft_s, later, out=nans, where=later > 0)
        return tpot_s


@dataclass(frozen=True)
class BenchRun:
    """One run of a load tool.

    name:     its file, with the number of the run where a file has several
    tool, version: what wrote it; "" where the file does not say
    says:     fields of a scenario ("model", "engine.tensor_parallel_size") -> what the file says of the setup
    measured: figures by vLLM's keys
    times:    request by request, where the file has that
    failed:   requests that were not answered, or not to their end
    row:      a test of llama-bench, which has no requests
    speed:    simulated seconds per second of the measured emulator; 1 for a real server
    """

    name: str
    tool: str
    version: str
    says: Mapping[str, Said]
    load: BenchLoad
    measured: Mapping[str, float]
    completed: int
    failed: int
    times: RequestTimes | None = None
    notes: tuple[str, ...] = field(default=())
    row: LocalRow | None = None
    speed: float = 1.0

    def at_real_speed(self, speed: float | None = None) -> "BenchRun":
        """The run in the deployment's time: one measured second is `speed` simulated seconds.

        speed: as given by the user; None: as recorded in the file

        Raises SpecError if the two differ, and for a test without a server.
        """
        factor = self.speed if speed is None else speed
        if self.speed not in (1.0, factor):
            raise SpecError(f"{self.name}: got --speed {factor:g}, but the file has {self.speed:g}; leave --speed out.")
        if factor == 1:
            return self
        if self.row is not None:
            raise SpecError(f"{self.name}: is a test of llama-bench, which measures no server; leave --speed out.")
        note = (
            f"measured at {factor:g} simulated seconds per second: times here are multiplied by it, rates divided by it"
        )
        return replace(
            self,
            load=replace(self.load, rate=None if self.load.rate is None else self.load.rate / factor),
            measured={k: v * factor if k.endswith("_ms") else v / factor for k, v in self.measured.items()},
            times=None if self.times is None else self.times.scaled(factor),
            notes=(*self.notes, note),
            speed=1.0,
        )


def request_times(
    name: str,
    columns: Mapping[str, Sequence[Any]],
    is_answered: Sequence[bool],
    starts: Sequence[Any] | None = None,
) -> RequestTimes:
    """Columns of a file as numbers, those of answered requests in the order of their starts.

    name:        of the run, for errors to name
    columns:     prompt, output: tokens; ttft, e2el: seconds. Entries of one request have one place in all
    is_answered: of each request; starts: seconds of any clock

    Raises SpecError for columns of unequal length, for what is no number, and for clocks that went backwards.
    """
    given = {**columns, **({"start": starts} if starts is not None else {})}
    for key, values in given.items():
        if len(values) != len(is_answered):
            raise SpecError(
                f"{name}: found {len(values):,} values of {key} for {len(is_answered):,} requests, allowed as many of "
                f"each; the file was cut off, or put together from several runs."
            )
    kept = [number for number, answered in enumerate(is_answered) if answered]
    if not kept:
        raise SpecError(
            f"{name}: none of its {len(is_answered):,} requests was answered; there is nothing to compare, look at "
            f"what the server said."
        )
    found = {
        key: np.array([_number(name, key, number, values[number]) for number in kept]) for key, values in given.items()
    }
    _refuse_impossible(name, found, kept)
    order = np.argsort(found["start"], kind="stable") if starts is not None else np.arange(len(kept))
    found = {key: values[order] for key, values in found.items()}
    start_s = found["start"] - found["start"][0] if starts is not None else None
    prompts, outputs = (found[key].astype(np.int64) for key in ("prompt", "output"))
    return RequestTimes(start_s, prompts, outputs, found["ttft"], np.maximum(found["e2el"], found["ttft"]))


def _number(name: str, key: str, number: int, value: Any) -> float:
    """A request's value; nan for a TTFT that was not measured."""
    if value is None and key == "ttft":
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise SpecError(f"{name}: request {number} has {str(value)[:20]!r} as its {key}, expected a number.")
    return float(value)


def _refuse_impossible(name: str, found: Mapping[str, Floats], kept: Sequence[int]) -> None:
    """Raises SpecError for times that no clock gives, and for requests without tokens."""
    ttft = np.nan_to_num(found["ttft"])
    start = found.get("start", ttft)
    span = start - start.min()
    wrongs = (
        (ttft < 0, "got its first token before it was sent: the clock went backwards"),
        (found["e2el"] < ttft - _CLOCK_S, "ended before its first token: the clock went backwards"),
        (found["e2el"] <= 0, "ended no later than it was sent: the clock went backwards"),
        (np.maximum(found["e2el"], span) > _LONGEST_S, f"takes more than {_LONGEST_S:g} s: times are in seconds"),
        (found["prompt"] < 1, "has no token in its prompt"),
        (found["output"] < 1, "has no token in its answer, and no error"),
        (np.maximum(found["prompt"], found["output"]) > MOST_TOKENS, f"has more than {MOST_TOKENS:g} tokens"),
    )
    for wrong, what in wrongs:
        if wrong.any():
            first, count = kept[int(np.flatnonzero(wrong)[0])], int(wrong.sum())
            others = f" (and {count - 1:,} more)" if count > 1 else ""
            raise SpecError(f"{name}: request {first}{others} {what}; take the run out, or measure it again.")


def figures_of(times: RequestTimes, duration_s: float | None = None) -> dict[str, float]:
    """Figures of the requests under vLLM's keys.

    duration_s: of the run, for its throughput; else from the first start to the last end, where starts are known
    """
    found: dict[str, float] = {}
    for metric, seconds in (("ttft", times.ttft_s), ("tpot", times.tpot_s), ("e2el", times.e2el_s)):
        known = seconds[np.isfinite(seconds)]
        if len(known):
            found[f"mean_{metric}_ms"] = 1e3 * float(known.mean())
            found |= {f"{key}_{metric}_ms": 1e3 * float(np.quantile(known, q)) for key, q in _QUANTILES_runs.items()}
    if duration_s is None and times.start_s is not None:
        duration_s = float((times.start_s + times.e2el_s).max())
    if duration_s is not None and duration_s > 0:
        found["request_throughput"] = len(times) / duration_s
        found["output_throughput"] = float(times.num_output_tokens.sum()) / duration_s
    return found


def duration_of(name: str, data: Any, times: RequestTimes) -> float | None:
    """Duration of the run in seconds; None where the file has none, 0 or NaN.

    Raises SpecError for a run shorter than its shortest request.
    """
    duration_s, shortest_s = figure(name, data, "duration"), float(times.e2el_s.min())
    if duration_s and duration_s < shortest_s:
        raise SpecError(
            f"{name}: duration: got {duration_s:g} s; expected at least {shortest_s:g} s, its shortest request; "
            f"correct it or leave it out."
        )
    return duration_s or None


def member(name: str, data: Any, *path: str) -> Any:
    """What is at `path` of nested objects; None where there is nothing. Raises SpecError for what is no object."""
    for key in path:
        if data is None:
            return None
        if not isinstance(data, dict):
            raise SpecError(f"{name}: found {str(data)[:40]!r} where an object with {key!r} was expected.")
        data = data.get(key)
    return data


def figure(name: str, data: Any, *path: str, scale: float = 1.0) -> float | None:
    """The number at `path` times `scale`; None where there is none, or one that is not finite.

    Raises SpecError for what is no number, and for one below zero.
    """
    value = member(name, data, *path)
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return None
    try:
        number = scale * float(value)
    except (TypeError, ValueError, OverflowError):
        raise SpecError(f"{name}: {'.'.join(path)}: found {str(value)[:40]!r}, expected a number.") from None
    if isinstance(value, bool) or not number >= 0:
        raise SpecError(f"{name}: {'.'.join(path)}: found {str(value)[:40]!r}, expected a number of at least 0.")
    return number if isfinite(number) else None


def text_of(name: str, data: Any, *path: str) -> str:
    """The text at `path`; "" where there is none."""
    value = member(name, data, *path)
    return value.strip() if isinstance(value, str) else ""


_STATISTICS_vllm = ("mean", "median", "p90", "p95", "p99")
_NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2el", "e2e_latency": "e2el"}
_RATES_vllm = ("request_throughput", "output_throughput", "total_token_throughput")
_ARRAYS = ("input_lens", "output_lens", "ttfts", "itls")
_OF_ENGINES = ("sglang", "vllm", "tensorrt-llm", "trt")


def is_vllm_result(data: Mapping[str, Any]) -> bool:
    """Whether it is such an object: what was sent, and what became of it."""
    return {"request_rate", "completed", "total_input_tokens"} <= set(data) and "hw" not in data


def read_vllm_result(name: str, data: Mapping[str, Any]) -> BenchRun:
    """The run that `data` is of, called `name`. Raises SpecError for what cannot be compared."""
    is_sglang = "mean_e2e_latency_ms" in data or "sharegpt_output_len" in data
    completed = int(figure(name, data, "completed") or 0)
    times = _times_vllm(name, data) if all(isinstance(data.get(key), list) for key in _ARRAYS) else None
    if not completed:
        raise SpecError(f"{name}: none of its requests was answered; there is nothing to compare.")
    measured = _figures_vllm(name, data)
    if times is not None:
        measured |= figures_of(times, duration_of(name, data, times))
    sent = _sent(name, data, times, completed)
    tool = "SGLang bench_serving" if is_sglang else "vllm bench serve"
    return BenchRun(
        name=name,
        tool=tool,
        version="",
        says=_says_vllm(name, data),
        load=_load_vllm(name, data, sent, completed),
        measured=measured,
        completed=completed,
        failed=max(sent - completed, 0),
        times=times,
        notes=_notes_vllm(name, data, times),
        speed=_speed(name, data),
    )


def _figures_vllm(name: str, data: Mapping[str, Any]) -> dict[str, float]:
    keys = {f"{s}_{theirs}_ms": f"{s}_{ours}_ms" for theirs, ours in _NAMES.items() for s in _STATISTICS_vllm}
    keys |= {key: key for key in _RATES_vllm} | {"total_throughput": "total_token_throughput"}
    found = {ours: figure(name, data, theirs) for theirs, ours in keys.items() if theirs in data}
    return {key: value for key, value in found.items() if value}


def _speed(name: str, data: Mapping[str, Any]) -> float:
    """The emulator's speed from `--metadata perfmodel_speed=0.5`; 1 without it. Raises SpecError for 0."""
    speed = figure(name, {"perfmodel_speed": 1, **data}, "perfmodel_speed")
    if not speed:
        raise SpecError(f"{name}: perfmodel_speed: got {data['perfmodel_speed']}; expected more than 0.")
    return speed


def _unusable(data: Mapping[str, Any]) -> list[str]:
    """Figures that are in the file and measure nothing: zero, or not finite."""
    asked = [f"{statistic}_{name}_ms" for name in _NAMES for statistic in _STATISTICS_vllm]
    given = {key: data[key] for key in (*asked, *_RATES_vllm, "duration") if data.get(key) is not None}
    return [key for key, value in given.items() if isinstance(value, int | float) and not 0 < value < float("inf")]


def _times_vllm(name: str, data: Mapping[str, Any]) -> RequestTimes:
    prompts, outputs, ttfts, itls = (data[key] for key in _ARRAYS)
    count = len(prompts)
    errors = data.get("errors")
    errors = errors if isinstance(errors, list) else [""] * count
    lists = dict(zip((*_ARRAYS, "errors"), (prompts, outputs, ttfts, itls, errors), strict=True))
    unequal = next((key for key, values in lists.items() if len(values) != count), None)
    if unequal is not None:
        raise SpecError(
            f"{name}: found {len(lists[unequal]):,} {unequal} for {count:,} input_lens, allowed as many of each; the "
            f"file was cut off, or put together from several runs."
        )
    # The script has 0 tokens of a failed request, and sometimes no error.
    answered = [not error and output != 0 for error, output in zip(errors, outputs, strict=True)]
    e2els = [_whole(name, number, ttft, gaps) for number, (ttft, gaps) in enumerate(zip(ttfts, itls, strict=True))]
    starts = data.get("start_times")
    columns = {"prompt": prompts, "output": outputs, "ttft": ttfts, "e2el": e2els}
    return request_times(name, columns, answered, starts if isinstance(starts, list) else None)


def _whole(name: str, number: int, ttft: Any, gaps: Any) -> Any:
    """Seconds from a request to its last token: what came first, and the gaps behind."""
    if not isinstance(gaps, list):
        raise SpecError(f"{name}: request {number} has {str(gaps)[:20]!r} as its itls, expected a list of seconds.")
    try:
        return ttft + sum(gaps)
    except TypeError:
        raise SpecError(f"{name}: request {number} has an entry in its itls that is no number.") from None


def _sent(name: str, data: Mapping[str, Any], times: RequestTimes | None, completed: int) -> int:
    listed = len(data["input_lens"]) if times is not None else 0
    stated = int(figure(name, data, "num_prompts") or 0)
    return max(listed, stated, completed + int(figure(name, data, "failed") or 0))


def _load_vllm(name: str, data: Mapping[str, Any], sent: int, completed: int) -> BenchLoad:
    """An infinite rate sends all at once, or as places come free."""
    rate, concurrency = data["request_rate"], data.get("max_concurrency")
    is_unlimited = rate in ("inf", "trace", None) or (isinstance(rate, float) and isinf(rate))
    prompt, answer = (
        (figure(name, data, key) or 0) / completed or None for key in ("total_input_tokens", "total_output_tokens")
    )
    slots = int(figure(name, data, "max_concurrency") or 0) if concurrency is not None else 0
    burstiness = figure(name, data, "burstiness") or 1.0
    return BenchLoad(
        process="open" if not is_unlimited else "closed" if 0 < slots < sent else "burst",
        num_requests=sent,
        concurrency=slots or None,
        rate=None if is_unlimited else figure(name, data, "request_rate"),
        cv=burstiness**-0.5,  # of gamma-distributed gaps whose shape the script calls so
        prompt=prompt,
        answer=answer,
    )


def _says_vllm(name: str, data: Mapping[str, Any]) -> dict[str, Said]:
    """Setups are not in these files, but for what `--metadata` has added."""
    found: dict[str, Said] = {}
    model = text_of(name, data, "model_id") or text_of(name, data, "server_info", "model_path")
    if model:
        found["model"] = model
    backend = text_of(name, data, "backend") or text_of(name, data, "endpoint_type")
    if backend.startswith(_OF_ENGINES) and not backend.startswith("vllm"):  # any server of OpenAI's API may be "vllm"
        found["engine.profile"] = engine_of(backend)[0]
    for key in ("tensor_parallel_size", "tp", "tp_size"):
        value = figure(name, data, key) or figure(name, data.get("server_info"), key)
        if value:
            found["engine.tensor_parallel_size"] = int(value)
            break
    version = text_of(name, data, "server_info", "version")
    if version:
        found["engine.version"] = version
    return found


def _notes_vllm(name: str, data: Mapping[str, Any], times: RequestTimes | None) -> tuple[str, ...]:
    notes = []
    if unusable := _unusable(data):
        notes.append(f"left out, since zero or not finite: {', '.join(unusable)}")
    if times is not None and times.start_s is None:
        notes.append("the file has no starting times: arrivals are drawn at its rate, lengths are its own, in order")
    if data.get("request_rate") == "trace":
        notes.append("requests were sent by a trace's times, which are not in the file: taken as sent at once")
    if figure(name, data, "spec_decode_acceptance_length") or figure(name, data, "accept_length"):
        notes.append("the server speculated: without --set engine.speculative_config=... tokens come one by one here")
    return tuple(notes)


_LATENCIES_aiperf = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2el": "request_latency"}
_STATISTICS_aiperf = {"mean": "avg", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
_MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "sec": 1e3, "s": 1e3}
_RATES_aiperf = {"request_throughput": "request_throughput", "output_token_throughput": "output_throughput"}
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
    times, failed = _times_aiperf(name, records) if records else (None, 0)
    measured = _figures_aiperf(name, summary) if summary is not None else {}
    if times is not None:
        measured |= figures_of(times)
        completed = len(times)
    else:
        completed = int(_average(name, summary, "request_count") or 0)
        failed = int(_average(name, summary, "error_request_count") or 0)
    if not completed:
        raise SpecError(f"{name}: none of its requests was answered ({failed:,} failed); there is nothing to compare.")
    load, is_known = _load_aiperf(name, summary, times, completed, failed)
    unknown = () if is_known else ("the file does not say how requests were sent; their starting times are replayed",)
    return BenchRun(
        name=name,
        tool="AIPerf" if summary is None or "aiperf_version" in summary else "GenAI-Perf",
        version=text_of(name, summary, "aiperf_version"),
        says=_says_aiperf(name, summary),
        load=load,
        measured=measured,
        completed=completed,
        failed=failed,
        times=times,
        notes=unknown,
    )


def _figures_aiperf(name: str, summary: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float | None] = {}
    for metric, key in _LATENCIES_aiperf.items():
        unit = text_of(name, summary, key, "unit")
        if key not in summary:
            continue
        if unit not in _MILLISECONDS:
            raise SpecError(f"{name}: {key} is in {unit!r}, allowed {', '.join(_MILLISECONDS)}.")
        for statistic, theirs in _STATISTICS_aiperf.items():
            found[f"{statistic}_{metric}_ms"] = figure(name, summary, key, theirs, scale=_MILLISECONDS[unit])
    for key, ours in _RATES_aiperf.items():
        found[ours] = _average(name, summary, key)
    return {key: value for key, value in found.items() if value}


def _average(name: str, summary: Mapping[str, Any] | None, key: str) -> float | None:
    return figure(name, summary, key, "avg")


def _times_aiperf(name: str, records: Sequence[Mapping[str, Any]]) -> tuple[RequestTimes, int]:
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


def _load_aiperf(
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


def _says_aiperf(name: str, summary: Mapping[str, Any] | None) -> dict[str, Said]:
    """The model, as it was asked for."""
    asked = member(name, summary, "input_config")
    if not isinstance(asked, dict):
        return {}
    models = asked.get("models") or asked.get("model_names") or (asked.get("endpoint") or {}).get("model_names")
    items = models.get("items") if isinstance(models, dict) else models
    first = items[0] if isinstance(items, list) and items else None
    model = first.get("name") if isinstance(first, dict) else first
    return {"model": model} if isinstance(model, str) and model else {}


_METRICS = {
    "ttft": ("time_to_first_token_ms", 1.0),
    "tpot": ("inter_token_latency_ms", 1.0),
    "e2el": ("request_latency", 1e3),
}
_PERCENTILES_guidellm = ("p90", "p95", "p99")
_NOTE = (
    "GuideLLM's time per output token counts the first token; compared is what leaves it out, its inter-token latency"
)
_RATES_guidellm = {"requests_per_second": "request_throughput", "output_tokens_per_second": "output_throughput"}


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
    times = _times_guidellm(name, requests) if isinstance(requests, list) and len(requests) == completed else None
    measured = figures_of(times, duration_of(name, data, times)) if times is not None else _figures_guidellm(name, data)
    return BenchRun(
        name=name,
        tool="GuideLLM",
        version=version,
        says=_says_guidellm(name, data),
        load=_load_guidellm(name, data, completed + cut + errored),
        measured=measured,
        completed=completed,
        failed=cut + errored,
        times=times,
        notes=(_NOTE,),
    )


def _figures_guidellm(name: str, data: Any) -> dict[str, float]:
    found: dict[str, float | None] = {}
    for metric, (key, scale) in _METRICS.items():
        of_answered = member(name, data, "metrics", key, "successful")
        for statistic in ("mean", "median"):
            found[f"{statistic}_{metric}_ms"] = figure(name, of_answered, statistic, scale=scale)
        for percentile in _PERCENTILES_guidellm:
            found[f"{percentile}_{metric}_ms"] = figure(name, of_answered, "percentiles", percentile, scale=scale)
    for key, ours in _RATES_guidellm.items():
        found[ours] = figure(name, data, "metrics", key, "successful", "mean")
    return {key: value for key, value in found.items() if value}


def _times_guidellm(name: str, requests: Sequence[Any]) -> RequestTimes:
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


def _load_guidellm(name: str, data: Any, sent: int) -> BenchLoad:
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


def _says_guidellm(name: str, data: Any) -> dict[str, Said]:
    """The model, as it was asked for; of devices and the engine these reports know nothing."""
    model = text_of(name, data, "config", "backend", "model") or text_of(name, data, "benchmarker", "backend", "model")
    return {"model": model} if model else {}


_LATENCIES_inferencex = ("ttft", "tpot", "itl", "e2el")
_REQUESTS_PER_SLOT = 10  # of its recipes
_SECONDS_TO_MS = 1e3


def is_inferencex_result(data: Mapping[str, Any]) -> bool:
    """Whether it is such an object."""
    return {"hw", "conc", "tput_per_gpu"} <= set(data)


def read_inferencex_result(name: str, data: Mapping[str, Any]) -> BenchRun:
    """The run that `data` is of, called `name`. Raises SpecError for what cannot be compared."""
    if _is_true(data.get("disagg")) or _is_true(data.get("is_multinode")):
        raise SpecError(
            f"{name}: is of separate prefill and decode workers, whose network the file does not say; describe them in "
            f"a scenario, and give the result of the load tool itself (bench_serving's .json) with --scenario."
        )
    slots = int(figure(name, data, "conc") or 0)
    prompt, answer = figure(name, data, "isl"), figure(name, data, "osl")
    devices = int(figure(name, data, "tp") or 1)
    measured = _figures_inferencex(name, data, devices)
    if not slots or not measured:
        raise SpecError(f"{name}: states no concurrency or no figure; there is nothing to compare.")
    return BenchRun(
        name=name,
        tool="InferenceX",
        version="",
        says=_says_inferencex(name, data, devices),
        load=BenchLoad("closed", _REQUESTS_PER_SLOT * slots, slots, prompt=prompt, answer=answer),
        measured=measured,
        completed=_REQUESTS_PER_SLOT * slots,
        failed=0,
        notes=(
            f"the file does not say how many requests were sent, nor how they were drawn down from isl and osl: "
            f"{_REQUESTS_PER_SLOT} per slot, all as long as these",
        ),
    )


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _figures_inferencex(name: str, data: Mapping[str, Any], devices: int) -> dict[str, float]:
    found = {
        f"{statistic}_{metric}_ms": figure(name, data, f"{statistic}_{metric}", scale=_SECONDS_TO_MS)
        for metric in _LATENCIES_inferencex
        for statistic in _STATISTICS_vllm
    }
    found["total_token_throughput"] = figure(name, data, "tput_per_gpu", scale=devices)
    found["output_throughput"] = figure(name, data, "output_tput_per_gpu", scale=devices)
    return {key: value for key, value in found.items() if value}


def _says_inferencex(name: str, data: Mapping[str, Any], devices: int) -> dict[str, Said]:
    found: dict[str, Said] = {"hardware": text_of(name, data, "hw"), "model": text_of(name, data, "model")}
    profile, version = engine_of(text_of(name, data, "framework"))
    found["engine.profile"] = profile
    image = engine_of(text_of(name, data, "image"))
    if version or image[1]:
        found["engine.version"] = version or image[1]
    quantization = quantization_of(text_of(name, data, "precision"))
    if quantization is not None:
        found["engine.quantization"] = quantization
    if _is_true(data.get("dp_attention")):
        found |= {"engine.data_parallel_size": devices, "engine.enable_expert_parallel": True}
    else:
        found["engine.tensor_parallel_size"] = devices
        if (figure(name, data, "ep") or 1) > 1:
            found["engine.enable_expert_parallel"] = True
    return {key: value for key, value in found.items() if value}


_FILE_TYPE = re.compile(r"[-._](i?q\d\w*|bf16|f16|f32|mxfp4)(?=\.gguf$|-\d{5}-of-\d{5}\.gguf$)", re.IGNORECASE)
_TYPE = re.compile(r"\b(I?Q\d_\w+|Q\d_K(?: - (?:Small|Medium|Large))?|BF16|F16|F32|MXFP4)", re.IGNORECASE)
_SIZES = {" - small": "_s", " - medium": "_m", " - large": "_l"}
_PARTS = re.compile(r"-\d{5}-of-\d{5}$")
_BACKENDS = {
    "cuda": "cuda",
    "rocm": "rocm",
    "hip": "rocm",
    "vulkan": "vulkan",
    "metal": "metal",
    "mtl": "metal",
    "opencl": "opencl",
    "sycl": "sycl",
    "blas": "cpu",
    "cpu": "cpu",
}
_TOOL = "llama-bench"
_AUTO = "-1"  # of flash_attn: as the backend has it
_MOST_PARAMETERS = 1e14


def is_llama_bench_row(data: Mapping[str, Any]) -> bool:
    """Whether it is such a row."""
    return {"n_prompt", "n_gen", "avg_ts", "model_type"} <= set(data)


def read_llama_bench_row(name: str, data: Mapping[str, Any]) -> BenchRun:
    """The test that `data` is of, called `name`; values may be text, as CSV has them.

    Raises SpecError for what cannot be compared.
    """
    prompt, generated = (int(figure(name, data, key) or 0) for key in ("n_prompt", "n_gen"))
    rate = figure(name, data, "avg_ts")
    if bool(prompt) == bool(generated):
        raise SpecError(f"{name}: found n_prompt {prompt} and n_gen {generated}, compared are tests of one of the two.")
    for key in ("n_prompt", "n_gen", "n_depth", "n_ubatch"):
        if (figure(name, data, key) or 0) > MOST_TOKENS:
            raise SpecError(f"{name}: {key}: found {str(data[key])[:40]!r}, allowed up to {MOST_TOKENS:g} tokens.")
    if (figure(name, data, "model_n_params") or 0) > _MOST_PARAMETERS:
        raise SpecError(
            f"{name}: model_n_params: found {str(data['model_n_params'])[:40]!r}, allowed up to {_MOST_PARAMETERS:g}."
        )
    if not rate:
        raise SpecError(f"{name}: has no tokens per second (avg_ts); there is nothing to compare.")
    row = _row(name, data, prompt, generated, rate)
    metric = "prompt_tokens_per_s" if prompt else "decode_tokens_per_s"
    says: dict[str, Said] = {"model": row.model, "hardware": row.device, "engine.profile": "llamacpp"}
    return BenchRun(
        name=name,
        tool=_TOOL,
        version=row.build,
        says=says,
        load=BenchLoad("closed", 1, 1, prompt=prompt or None, answer=generated or None),
        measured={metric: rate},
        completed=1,
        failed=0,
        notes=_notes_llama_bench(name, data, row),
        row=row,
    )


def _notes_llama_bench(name: str, data: Mapping[str, Any], row: LocalRow) -> tuple[str, ...]:
    threads = figure(name, data, "n_threads")
    if row.backend != "cpu" or not threads:
        return ()
    return (f"ran with {threads:.0f} threads; predicted is the processor with all of its cores",)


def _row(name: str, data: Mapping[str, Any], prompt: int, generated: int, rate: float) -> LocalRow:
    backend = _backend(text_of(name, data, "backends"), data.get("n_gpu_layers"))
    is_cpu = backend == "cpu"
    device = text_of(name, data, "cpu_info" if is_cpu else "gpu_info")
    devices = [each.strip() for each in device.split(",") if each.strip()]
    if not devices:
        raise SpecError(f"{name}: names no device in gpu_info or cpu_info; give --hardware.")
    flash = None if str(data.get("flash_attn")) in ("None", _AUTO) else data.get("flash_attn")
    build = figure(name, data, "build_number")
    return LocalRow(
        row_id=name,
        source=_TOOL,
        device=devices[0],
        device_class="cpu" if is_cpu else "gpu",
        num_devices=len(devices),
        tool=_TOOL,
        backend=backend,
        backend_detail="",
        build=f"b{build:.0f}" if build else "",
        date=None,
        model=_model(name, data),
        params=figure(name, data, "model_n_params") or 0.0,
        active_params=0.0,
        gguf_type=_gguf_type(name, data),
        file_size_bytes=figure(name, data, "model_size") or 0.0,
        flash=None if flash is None else str(flash).lower() in ("1", "true"),
        kv_type=text_of(name, data, "type_k"),
        test="pp" if prompt else "tg",
        num_prompt=prompt,
        num_generated=generated,
        depth=int(figure(name, data, "n_depth") or 0),
        batch=1,
        ubatch=int(figure(name, data, "n_ubatch") or 0),
        tokens_per_s=rate,
        flags="",
        group=name,
    )


def _backend(text: str, gpu_layers: Any) -> str:
    """The first of "CUDA,CPU" that runs layers; gpu_layers: how many of them, -1 for all that fit."""
    lower = text.lower()
    found = next((ours for theirs, ours in _BACKENDS.items() if theirs in lower), "cpu")
    return "cpu" if str(gpu_layers) == "0" else found


def _stem(name: str, data: Mapping[str, Any]) -> str:
    return PurePosixPath(text_of(name, data, "model_filename").replace("\\", "/")).name


def _model(name: str, data: Mapping[str, Any]) -> str:
    stem = _FILE_TYPE.sub("", _stem(name, data)).removesuffix(".gguf")
    return _PARTS.sub("", stem) or _TYPE.sub("", text_of(name, data, "model_type")).strip()


def _gguf_type(name: str, data: Mapping[str, Any]) -> str:
    found = _FILE_TYPE.search(_stem(name, data))
    if found is not None:
        return found[1].lower()
    stated = _TYPE.search(text_of(name, data, "model_type"))
    if stated is None:
        raise SpecError(f"{name}: neither model_filename nor model_type names the type of the weights (Q4_K_M, F16).")
    lower = stated[1].lower()
    for words, short in _SIZES.items():
        lower = lower.replace(words, short)
    return lower


_HEAD = "MLPerf Results Summary"
_LINE = re.compile(r"^\s*(.+?)\s*:\s*(\S.*?)\s*$", re.MULTILINE)
_NS_TO_MS = 1e-6
_QUANTILES_mlperf_log = {"50.00": "median", "90.00": "p90", "95.00": "p95", "99.00": "p99"}
# The generator's words for a latency, as a mean and at a percentile; newer ones first.
_LATENCIES_mlperf_log = (
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
        notes=_notes_mlperf_log(lines),
    )


def _latencies(name: str, lines: dict[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric, mean, percentile in _LATENCIES_mlperf_log:
        value = figure(name, lines, mean, scale=_NS_TO_MS)
        if value:
            found[f"mean_{metric}_ms"] = value
        for percent, statistic in _QUANTILES_mlperf_log.items():
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


def _notes_mlperf_log(lines: dict[str, str]) -> tuple[str, ...]:
    result = lines.get("Result is", "")
    invalid = (f"the generator calls the result {result}",) if result and result != "VALID" else ()
    return (*invalid, "the file has no lengths of prompts, no model and no machine: those are the scenario's")


_PERCENTILES_trtllm = {"p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}
_ALL_IN_FLIGHT = 0.9  # of the requests or of the batch on average: nothing held them back


def is_trtllm_report(data: Mapping[str, Any]) -> bool:
    """Whether it is such a report."""
    return {"engine", "world_info", "request_info", "performance"} <= set(data)


def read_trtllm_report(name: str, data: Mapping[str, Any]) -> BenchRun:
    """The run of a report, called `name`. Raises SpecError for what cannot be compared."""
    count = int(figure(name, data, "request_info", "num_requests") or 0)
    if not count:
        raise SpecError(f"{name}: none of its requests was answered; there is nothing to compare.")
    in_flight = figure(name, data, "request_info", "avg_num_concurrent_requests") or 0.0
    places = figure(name, data, "world_info", "max_batch_size") or count
    is_held_back = in_flight < _ALL_IN_FLIGHT * min(count, places) / 2  # a drained burst has half of it on average
    slots = max(1, round(in_flight))
    note = f"the report states no concurrency: {in_flight:.1f} requests in flight on average"
    return BenchRun(
        name=name,
        tool="trtllm-bench",
        version=text_of(name, data, "engine", "version"),
        says=_says_trtllm(name, data),
        load=BenchLoad(
            "closed" if is_held_back else "burst",
            count,
            slots if is_held_back else None,
            prompt=figure(name, data, "request_info", "avg_input_length"),
            answer=figure(name, data, "request_info", "avg_output_length"),
        ),
        measured=_figures_trtllm(name, data),
        completed=count,
        failed=0,
        notes=(f"{note}, {'taken as its concurrency' if is_held_back else 'taken as sent at once'}",),
    )


def _figures_trtllm(name: str, data: Mapping[str, Any]) -> dict[str, float]:
    found = {
        "request_throughput": figure(name, data, "performance", "request_throughput_req_s"),
        "output_throughput": figure(name, data, "performance", "system_output_throughput_tok_s"),
        "total_token_throughput": figure(name, data, "performance", "system_total_throughput_tok_s"),
        "mean_e2el_ms": figure(name, data, "performance", "avg_request_latency_ms"),
        "mean_ttft_ms": figure(name, data, "streaming_metrics", "avg_ttft_ms"),
        "mean_tpot_ms": figure(name, data, "streaming_metrics", "avg_tpot_ms"),
    }
    places = {
        "e2el": ("performance", "request_latency_percentiles_ms"),
        "ttft": ("streaming_metrics", "ttft_percentiles"),
        "tpot": ("streaming_metrics", "tpot_percentiles"),
    }
    for metric, place in places.items():
        for theirs, ours in _PERCENTILES_trtllm.items():
            found[f"{ours}_{metric}_ms"] = figure(name, data, *place, theirs)
    return {key: value for key, value in found.items() if value}


def _says_trtllm(name: str, data: Mapping[str, Any]) -> dict[str, Said]:
    """The devices by their driver's name, the layout, the limits of a step."""
    found: dict[str, Said] = {
        "model": text_of(name, data, "engine", "model"),
        "hardware": text_of(name, data, "machine", "name"),
        "engine.profile": "trtllm",
        "engine.version": text_of(name, data, "engine", "version"),
        "engine.quantization": quantization_of(text_of(name, data, "engine", "quantization")) or "",
    }
    if "FP8" in str(member(name, data, "engine", "kv_cache_dtype")).upper():
        found["engine.kv_cache_dtype"] = "fp8"
    counts = {
        "tp_size": "engine.tensor_parallel_size",
        "pp_size": "engine.pipeline_parallel_size",
        "max_batch_size": "engine.max_num_seqs",
        "max_num_tokens": "engine.max_num_batched_tokens",
    }
    for theirs, ours in counts.items():
        value = figure(name, data, "world_info", theirs)
        if value:
            found[ours] = int(value)
    if (figure(name, data, "world_info", "ep_size") or 1) > 1:
        found["engine.enable_expert_parallel"] = True
    # Its share of memory for KV is of what the weights leave free, another number than vLLM's: left to the default.
    return {key: value for key, value in found.items() if value}

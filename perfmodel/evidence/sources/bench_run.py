"""`BenchRun`: what a load tool's file says of one run, whichever tool wrote it.

Figures have the keys of vLLM's `bench serve`, latencies in ms. Time per output token leaves the first token out,
(E2E - TTFT) / (tokens - 1); readers convert what their tool calls so.

Only requests that were answered count. Of those that failed their number is kept: what they cost the server until they
did is not in any of these files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal, NamedTuple

import numpy as np

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Floats, Observation, RequestTimes

Said = str | int | float | bool
Figure = tuple[str, tuple[str, ...], float]  # our key, its place in a file, what one of its unit is in ours

MOST_TOKENS = 1e9  # of a prompt or an answer
_LONGEST_S = 1e7  # of a run: four months
_CLOCK_S = 1e-3  # two clocks of one tool may differ by so much
_QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


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

    @classmethod
    def of(cls, num_requests: int, concurrency: float | None, rate: float | None, **more: Any) -> "BenchLoad":
        """The load of a tool that was given a rate, or how many requests may be in flight, or neither."""
        slots = int(concurrency) if concurrency is not None else None
        process: Literal["closed", "open", "burst"] = "closed" if slots and slots < num_requests else "burst"
        return cls("open" if rate is not None else process, num_requests, slots, rate, **more)


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
    says: Mapping[str, Said]
    load: BenchLoad
    measured: Mapping[str, float]
    completed: int
    failed: int = 0
    version: str = ""
    times: RequestTimes | None = None
    notes: tuple[str, ...] = ()
    row: Observation | None = None
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


class ResultFields(NamedTuple):
    """The fields of a run's object, or of an object in it. name: of the run, for errors to name"""

    name: str
    data: Any

    def at(self, *path: str) -> Any:
        """What is at `path`; None where there is nothing. Raises SpecError for what is no object."""
        data = self.data
        for key in path:
            if data is None:
                return None
            if not isinstance(data, dict):
                raise SpecError(f"{self.name}: found {str(data)[:40]!r} where an object with {key!r} was expected.")
            data = data.get(key)
        return data

    def within(self, *path: str) -> "ResultFields":
        """The fields of the object at `path`."""
        return ResultFields(self.name, self.at(*path))

    def number(self, *path: str, scale: float = 1.0) -> float | None:
        """The number at `path` times `scale`; None where there is none, or one that is not finite.

        Raises SpecError for what is no number, and for one below zero.
        """
        value = self.at(*path)
        if value is None or (isinstance(value, float) and not isfinite(value)):
            return None
        place, shown = ".".join(path), repr(str(value)[:40])
        try:
            number = scale * float(value)
        except (TypeError, ValueError, OverflowError):
            raise SpecError(f"{self.name}: {place}: found {shown}, expected a number.") from None
        if isinstance(value, bool) or not number >= 0:
            raise SpecError(f"{self.name}: {place}: found {shown}, expected a number of at least 0.")
        return number if isfinite(number) else None

    def count(self, *path: str) -> int:
        """The whole number at `path`; 0 where there is none."""
        return int(self.number(*path) or 0)

    def text(self, *path: str) -> str:
        """The text at `path`; "" where there is none."""
        value = self.at(*path)
        return value.strip() if isinstance(value, str) else ""

    def figures(self, table: Iterable[Figure]) -> dict[str, float]:
        """Our key -> the number at its place, of those above zero."""
        result = ((ours, self.number(*path, scale=scale)) for ours, path, scale in table)
        return {ours: value for ours, value in result if value}

    def unanswered(self, why: str = "") -> SpecError:
        """A run without answers, to raise."""
        return SpecError(f"{self.name}: none of its requests was answered{why}; there is nothing to compare.")

    def duration_s(self, times: RequestTimes) -> float | None:
        """Duration of the run; None where the file has none, 0 or NaN.

        Raises SpecError for a run shorter than its shortest request.
        """
        duration_s, shortest_s = self.number("duration"), float(times.e2el_s.min())
        if duration_s and duration_s < shortest_s:
            raise SpecError(
                f"{self.name}: duration: got {duration_s:g} s; expected at least {shortest_s:g} s, its shortest "
                f"request; correct it or leave it out."
            )
        return duration_s or None


def stated(found: Mapping[str, Said | None]) -> dict[str, Said]:
    """What a file says of its setup, without what it leaves open."""
    return {key: value for key, value in found.items() if value}


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
    result = {
        key: np.array([_number(name, key, number, values[number]) for number in kept]) for key, values in given.items()
    }
    _refuse_impossible(name, result, kept)
    order = np.argsort(result["start"], kind="stable") if starts is not None else np.arange(len(kept))
    result = {key: values[order] for key, values in result.items()}
    start_s = result["start"] - result["start"][0] if starts is not None else None
    prompts, outputs = (result[key].astype(np.int64) for key in ("prompt", "output"))
    return RequestTimes(start_s, prompts, outputs, result["ttft"], np.maximum(result["e2el"], result["ttft"]))


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
    result: dict[str, float] = {}
    for metric, seconds in (("ttft", times.ttft_s), ("tpot", times.tpot_s), ("e2el", times.e2el_s)):
        known = seconds[np.isfinite(seconds)]
        if len(known):
            result[f"mean_{metric}_ms"] = 1e3 * float(known.mean())
            result |= {f"{key}_{metric}_ms": 1e3 * float(np.quantile(known, q)) for key, q in _QUANTILES.items()}
    if duration_s is None and times.start_s is not None:
        duration_s = float((times.start_s + times.e2el_s).max())
    if duration_s is not None and duration_s > 0:
        result["request_throughput"] = len(times) / duration_s
        result["output_throughput"] = float(times.num_output_tokens.sum()) / duration_s
    return result

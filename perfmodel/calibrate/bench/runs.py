"""`BenchRun`: what a load tool's file says of one run, whichever tool wrote it.

Figures have the keys of vLLM's `bench serve`, latencies in ms. Time per output token leaves the first token out,
(E2E - TTFT) / (tokens - 1); readers convert what their tool calls so.

Only requests that were answered count. Of those that failed their number is kept: what they cost the server until they
did is not in any of these files.
"""

__all__ = [
    "LARGEST_RESULT_BYTES",
    "MOST_TOKENS",
    "BenchLoad",
    "BenchRun",
    "RequestTimes",
    "duration_of",
    "figure",
    "figures_of",
    "member",
    "request_times",
    "text_of",
]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.local.rows import LocalRow
from perfmodel.errors import SpecError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Said = str | int | float | bool

# With each token's time of 30,000 answers, and their texts.
LARGEST_RESULT_BYTES = 128_000_000
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
            found |= {f"{key}_{metric}_ms": 1e3 * float(np.quantile(known, q)) for key, q in _QUANTILES.items()}
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

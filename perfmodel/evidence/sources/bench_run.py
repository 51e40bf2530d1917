"""What a load tool's file says of one run, and `Format`: where a tool's files say it.

Figures have the keys of vLLM's `bench serve`, latencies in ms. Time per output token leaves the first token out,
(E2E - TTFT) / (tokens - 1). Only answered requests count; of those that failed their number is kept.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal, NamedTuple

import numpy as np

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Floats, Observation, RequestTimes
from perfmodel.evidence.sources.local import LocalSetup

Object = Mapping[str, Any]
Stated = str | int | float | bool
Figure = tuple[str, tuple[str, ...], float]  # our key, its place in a file, what one of its unit is in ours

STATISTICS = ("mean", "median", "p90", "p95", "p99")
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
class LoadTest:
    """The setup of an observation whose source is a load tool.

    says:    fields of a scenario ("model", "engine.tensor_parallel_size") -> what the file says of the setup
    version: of the tool, "" where the file does not say
    failed:  requests that were not answered, or not to their end
    speed:   simulated seconds per second of the measured emulator; 1 for a real server
    local:   a test of llama-bench, which has no requests
    """

    says: Mapping[str, Stated]
    completed: int
    failed: int = 0
    version: str = ""
    notes: tuple[str, ...] = ()
    speed: float = 1.0
    local: LocalSetup | None = None


class ResultFields(NamedTuple):
    """The fields of a run's object, or of an object in it.

    name: of the run, for errors to name; requests: of the run, once they are read
    """

    name: str
    data: Any
    requests: RequestTimes | None = None

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
        """The text at `path`; "" where there is none, or no path."""
        value = self.at(*path) if path else ""
        return value.strip() if isinstance(value, str) else ""


Place = tuple[str, ...] | Callable[[ResultFields], Any]  # where a file has a value, or how it is made of several


@dataclass(frozen=True)
class Format:
    """One format of results, as a mapping: where an object of it has what is needed of a run.

    keys:      that tell an object of it; without: keys that it must not have
    names:     of the tools that write it; tool: how a file tells which one did, if there are several
    figures:   a table of them, or how it is made; requests: how they are read one by one, None where a file has none
    load:      a field of `BenchLoad` -> its place; says: a field of a scenario -> the place of a text, or how it is
               made; what is empty is not stated
    completed, failed, version: places; duration: the run's, in seconds
    runs:      (name, object) of each run in an object, where it has several
    refusal:   why a run cannot be compared; "" where it can
    speed, local: as of `LoadTest`
    """

    names: tuple[str, ...]
    keys: frozenset[str]
    figures: Sequence[Figure] | Callable[[ResultFields], Sequence[Figure]]
    completed: Place
    load: Mapping[str, Place] = field(default_factory=dict)
    says: Mapping[str, Place] = field(default_factory=dict)
    failed: Place = ()
    version: Place = ()
    requests: Callable[[ResultFields], RequestTimes | None] | None = None
    duration: tuple[str, ...] = ()
    notes: Callable[[ResultFields], Iterable[str]] | None = None
    runs: Callable[[str, Object], list[tuple[str, Object]]] | None = None
    refusal: Callable[[ResultFields], str] | None = None
    without: frozenset[str] = frozenset()
    speed: Callable[[ResultFields], float] | None = None
    local: Callable[[ResultFields], LocalSetup] | None = None
    tool: Callable[[ResultFields], str] | None = None

    def is_of(self, data: Object) -> bool:
        """Whether an object is of the format."""
        return self.keys <= set(data) and self.without.isdisjoint(data)

    def read(self, name: str, data: Object) -> Observation:
        """The run that `data` is of, called `name`. Raises SpecError for what cannot be compared."""
        fields = ResultFields(name, data)
        if self.refusal is not None and (reason := self.refusal(fields)):
            raise SpecError(f"{name}: {reason}")
        fields = fields._replace(requests=None if self.requests is None else self.requests(fields))
        completed, failed = (int(_value(fields, place) or 0) for place in (self.completed, self.failed))
        if not completed:
            more = f" ({failed:,} failed or were cut off)" if failed else ""
            raise SpecError(f"{name}: none of its requests was answered{more}; there is nothing to compare.")
        table = self.figures(fields) if callable(self.figures) else self.figures
        numbers = ((ours, fields.number(*path, scale=scale)) for ours, path, scale in table)
        metrics = {ours: value for ours, value in numbers if value}
        if fields.requests is not None:
            metrics |= figures_of(fields.requests, self._duration_s(fields, fields.requests))

        def text(place: Place) -> Any:
            return place(fields) if callable(place) else fields.text(*place)

        says = {key: text(place) for key, place in self.says.items()}
        test = LoadTest(
            {key: value for key, value in says.items() if value},
            completed,
            failed,
            text(self.version),
            tuple(self.notes(fields)) if self.notes is not None else (),
            1.0 if self.speed is None else self.speed(fields),
            None if self.local is None else self.local(fields),
        )
        tool = self.names[0] if self.tool is None else self.tool(fields)
        load = self._load(fields, completed + failed)
        return Observation(name, test, metrics, fields.requests, load=load, source=tool)

    def _load(self, fields: ResultFields, num_requests: int) -> BenchLoad:
        """The load of a tool that was given a rate, or how many requests may be in flight, or neither."""
        values = {key: _value(fields, place) for key, place in self.load.items()}
        slots = None if values.get("concurrency") is None else int(values["concurrency"])
        process: Literal["closed", "burst"] = "closed" if slots and slots < num_requests else "burst"
        prompt, answer = values.get("prompt"), values.get("answer")
        if fields.requests is not None:
            prompt = prompt or float(fields.requests.num_prompt_tokens.mean())
            answer = answer or float(fields.requests.num_output_tokens.mean())
        rate, cv = values.get("rate"), values.get("cv")
        cv = 1.0 if cv is None else cv
        return BenchLoad(
            process if rate is None else "open", num_requests, slots, rate, cv, prompt or None, answer or None
        )

    def _duration_s(self, fields: ResultFields, times: RequestTimes) -> float | None:
        """None where the file has none, 0 or NaN. Raises SpecError for a run shorter than its shortest request."""
        duration_s, shortest_s = fields.number(*self.duration) if self.duration else None, float(times.e2el_s.min())
        if duration_s and duration_s < shortest_s:
            raise SpecError(
                f"{fields.name}: duration: got {duration_s:g} s; expected at least {shortest_s:g} s, its shortest "
                f"request; correct it or leave it out."
            )
        return duration_s or None


def _value(fields: ResultFields, place: Place) -> Any:
    if callable(place):
        return place(fields)
    return fields.number(*place) if place else None


def statistics_of(
    places: Mapping[str, tuple[str, ...]], names: Mapping[str, str], scale: float = 1.0
) -> tuple[Figure, ...]:
    """Figures of latencies that lie in objects: metric -> the path of its object, our statistic -> the key in it."""
    return tuple(
        (f"{ours}_{metric}_ms", (*path, theirs), scale)
        for metric, path in places.items()
        for ours, theirs in names.items()
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


def _refuse_impossible(name: str, columns: Mapping[str, Floats], kept: Sequence[int]) -> None:
    """Raises SpecError for times that no clock gives, and for requests without tokens."""
    ttft, e2el, prompt, output = (np.nan_to_num(columns[key]) for key in ("ttft", "e2el", "prompt", "output"))
    start = columns.get("start", ttft)
    span = start - start.min()
    wrongs = (
        (ttft < 0, "got its first token before it was sent: the clock went backwards"),
        (e2el < ttft - _CLOCK_S, "ended before its first token: the clock went backwards"),
        (e2el <= 0, "ended no later than it was sent: the clock went backwards"),
        (np.maximum(e2el, span) > _LONGEST_S, f"takes more than {_LONGEST_S:g} s: times are in seconds"),
        (prompt < 1, "has no token in its prompt"),
        (output < 1, "has no token in its answer, and no error"),
        (np.maximum(prompt, output) > MOST_TOKENS, f"has more than {MOST_TOKENS:g} tokens"),
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

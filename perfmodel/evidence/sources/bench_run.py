"""`Format`: where a load tool's file has its figures, and what it says of a run. Figures have the keys of vLLM's `bench
serve`, latencies in ms. TPOT is (E2E - TTFT) / (tokens - 1). Only answered requests count; failures are counted."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal, NamedTuple

import numpy as np

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Floats, Observation, RequestTimes
from perfmodel.evidence.sources.local import LocalSetup
from perfmodel.files.tables import load_table

Object = Mapping[str, Any]
Stated = str | int | float | bool
Figure = tuple[str, tuple[str, ...], float]  # our key, its place in a file, what one of its unit is in ours

STATISTICS = ("mean", "median", "p90", "p95", "p99")
MAX_TOKENS = 1e9  # of a prompt or an answer
_LONGEST_S = 1e7  # of a run: four months
_CLOCK_S = 1e-3  # two clocks of one tool may differ by so much
_QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class BenchLoad:
    """How requests arrived.

    process:      closed: `concurrency` in flight; open: at `rate`; burst: all at once
    rate:         requests/s; cv: coefficient of variation of the gaps (1: Poisson)
    num_requests: sent; prompt, answer: mean tokens of answered ones, None if unknown"""

    process: Literal["closed", "open", "burst"]
    num_requests: int
    concurrency: int | None = None
    rate: float | None = None
    cv: float = 1.0
    prompt: float | None = None
    answer: float | None = None


@dataclass(frozen=True)
class LoadTest:
    """Setup of a load tool's run.

    says:    scenario field ("model", "engine.tensor_parallel_size") -> value in the file
    version: of the tool, "" if unknown
    failed:  requests not answered completely
    speed:   simulated seconds per second of the measured emulator; 1 for a real server
    local:   a llama-bench test, which has no requests"""

    says: Mapping[str, Stated]
    completed: int
    failed: int = 0
    version: str = ""
    notes: tuple[str, ...] = ()
    speed: float = 1.0
    local: LocalSetup | None = None


class ResultFields(NamedTuple):
    """Typed access to a run's object. name: for errors; requests: of the run, once read"""

    name: str
    data: Any
    requests: RequestTimes | None = None

    def at(self, *path: str) -> Any:
        """Value at `path`, or None. Raises SpecError if a parent is no object."""
        data = self.data
        for key in path:
            if data is None:
                return None
            if not isinstance(data, dict):
                raise SpecError(f"{self.name}: got {str(data)[:40]!r} where an object with {key!r} was expected.")
            data = data.get(key)
        return data

    def within(self, *path: str) -> "ResultFields":
        """Fields of the object at `path`."""
        return ResultFields(self.name, self.at(*path))

    def number(self, *path: str, scale: float = 1.0) -> float | None:
        """The number at `path` times `scale`; None if missing or infinite. Raises SpecError for text and negatives."""
        value = self.at(*path)
        if value is None or (isinstance(value, float) and not isfinite(value)):
            return None
        place, shown = ".".join(path), repr(str(value)[:40])
        try:
            number = scale * float(value)
        except (TypeError, ValueError, OverflowError):
            raise SpecError(f"{self.name}: {place}: got {shown}; expected a number.") from None
        if isinstance(value, bool) or not number >= 0:
            raise SpecError(f"{self.name}: {place}: got {shown}; expected a number of at least 0.")
        return number if isfinite(number) else None

    def count(self, *path: str) -> int:
        """The integer at `path`, or 0."""
        return int(self.number(*path) or 0)

    def text(self, *path: str) -> str:
        """The text at `path`, or ""."""
        value = self.at(*path) if path else ""
        return value.strip() if isinstance(value, str) else ""


Place = tuple[str, ...] | Callable[[ResultFields], Any]  # where a file has a value, or how it is made of several


@dataclass(frozen=True)
class Format:
    """Mapping of a result format.

    keys:      that identify an object; without: keys it must not have; matches: what else is asked of it
    names:     of the tools that write it; tool: which one did, if several
    figures:   a table, or a function; requests: reader of single requests, if any
    load:      field of `BenchLoad` -> place; says: scenario field -> place of a text, or a function; empty is not
               stated
    completed, failed, version: places; duration: of the run, in seconds
    runs:      (name, object) of each run, if an object has several
    refusal:   why a run cannot be compared; "" if it can
    speed, local: as of `LoadTest`"""

    names: tuple[str, ...]
    keys: frozenset[str]
    figures: Sequence[Figure] | Callable[[ResultFields], Sequence[Figure]]
    completed: Place
    load: Mapping[str, Place] = field(default_factory=dict)
    says: Mapping[str, Place] = field(default_factory=dict)
    failed: Place = ()
    version: Place = ()
    requests: Callable[[ResultFields], RequestTimes | None] = lambda _: None
    duration: tuple[str, ...] = ()
    notes: Callable[[ResultFields], Iterable[str]] = lambda _: ()
    runs: Callable[[str, Object], list[tuple[str, Object]]] = lambda name, data: [(name, data)]
    matches: Callable[[Object], bool] = lambda _: True
    refusal: Callable[[ResultFields], str] = lambda _: ""
    without: frozenset[str] = frozenset()
    speed: Callable[[ResultFields], float] = lambda _: 1.0
    local: Callable[[ResultFields], LocalSetup | None] = lambda _: None
    tool: Callable[[ResultFields], str] | None = None

    def is_of(self, data: Object) -> bool:
        """Whether an object has this format."""
        return self.keys <= set(data) and self.without.isdisjoint(data) and self.matches(data)

    def read(self, name: str, data: Object) -> Observation:
        """The run of `data`, called `name`. Raises SpecError if it cannot be compared."""
        fields = ResultFields(name, data)
        if reason := self.refusal(fields):
            raise SpecError(f"{name}: {reason}")
        fields = fields._replace(requests=self.requests(fields))
        completed, failed = (int(_value(fields, place) or 0) for place in (self.completed, self.failed))
        if not completed:
            more = f" ({failed:,} failed or were cut off)" if failed else ""
            raise SpecError(f"{name}: none of its requests was answered{more}; there is nothing to compare.")
        table = self.figures(fields) if callable(self.figures) else self.figures
        numbers = ((ours, fields.number(*path, scale=scale)) for ours, path, scale in table)
        metrics = {ours: value for ours, value in numbers if value}
        if fields.requests is not None:
            duration_s = fields.number(*self.duration) if self.duration else None
            shortest_s = float(fields.requests.e2el_s.min())
            if duration_s and duration_s < shortest_s:
                raise SpecError(
                    f"{name}: duration: got {duration_s:g} s; expected at least {shortest_s:g} s, its shortest "
                    f"request; correct it or leave it out."
                )
            metrics |= figures_of(fields.requests, duration_s or None)

        def text(place: Place) -> Any:
            return place(fields) if callable(place) else fields.text(*place)

        says = {key: text(place) for key, place in self.says.items()}
        known = {key: value for key, value in says.items() if value}
        notes, speed, local = tuple(self.notes(fields)), self.speed(fields), self.local(fields)
        test = LoadTest(known, completed, failed, text(self.version), notes, speed, local)
        tool = self.names[0] if self.tool is None else self.tool(fields)
        load = self._load(fields, completed + failed)
        return Observation(name, test, metrics, fields.requests, load=load, source=tool)

    def _load(self, fields: ResultFields, num_requests: int) -> BenchLoad:
        """Open with a rate, closed with a concurrency limit, else a burst."""
        keys = ("concurrency", "rate", "cv", "prompt", "answer")
        concurrency, rate, cv, prompt, answer = (_value(fields, self.load.get(key, ())) for key in keys)
        slots = None if concurrency is None else int(concurrency)
        process: Literal["closed", "burst"] = "closed" if slots and slots < num_requests else "burst"
        if fields.requests is not None:
            prompt = prompt or float(fields.requests.num_prompt_tokens.mean())
            answer = answer or float(fields.requests.num_output_tokens.mean())
        cv = 1.0 if cv is None else cv
        kind: Any = process if rate is None else "open"
        return BenchLoad(kind, num_requests, slots, rate, cv, prompt or None, answer or None)


def _value(fields: ResultFields, place: Place) -> Any:
    return place(fields) if callable(place) else fields.number(*place) if place else None


def known_figures(tool: str) -> tuple[Figure, ...]:
    """The figures of a tool in `workloads/tables/load_tools.yaml`."""
    result: list[Figure] = []
    for name, path, *names, scale in load_table("load_tools")[tool].get("figures", ()):
        if not names:
            result.append((name, tuple(path), scale))
        for ours, theirs in names[0].items() if names else ():
            result.append((f"{ours}_{name}_ms", tuple(part.replace("{}", theirs) for part in path), scale))
    return tuple(result)


def known_format(name: str, /, **more: Any) -> Format:
    """The format of a tool in that table, and in `more` what takes more than a place to read."""
    row = load_table("load_tools")[name]
    places = {key: tuple(row.get(key, ())) for key in ("completed", "failed", "version", "duration")}
    mappings = {
        part: {key: tuple(path) for key, path in row.get(part, {}).items()} | more.pop(part, {})
        for part in ("load", "says")
    }
    keys = {key: frozenset(row.get(key, ())) for key in ("keys", "without")}
    return Format(
        **{"names": tuple(row["names"]), "figures": known_figures(name), **keys, **places, **mappings, **more}
    )


def request_times(
    name: str, columns: Mapping[str, Sequence[Any]], is_answered: Sequence[bool], starts: Sequence[Any] | None = None
) -> RequestTimes:
    """Columns of a file as arrays: answered requests ordered by start.

    name:        of the run, for errors
    columns:     prompt, output: tokens; ttft, e2el: seconds
    is_answered: per request; starts: seconds of any clock

    Raises SpecError for unequal lengths, non-numbers, and clocks that went backwards."""
    given = {**columns, **({"start": starts} if starts is not None else {})}
    refuse_unequal(name, given, len(is_answered))
    kept = [number for number, answered in enumerate(is_answered) if answered]
    if not kept:
        raise SpecError(
            f"{name}: none of its {len(is_answered):,} requests was answered; there is nothing to compare, look at "
            f"what the server said."
        )
    result = {key: np.array([_number(name, key, row, values[row]) for row in kept]) for key, values in given.items()}
    _refuse_impossible(name, result, kept)
    order = np.argsort(result["start"], kind="stable") if starts is not None else np.arange(len(kept))
    result = {key: values[order] for key, values in result.items()}
    start_s = result["start"] - result["start"][0] if starts is not None else None
    prompts, outputs = (result[key].astype(np.int64) for key in ("prompt", "output"))
    return RequestTimes(start_s, prompts, outputs, result["ttft"], np.maximum(result["e2el"], result["ttft"]))


def refuse_unequal(name: str, columns: Mapping[str, Sequence[Any]], count: int) -> None:
    """Raise SpecError for a column of the run `name` that has not `count` values, one for each request."""
    for key, values in columns.items():
        if len(values) != count:
            raise SpecError(
                f"{name}: got {len(values):,} values of {key} for {count:,} requests; expected as many of each; the "
                f"file was cut off, or put together from several runs."
            )


def _number(name: str, key: str, number: int, value: Any) -> float:
    """A request's value; nan for an unmeasured TTFT."""
    if value is None and key == "ttft":
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise SpecError(f"{name}: request {number} has {str(value)[:20]!r} as its {key}; expected a number.")
    return float(value)


def _refuse_impossible(name: str, columns: Mapping[str, Floats], kept: Sequence[int]) -> None:
    """Raise SpecError for impossible times, and requests without tokens."""
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
        (np.maximum(prompt, output) > MAX_TOKENS, f"has more than {MAX_TOKENS:g} tokens"),
    )
    for wrong, what in wrongs:
        if wrong.any():
            first, count = kept[int(np.flatnonzero(wrong)[0])], int(wrong.sum())
            others = f" (and {count - 1:,} more)" if count > 1 else ""
            raise SpecError(f"{name}: request {first}{others} {what}; take the run out, or measure it again.")


def figures_of(times: RequestTimes, duration_s: float | None = None) -> dict[str, float]:
    """Figures under vLLM's keys. duration_s: for throughput; default: first start to last end, if starts are known"""
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

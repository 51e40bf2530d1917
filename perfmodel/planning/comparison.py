"""Compares two results of one command: inputs, versions and answers. Results are `--json` documents. List rows are
matched by name (a finalist's label, a pool's role), else by index."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from perfmodel.errors import SpecError
from perfmodel.files.sandbox import read_json
from perfmodel.planning.metrics import Metric, metric_of
from perfmodel.renderable import Renderable, columns_of

# Derived from other fields, or compared separately.
_LEFT_OUT = ("answer", "interval", "notes", "provenance", "scenario", "trust", "worst")
_NAMES = ("label", "name", "path", "role", "variant", "set", "metric", "at", "deployment", "technique", "id", "what")
_WANTED = ("kind", "perfmodel", "engines", "calibrations", "inputs")
_CLOSE = 1e-12  # relative: below the rounding of another order of summation
Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """A field that differs; None where it is missing."""

    field: str
    one: Any
    other: Any


@dataclass(frozen=True, slots=True)
class MetricChange:
    """A metric that differs, in its own unit. place: the row it belongs to; empty for the whole result"""

    metric: Metric
    place: str
    one: float
    other: float

    @property
    def difference(self) -> float:
        return self.other - self.one

    @property
    def relative(self) -> float | None:
        """The change relative to the first value; None if that is 0."""
        return self.difference / self.one if self.one else None

    @property
    def gain(self) -> float:
        """Log ratio by which the second value is better; 0 for neutral metrics."""
        if self.metric.is_neutral or not self.difference:
            return 0.0
        sign = -1.0 if self.metric.is_better_low else 1.0
        if self.one > 0 and self.other > 0:
            return sign * math.log(self.other / self.one)
        return math.copysign(math.inf, sign * self.difference)

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or empty."""
        return "better" if self.gain > 0 else "worse" if self.gain < 0 else ""

    def to_json(self) -> dict[str, Any]:
        metric = self.metric
        return {
            "metric": metric.key,
            "place": self.place,
            "label": metric.label,
            "unit": metric.dimension,
            "one": self.one,
            "other": self.other,
            "difference": self.difference,
            "relative": self.relative,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, repr=False)
class ResultComparison(Renderable):
    """The differences between two results.

    one, other: names of the two results
    inputs:     fields of the resolved scenario; `versions`: of perfmodel, engines, calibrations
    answers:    metrics, largest gain first; `texts`: non-numeric answers (a choice, an origin)"""

    one: str
    other: str
    kind: str
    inputs: tuple[Change, ...] = ()
    versions: tuple[Change, ...] = ()
    answers: tuple[MetricChange, ...] = ()
    texts: tuple[Change, ...] = ()

    @property
    def is_same(self) -> bool:
        return not (self.inputs or self.versions or self.answers or self.texts)

    def columns(self) -> dict[str, NDArray[Any]]:
        """Metrics that differ, largest gain first."""
        return columns_of([answer.to_json() for answer in self.answers])

    def to_json(self) -> dict[str, Any]:
        """Everything, for `--json`."""
        return {**asdict(self), "is_same": self.is_same, "answers": [answer.to_json() for answer in self.answers]}


def read_result(path: Path) -> dict[str, Any]:
    """Load a result written with `--json`. Raises SpecError for an unreadable file or another document."""
    try:
        outcome = read_json(path, is_strict=True)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise SpecError(f"{path}: is not JSON ({error}); give what a command printed with --json.") from None
    provenance = outcome.get("provenance") if isinstance(outcome, dict) else None
    if not isinstance(provenance, dict) or any(name not in provenance for name in _WANTED):
        raise SpecError(f"{path}: is not a result of perfmodel: it has no provenance; write it again with --json.")
    result: dict[str, Any] = outcome
    return result


def compare_results(one: Result, other: Result, name: str = "one", other_name: str = "other") -> ResultComparison:
    """Compare two results of one kind, documents of `read_result`. name, other_name: labels of `one` and `other` in the
    output. Raises SpecError for two kinds."""
    made, made_other = one["provenance"], other["provenance"]
    if made["kind"] != made_other["kind"]:
        raise SpecError(
            f"{name} is a result of kind {made['kind']!r}, {other_name} of kind {made_other['kind']!r}; compare two of "
            f"one command."
        )
    versions = [
        Change(".".join(place), *pair)
        for field in ("perfmodel", "engines")
        for place, *pair in _leaves(made[field], made_other[field], (field,))
    ]
    for key in sorted({**made["calibrations"], **made_other["calibrations"]}):
        pair = [calibrations.get(key) for calibrations in (made["calibrations"], made_other["calibrations"])]
        if pair[0] != pair[1]:
            versions.append(Change(f"calibrations.{key}", *pair))
    answers, texts = [], []
    compared = [{key: value for key, value in result.items() if key not in _LEFT_OUT} for result in (one, other)]
    for path, value, other_value in _leaves(compared[0], compared[1], ()):
        if path[-1] in _LEFT_OUT:
            continue
        if not (_is_number(value) and _is_number(other_value)):
            texts.append(Change(" ".join(path), value, other_value))
        elif not math.isclose(value, other_value, rel_tol=_CLOSE, abs_tol=0.0):
            answers.append(MetricChange(metric_of(path[-1]), " ".join(path[:-1]), value, other_value))
    inputs = [Change(".".join(place), *pair) for place, *pair in _leaves(made["inputs"], made_other["inputs"], ())]
    answers.sort(key=lambda answer: (answer.metric.is_neutral, -answer.gain))
    return ResultComparison(
        name, other_name, made["kind"], tuple(inputs), tuple(versions), tuple(answers), tuple(texts)
    )


def _leaves(one: Any, other: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """(place, value, other value) of each difference, in the order of `one`; None for missing values."""
    inside, other_inside = _named(one), _named(other)
    if inside is None and other_inside is None:
        if one != other:
            yield path, one, other
        return
    for key in {**(inside or {}), **(other_inside or {})}:
        yield from _leaves((inside or {}).get(key), (other_inside or {}).get(key), (*path, key))


def _named(value: Any) -> Mapping[str, Any] | None:
    """Children by name: a mapping's keys, or the names of a list's rows; None for a leaf."""
    if isinstance(value, Mapping):
        return value or None
    if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
        names = [" ".join(str(row[key]) for key in _NAMES if row.get(key) not in (None, "")) for row in value]
        are_unique = len(set(names)) == len(names)
        return dict(zip(names if are_unique else map(str, range(len(value))), value, strict=True))
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

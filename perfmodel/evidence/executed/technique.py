"""Techniques: verdicts from pairs of runs, and the status of all from committed reports.

speedup = factor by which the scenario's metric is better than its baseline's
quotient = simulated speedup / executed speedup

    right           the executed speedup is more than 5 % away from 1, on the side that is simulated; the 95 % interval
                    of its paired runs excludes 1; the simulated one lies in it, or within 10 % of the executed one
    proves nothing  no such effect is executed, nor one simulated that the runs contradict
    missed          all others

The interval is Student's, of the logarithms of the runs' speedups: each run executes both sides in turn with one seed.
A speedup below 1 is a technique that is slower here, as simulated: what it is made for may need a GPU.

Techniques are data, one file per family in workloads/techniques; tests/contract/test_techniques.py checks their
switches against the simulator. `executed` and `validated` are claimed only for `right` results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, median, stdev
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir, find_file, list_names
from perfmodel.files.validation import load_spec
from perfmodel.planning.metrics import ALIASES, metric_named
from perfmodel.planning.typical_step import StepSpec

Outcome = Literal["right", "missed", "proves nothing"]

CLOSE = 0.10  # how far a simulated speedup may be from the executed one
MIN_GAIN = 0.05  # of an effect
_LEVEL = 0.975  # of Student's distribution: both sides together 95 %


def executed_interval(speedups: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean speedup of paired runs; one run alone is taken to be as near as effects begin."""
    if len(speedups) < 2:
        return speedups[0] / (1 + MIN_GAIN), speedups[0] * (1 + MIN_GAIN)
    from scipy.stats import t

    logs = [log(speedup) for speedup in speedups]
    reach = float(t.ppf(_LEVEL, len(logs) - 1)) * stdev(logs) / sqrt(len(logs))
    return exp(fmean(logs) - reach), exp(fmean(logs) + reach)


class Technique(Spec):
    """A technique and what it is compared with.

    name:     of the technique, any text
    page:     its page in docs/techniques, without the suffix; none where there is none yet
    baseline: `--set` overrides that take the technique out of the scenario
    metric:   of a run, by which both are compared; a speedup says how many times better the scenario is"""

    name: str = Field(min_length=1)
    page: str | None = Field(default=None, pattern="^[a-z0-9-]+$")
    baseline: tuple[str, ...] = Field(min_length=1)
    metric: str = "mean_e2el_ms"

    @field_validator("baseline", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("metric")
    @classmethod
    def _is_of_a_run(cls, value: str) -> str:
        name = ALIASES.get(value, value)
        metric_named(name, "run")
        return name

    def speedup(self, value: float, baseline: float) -> float:
        """Factor by which `value` of the metric is better than the baseline's."""
        return baseline / value if metric_named(self.metric, "run").is_better_low else value / baseline


class Sides(NamedTuple):
    """A figure with the technique and of the baseline."""

    scenario: float
    baseline: float


class TechniqueRun(NamedTuple):
    """One workload: the metric on both clocks, and the bias of predicted step durations."""

    simulated: Sides
    executed: Sides
    step_bias: Sides


@dataclass(frozen=True)
class TechniqueVerdict:
    """A technique over runs with different seeds: medians, since a run on a shared machine may be an outlier.

    simulated, executed: speedups, medians over the runs
    speedups, quotients: executed, and simulated / executed speedup, of each run
    step_bias: by how much predicted step times exceed executed ones, of the scenario and the baseline
    key:       `pair_key` of the pair as run; date: of the runs, ISO"""

    technique: Technique
    file: str
    simulated: float
    executed: float
    speedups: Sequence[float]
    quotients: Sequence[float]
    step_bias: Sides
    key: str
    date: str

    @classmethod
    def of(cls, technique: Technique, file: str, runs: Sequence[TechniqueRun], key: str, date: str) -> Self:
        """Verdict of the `runs` of `technique` in `file`; `key` and `date` as of the class."""
        simulated, executed = (
            [technique.speedup(*getattr(run, clock)) for run in runs] for clock in ("simulated", "executed")
        )
        quotients = [one / other for one, other in zip(simulated, executed, strict=True)]
        bias = Sides(*(median(run.step_bias[side] for run in runs) for side in range(2)))
        return cls(technique, file, median(simulated), median(executed), executed, quotients, bias, key, date)

    @classmethod
    def from_json(cls, row: Mapping[str, Any], technique: Technique) -> Self:
        """Inverse of `to_json`. Raises KeyError or TypeError for other data."""
        bias = Sides(row["step_bias"], row["baseline_step_bias"])
        quotients = row["quotients"]  # all that older reports have of single runs
        speedups = row.get("executed_runs") or [row["simulated"] / quotient for quotient in quotients]
        shown = row["simulated"], row["executed"], speedups, quotients
        return cls(technique, row["file"], *shown, bias, row["key"], row["date"])

    @property
    def quotient(self) -> float:
        """Median over runs of simulated / executed speedup."""
        return median(self.quotients)

    @property
    def outcome(self) -> Outcome:
        """Whether the simulator was right, by paired executed runs."""
        executed, (low, high) = median(self.speedups), executed_interval(self.speedups)
        is_close = low <= self.simulated <= high or abs(self.simulated / executed - 1.0) <= CLOSE
        if max(executed, 1 / executed) <= 1.0 + MIN_GAIN or low <= 1.0 <= high:
            return "proves nothing" if is_close else "missed"
        return "right" if is_close and (self.simulated > 1.0) == (executed > 1.0) else "missed"

    def __str__(self) -> str:
        result = f"simulated {self.simulated:.3f}, executed {self.executed:.3f}, quotient {self.quotient:.3f}"
        return f"{self.file}: {result}: {self.outcome}"

    def to_json(self) -> dict[str, Any]:
        return {
            "technique": self.technique.name,
            "file": self.file,
            "page": self.technique.page,
            "metric": self.technique.metric,
            "simulated": self.simulated,
            "executed": self.executed,
            "quotient": self.quotient,
            "verdict": self.outcome,
            "executed_runs": list(self.speedups),
            "executed_interval": list(executed_interval(self.speedups)),
            "quotients": list(self.quotients),
            "step_bias": self.step_bias.scenario,
            "baseline_step_bias": self.step_bias.baseline,
            "key": self.key,
            "date": self.date,
        }


WANTED = 0.25  # a median farther than this from the published one is a miss; it stays in the table
_WORST_FIRST: tuple[Outcome, ...] = ("missed", "proves nothing", "right")


class Move(Spec):
    """What the switch does: a metric of a run, of a `step` or of memory (as in `published`), and its direction."""

    metric: str
    direction: Literal["up", "down"]
    step: StepSpec | None = None


class TechniqueEntry(Spec):
    """One technique.

    what:      what it does, in one sentence
    page:      in docs/techniques, without the suffix
    scenario:  the file of workloads/scenarios in which it is switched; `setting`: overrides with and without it
    switch:    `--set` overrides that bring the technique; fields: what else belongs to it
    moves:     what the switch changes in the simulated answer
    missing:   why the switch does not work yet, where it does not
    pairs:     files of workloads/scenarios/techniques in which it is executed, against the same without it
    executed_not: why there are none
    published: ids of figures in workloads/scenarios/published
    quality:   what answers lose, as measured on its page of docs/techniques"""

    name: str
    what: str
    page: str = Field(pattern="^[a-z0-9-]+$")
    scenario: str | None = None
    setting: tuple[str, ...] = ()
    switch: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    moves: Move | None = None
    missing: str | None = None
    pairs: tuple[str, ...] = ()
    executed_not: str | None = None
    published: tuple[str, ...] = ()
    quality: str | None = None

    @model_validator(mode="after")
    def _says_all_or_why_not(self) -> "TechniqueEntry":
        shown = [bool(self.scenario), bool(self.switch), self.moves is not None]
        if not all(shown) and (any(shown) or self.missing is None):
            raise ValueError(f"{self.name}: give scenario, switch and moves, or say in `missing` why there is none")
        if bool(self.pairs) == (self.executed_not is not None):
            raise ValueError(f"{self.name}: give either `pairs` that execute it, or `executed_not` that says why not")
        return self


class TechniqueFamily(Spec):
    """One file: the techniques of a family. what: what they have in common, in one sentence"""

    family: str
    what: str
    techniques: tuple[TechniqueEntry, ...] = Field(min_length=1)


def load_techniques() -> tuple[TechniqueFamily, ...]:
    """All families, ordered by file name. Raises SpecError for an invalid file."""
    return tuple(load_spec(TechniqueFamily, find_file("techniques", name)) for name in list_names("techniques"))


class PairResult(NamedTuple):
    """Speedups of a pair as reported, simulated / executed, and whether the simulator was right."""

    simulated: float
    executed: float
    quotient: float
    verdict: Outcome


@dataclass(frozen=True, slots=True)
class TechniqueStatus:
    """One technique's line.

    family, what_family: the family's name and description
    ratios: id -> predicted / published, without figures used in fits; empty without a report
    pairs:  name -> result; empty without a report"""

    family: str
    what_family: str
    entry: TechniqueEntry
    has_pairs: bool
    ratios: Mapping[str, float]
    pairs: Mapping[str, PairResult]

    @property
    def is_simulated(self) -> bool:
        """Whether its switch changes the simulated answer."""
        return self.entry.missing is None

    @property
    def outcome(self) -> Outcome | None:
        """The worst of its pairs (missed, proves nothing, right); None if none ran."""
        outcomes = {pair.verdict for pair in self.pairs.values()}
        return next((item for item in _WORST_FIRST if item in outcomes), None)

    @property
    def is_executed(self) -> bool:
        """Whether all of its pairs came out as simulated."""
        return self.outcome == "right"

    @property
    def is_slower_here(self) -> bool:
        """Whether it was executed, and each pair was slower than without it."""
        return self.is_executed and all(pair.executed < 1.0 for pair in self.pairs.values())

    @property
    def why_not_executed(self) -> str:
        """Why no pair has run; empty if one has."""
        if self.outcome is not None:
            return ""
        if self.has_pairs:
            return "no report has its pair; run `perfmodel validate techniques`"
        return self.entry.executed_not or "the file of its pair is not there"

    @property
    def ratio(self) -> float | None:
        """Median of predicted / published."""
        return median(self.ratios.values()) if self.ratios else None

    @property
    def quotient(self) -> float | None:
        """Median of simulated / executed speedup."""
        return median(pair.quotient for pair in self.pairs.values()) if self.pairs else None

    @property
    def validated(self) -> str:
        """`yes`, `missed` (median off by more than a quarter) or `no` (no published comparison)."""
        if self.ratio is None:
            return "no"
        off = median(abs(value - 1) for value in self.ratios.values())
        return "yes" if off <= WANTED else "missed"

    def to_json(self) -> dict[str, Any]:
        """Everything, under stable names."""
        return {
            "family": self.family,
            "family_what": self.what_family,
            "technique": self.entry.name,
            "what": self.entry.what,
            "page": f"docs/techniques/{self.entry.page}.md",
            "switch": list(self.entry.switch),
            "simulated": self.is_simulated,
            "why_not_simulated": self.entry.missing,
            "executed": self.is_executed,
            "executed_verdict": self.outcome,
            "slower_here": self.is_slower_here,
            "why_not_executed": self.why_not_executed or None,
            "simulated_over_executed": self.quotient,
            "pairs": {name: pair.quotient for name, pair in self.pairs.items()}
            or list(self.entry.pairs if self.has_pairs else ()),
            "speedups": {
                name: {"simulated": pair.simulated, "executed": pair.executed} for name, pair in self.pairs.items()
            },
            "validated": self.validated,
            "predicted_over_published": self.ratio,
            "figures": dict(self.ratios),
            "quality": self.entry.quality,
        }


def published_ratios() -> dict[str, float]:
    """id -> predicted / published from the newest committed report, without figures used in fits."""
    rows = _newest_rows("published_figures_*.json", "figures")
    return {row["id"]: row["ratio"] for row in rows if not row["fitted"]}


def executed_pairs() -> dict[str, PairResult]:
    """Name -> result of each pair from the newest committed report; empty without one."""
    rows = _newest_rows("techniques_cpu_*.json", "techniques")
    return {row["file"].removesuffix(".yaml"): PairResult(*(row[name] for name in PairResult._fields)) for row in rows}


def _newest_rows(pattern: str, key: str) -> list[dict[str, Any]]:
    newest = max(data_dir("reports").glob(pattern), key=lambda path: path.name, default=None)
    return [] if newest is None else list(json.loads(newest.read_text(encoding="utf-8"))[key])


def read_status() -> list[TechniqueStatus]:
    """All techniques, in registry order."""
    published, executed, pairs = published_ratios(), executed_pairs(), data_dir("scenarios") / "techniques"
    return [
        TechniqueStatus(
            family=family.family,
            what_family=family.what,
            entry=entry,
            has_pairs=bool(entry.pairs) and all((pairs / f"{name}.yaml").is_file() for name in entry.pairs),
            ratios={id: published[id] for id in entry.published if id in published},
            pairs={name: executed[name] for name in entry.pairs if name in executed},
        )
        for family in load_techniques()
        for entry in family.techniques
    ]

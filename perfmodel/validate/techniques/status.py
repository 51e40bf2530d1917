"""What has been shown of each technique: simulated, executed, held against published figures; from committed reports.

`executed` and `validated` are said of what came out right only. What was executed shows that the simulator composes
runs of steps as the engine does: step times are those of steps measured with the technique and without.

Nothing is simulated here: that a switch moves what its entry says is a test's to show, how far predictions are from
measurements stands in the reports that `validate published` and `validate techniques` wrote. Which techniques there are
is data, one file per family in workloads/techniques; what is said there of a switch is held against the simulator by
tests/contract/test_techniques.py.
"""

__all__ = [
    "WANTED",
    "Move",
    "PairResult",
    "TechniqueEntry",
    "TechniqueFamily",
    "TechniqueStatus",
    "executed_pairs",
    "load_techniques",
    "published_ratios",
    "read_status",
]

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir, find_file, list_names
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.planning.typical_step import StepSpec
from perfmodel.validate.techniques.runs import Outcome, outcome_of

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
    quality:   what answers lose, as measured on its page of docs/techniques
    """

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
    """All families, in the order of their files' names. Raises SpecError for a file with a mistake."""
    files = [load_yaml(find_file("techniques", name)) for name in list_names("techniques")]
    return tuple(parse(TechniqueFamily, file.data, file.positions) for file in files)


class PairResult(NamedTuple):
    """What a pair of scenarios has shown, by the report: speedups, and simulated over executed."""

    simulated: float
    executed: float
    quotient: float

    @property
    def outcome(self) -> Outcome:
        """Whether the simulator was right."""
        return outcome_of(*self)


@dataclass(frozen=True, slots=True)
class TechniqueStatus:
    """One technique's line.

    family, what_family: its name, and what its techniques have in common
    ratios: predicted / published of its figures, by id, without those that a calibration was fitted to; empty where
            none is in the report
    pairs:  what its pairs have shown, by name; empty where none is in a report
    """

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
        """The worst of its pairs': missed, proves nothing, right; None where none has been run."""
        outcomes = {pair.outcome for pair in self.pairs.values()}
        return next((each for each in _WORST_FIRST if each in outcomes), None)

    @property
    def is_executed(self) -> bool:
        """Whether all pairs of scenarios that execute it came out as simulated."""
        return self.outcome == "right"

    @property
    def why_not_executed(self) -> str:
        """Why no pair has been run; empty where one has."""
        if self.outcome is not None:
            return ""
        if self.has_pairs:
            return "no report has its pair; run `perfmodel validate techniques`"
        return self.entry.executed_not or "the file of its pair is not there"

    @property
    def ratio(self) -> float | None:
        """Median of predicted over published."""
        return median(self.ratios.values()) if self.ratios else None

    @property
    def quotient(self) -> float | None:
        """Median of simulated over executed speedup."""
        return median(pair.quotient for pair in self.pairs.values()) if self.pairs else None

    @property
    def validated(self) -> str:
        """`yes`, `missed` (more than a quarter off in the median) or `no` (nothing published is compared)."""
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
            "why_not_executed": self.why_not_executed or None,
            "simulated_over_executed": self.quotient,
            "pairs": self._quotients or list(self.entry.pairs if self.has_pairs else ()),
            "speedups": {name: {"simulated": each.simulated, "executed": each.executed} for name, each in self._known},
            "validated": self.validated,
            "predicted_over_published": self.ratio,
            "figures": dict(self.ratios),
            "quality": self.entry.quality,
        }

    @property
    def _known(self) -> list[tuple[str, PairResult]]:
        return list(self.pairs.items())

    @property
    def _quotients(self) -> dict[str, float]:
        return {name: pair.quotient for name, pair in self._known}


def published_ratios() -> dict[str, float]:
    """Predicted / published by id, from the newest committed report, without figures that a calibration was fitted to;
    nothing where there is none."""
    newest = _newest("published_figures_*.json")
    if newest is None:
        return {}
    rows = json.loads(newest.read_text(encoding="utf-8"))["figures"]
    return {row["id"]: row["ratio"] for row in rows if not row["fitted"]}


def executed_pairs() -> dict[str, PairResult]:
    """What each pair has shown, by its name, from the newest committed report; empty where there is none."""
    newest = _newest("techniques_cpu_*.json")
    if newest is None:
        return {}
    rows = json.loads(newest.read_text(encoding="utf-8"))["techniques"]
    return {row["file"].removesuffix(".yaml"): PairResult(*(row[name] for name in PairResult._fields)) for row in rows}


def read_status() -> list[TechniqueStatus]:
    """All techniques, in the order of the registry."""
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


def _newest(pattern: str) -> Path | None:
    return max(data_dir("reports").glob(pattern), key=lambda path: path.name, default=None)

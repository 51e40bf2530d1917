"""What has been shown of each technique: simulated, executed, held against published figures; from committed reports.

Nothing is simulated here: that a switch moves what its entry says is a test's to show, how far predictions are from
measurements stands in the reports that `validate published` and `validate techniques` wrote.
"""

__all__ = ["WANTED", "TechniqueStatus", "executed_quotients", "published_ratios", "read_status"]

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from perfmodel.files.catalog import data_dir
from perfmodel.validate.techniques.registry import TechniqueEntry, load_techniques

WANTED = 0.25  # a median farther than this from the published one is a miss; it stays in the table


@dataclass(frozen=True, slots=True)
class TechniqueStatus:
    """One technique's line.

    ratios:    predicted / published of its figures, by id; empty where none is in the report
    quotients: simulated / executed speedup of its pairs; empty where none is in a report
    """

    family: str
    entry: TechniqueEntry
    has_pairs: bool
    ratios: Mapping[str, float]
    quotients: Mapping[str, float]

    @property
    def is_simulated(self) -> bool:
        """Whether its switch changes the simulated answer."""
        return self.entry.missing is None

    @property
    def is_executed(self) -> bool:
        """Whether a pair of scenarios executes it."""
        return self.has_pairs

    @property
    def why_not_executed(self) -> str:
        """Empty where it is."""
        if self.is_executed:
            return ""
        return self.entry.executed_not or "the file of its pair is not there"

    @property
    def ratio(self) -> float | None:
        """Median of predicted over published."""
        return median(self.ratios.values()) if self.ratios else None

    @property
    def quotient(self) -> float | None:
        """Median of simulated over executed speedup."""
        return median(self.quotients.values()) if self.quotients else None

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
            "technique": self.entry.name,
            "page": f"docs/techniques/{self.entry.page}.md",
            "switch": list(self.entry.switch),
            "simulated": self.is_simulated,
            "why_not_simulated": self.entry.missing,
            "executed": self.is_executed,
            "why_not_executed": self.why_not_executed or None,
            "simulated_over_executed": self.quotient,
            "pairs": dict(self.quotients) or list(self.entry.pairs if self.has_pairs else ()),
            "validated": self.validated,
            "predicted_over_published": self.ratio,
            "figures": dict(self.ratios),
        }


def published_ratios() -> dict[str, float]:
    """Predicted / published by id, from the newest committed report; nothing where there is none."""
    newest = _newest("published_figures_*.json")
    if newest is None:
        return {}
    return {row["id"]: row["ratio"] for row in json.loads(newest.read_text(encoding="utf-8"))["figures"]}


def executed_quotients() -> dict[str, float]:
    """Simulated / executed speedup by the pair's name, from the newest committed report; empty where there is none."""
    newest = _newest("techniques_cpu_*.json")
    if newest is None:
        return {}
    rows = json.loads(newest.read_text(encoding="utf-8"))["techniques"]
    return {row["file"].removesuffix(".yaml"): row["quotient"] for row in rows}


def read_status() -> list[TechniqueStatus]:
    """All techniques, in the order of the registry."""
    published, executed, pairs = published_ratios(), executed_quotients(), data_dir("scenarios") / "techniques"
    return [
        TechniqueStatus(
            family=family.family,
            entry=entry,
            has_pairs=bool(entry.pairs) and all((pairs / f"{name}.yaml").is_file() for name in entry.pairs),
            ratios={id: published[id] for id in entry.published if id in published},
            quotients={name: executed[name] for name in entry.pairs if name in executed},
        )
        for family in load_techniques()
        for entry in family.techniques
    ]


def _newest(pattern: str) -> Path | None:
    return max(data_dir("reports").glob(pattern), key=lambda path: path.name, default=None)

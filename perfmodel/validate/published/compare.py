"""`validate published`: figures from papers, blogs and tables of results, each a scenario with a `published` block.

Every figure is restated with its source in a file of its own; nothing was fitted to any of them. Formats and choice of
the figures: docs/published.md.
"""

__all__ = ["validate_published"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.cost.calibrations.provenance import provenance_of
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.files.base import block_as
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario import Scenario
from perfmodel.validate.published.figures import Prediction, predict
from perfmodel.validate.published.spec import Published
from perfmodel.validate.report import Comparison, Rows, ValidationReport, by_dimension, dimensions_of, pooled

Progress = Callable[[int, int], None]

_FAMILIES = ("kernels", "steps", "memory", "systems", "system ratios")
_ABOUT = (
    "Figures that others published (papers, blogs, repositories, tables of results), each restated in a scenario file "
    "with its source, beside what perfmodel predicts for that scenario. Of a range the nearer end counts. Kernels and "
    "operators, steps, memory, whole runs and ratios of whole runs are counted apart. No constant was fitted to these "
    "figures; tables of kernels of the A100 and H100 that some figures stand in are what calibrations were fitted to."
)


@dataclass(frozen=True)
class _Judged:
    """A file's figure and what was predicted for it."""

    file: Path
    scenario: Scenario
    figure: Published
    prediction: Prediction

    @property
    def published(self) -> float:
        """The figure; of a range what is nearest to the prediction."""
        value = self.figure.value
        if isinstance(value, tuple):
            return min(max(self.prediction.value, value[0]), value[1])
        return value

    @property
    def name(self) -> str:
        return self.figure.id or self.file.stem

    @property
    def kind(self) -> str:
        return "ratio" if self.figure.baseline else "absolute"

    @property
    def ratio(self) -> float:
        return self.prediction.value / self.published

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "file": self.file.name,
            "technique": self.figure.technique,
            "family": self.figure.family,
            "metric": self.figure.metric,
            "unit": self.figure.unit,
            "predicted": self.prediction.value,
            "published": self.published,
            "ratio": self.ratio,
            "source": self.figure.source,
            "reason": self.reason,
            "fitted": self.figure.fitted,
        }

    @property
    def reason(self) -> str:
        return ". ".join(part.rstrip(".") for part in (self.figure.note, self.prediction.made_of) if part)


_DIMENSIONS: dict[str, Callable[[_Judged], str]] = {
    "technique": lambda each: each.figure.technique,
    "device": lambda each: each.scenario.hardware.name,
    "kind": lambda each: each.kind,
    "basis": lambda each: each.figure.basis,
}


def validate_published(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Predict the figure of every `*.yaml` below `path`, or of one file.

    Files that cannot be read or predicted are listed with the reason. Raises SpecError where that goes for all.
    """
    files = _files(Path(path))
    judged: list[_Judged] = []
    reasons: list[str] = []
    for done, file in enumerate(files, 1):
        try:
            judged.append(_judge(file))
        except PerfmodelError as error:
            reasons.append(f"not covered: {file.name}: {error}")
        if progress is not None:
            progress(done, len(files))
    if not judged:
        raise SpecError(reasons[0].removeprefix(f"not covered: {files[0].name}: "))
    return _report(judged, reasons)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for suffix in ("yaml", "yml") for file in path.rglob(f"*.{suffix}"))
    if not files:
        raise SpecError(f"validate published {path}: found no *.yaml; give a folder of scenarios with `published`.")
    return files


def _judge(file: Path) -> _Judged:
    scenario = load_scenario(file)
    prediction = predict(scenario, file)
    figure = block_as(scenario.published, Published)
    assert figure is not None  # else nothing was predicted
    return _Judged(file, scenario, figure, prediction)


def _report(judged: Sequence[_Judged], reasons: Sequence[str]) -> ValidationReport:
    comparisons = [_comparison(family, judged) for family in _FAMILIES]
    comparisons = [each for each in comparisons if len(each.rows)]
    ordered = sorted(judged, key=lambda each: (_FAMILIES.index(each.figure.family), each.figure.technique, each.name))
    worst = sorted(judged, key=lambda each: -abs(each.ratio - 1))[:10]
    return ValidationReport(
        kind="published",
        rows=len(judged) + len(reasons),
        covered=len(judged),
        metrics=pooled(comparisons),
        by=by_dimension(comparisons),
        worst=[_worst(each) for each in worst],
        notes=reasons,
        comparisons=comparisons,
        provenance=provenance_of([each.scenario for each in judged]),
        about=_ABOUT,
        figures=[each.to_json() for each in ordered],
    )


def _comparison(family: str, judged: Sequence[_Judged]) -> Comparison:
    members = [each for each in judged if each.figure.family == family]
    rows = Rows(
        [each.prediction.value for each in members],
        [each.published for each in members],
        [each.name for each in members],
    )
    return Comparison.of(family, rows, "as published", dimensions_of(members, _DIMENSIONS))


def _worst(each: _Judged) -> dict[str, Any]:
    return {
        "metric": each.figure.metric,
        "row": f"{each.name} ({each.figure.technique}, {each.figure.source})",
        "predicted": each.prediction.value,
        "measured": each.published,
        "error": each.ratio - 1,
        "breakdown": {"why": each.reason},
    }

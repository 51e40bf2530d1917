"""What-ifs as a document: Markdown with pictures beside it, or one HTML page; and their JSON."""

__all__ = ["WhatIfReport", "write_whatif"]

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from perfmodel.plan.sensitivity.ask import WhatIfResult
from perfmodel.plan.sweeps.points import Record
from perfmodel.report.drawing.files import write_document
from perfmodel.report.drawing.shown import as_html, as_text
from perfmodel.report.runs.facts import headline
from perfmodel.report.runs.tables import rows_table
from perfmodel.report.studies.tables import StudyTable, markdown_table
from perfmodel.report.whatifs.pictures import whatif_pictures
from perfmodel.report.whatifs.tables import whatif_tables
from perfmodel.report.whatifs.words import whatif_words
from perfmodel.version import __version__


@dataclass(frozen=True, repr=False)
class WhatIfReport:
    """All that was found; `command` is what wrote it."""

    result: WhatIfResult
    command: str = "perfmodel whatif"

    @property
    def title(self) -> str:
        return headline(self.result.answers.scenario)

    @property
    def tables(self) -> list[StudyTable]:
        return list(whatif_tables(self.result.answers))

    @property
    def words(self) -> list[str]:
        return whatif_words(self.result)

    @property
    def notes(self) -> list[str]:
        answers = self.result.answers
        origin = f"Times are {answers.base.origin}; a resource's elasticity is taken {0.1:.0%} up and down."
        return [*([origin] if answers.base.origin else []), *dict.fromkeys([*answers.problems, *answers.base.notes])]

    def columns(self) -> dict[str, NDArray[Any]]:
        """Sensitivities as arrays, a row for each path and metric; nan where there is no number."""
        rows = self.result.answers.sensitivities

        def numbers(values: Sequence[float | None]) -> NDArray[Any]:
            return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

        return {
            "path": np.array([each.axis.path for each in rows]),
            "metric": np.array([each.metric for each in rows]),
            "low_value": np.array([each.axis.texts[0] for each in rows]),
            "high_value": np.array([each.axis.texts[-1] for each in rows]),
            "low": numbers([each.low for each in rows]),
            "base": numbers([each.base for each in rows]),
            "high": numbers([each.high for each in rows]),
            "elasticity": numbers([each.elasticity for each in rows]),
        }

    def show(self, console: Console) -> None:
        """Print the tables, then the answer in words."""
        console.print(Text(f"\n{self.title}", style="bold cyan"))
        for table in self.tables:
            console.print(Text(table.title, style="bold"))
            console.print(rows_table(table.head, table.rows, left=table.num_names))
        for line in self.words:
            console.print(Text(f"- {line}"))
        for note in self.notes:
            console.print(Text(f"Note: {note}", style="dim"))

    def __str__(self) -> str:
        return as_text(self.show)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self.show)

    def to_json(self) -> dict[str, Any]:
        """Every point with its values, sensitivities, crossovers and the sentences."""
        result, answers = self.result, self.result.answers
        question = answers.question
        return {
            "scenario": answers.scenario.name,
            "metrics": list(question.base.metrics),
            "base": _record(answers.base),
            "sensitivities": [
                {
                    "path": each.axis.path,
                    "metric": each.metric,
                    "low": {"value": each.axis.texts[0], "metric": each.low},
                    "base": {"value": each.axis.present_x, "metric": each.base},
                    "high": {"value": each.axis.texts[-1], "metric": each.high},
                    "elasticity": each.elasticity,
                }
                for each in answers.sensitivities
            ],
            "points": [
                {"set": text, **_record(record)}
                for axis in question.axes
                for text, record in zip(axis.overrides, answers.by_axis[axis.path], strict=True)
            ],
            "grid": [{"set": list(key), **_record(record)} for key, record in answers.grid.items()],
            "against": {
                "set": list(question.against),
                "base": _record(answers.other) if answers.other is not None else None,
                "points": [
                    {"set": text, **_record(record)}
                    for axis in question.axes
                    for text, record in zip(axis.overrides, answers.others.get(axis.path, ()), strict=False)
                ],
            }
            if question.against
            else None,
            "step": {"label": result.step_label, "bound": result.step_bound, **_step(result)},
            "bound_changes": [asdict(change) for change in result.bounds],
            "crossovers": [asdict(each) for each in result.payoffs],
            "answer": self.words,
            "notes": self.notes,
        }


def write_whatif(report: WhatIfReport, path: Path) -> list[Path]:
    """Write FILE.md with FILE.json and FILE.*.svg, or FILE.html with FILE.json; returns the files."""
    pictures = whatif_pictures(report.result.answers)
    return write_document(
        path, report.to_json(), pictures, partial(_markdown, report), partial(_html, report, pictures)
    )


def _record(record: Record) -> dict[str, Any]:
    return {"values": dict(record.values), **({"problem": record.problem} if record.problem else {})}


def _step(result: WhatIfResult) -> dict[str, Any]:
    return {"batch": result.step.batch, "context": result.step.context, "prefill": result.step.prefill}


def _markdown(report: WhatIfReport, pictures: Sequence[str]) -> str:
    today = datetime.date.today().isoformat()
    lines = [f"# What if: {report.result.answers.scenario.name}", "", "```", report.command, "```", ""]
    lines += [f"Generated by this command on {today}, perfmodel {__version__}.", "", f"**{report.title}**", ""]
    lines += [*(f"- {line}" for line in report.words), ""]
    for name in pictures:
        lines += [f"![{name}]({name})", ""]
    for table in report.tables:
        lines += markdown_table(table)
    if report.notes:
        lines += ["## Notes", "", *(f"- {note}" for note in report.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _html(report: WhatIfReport, pictures: Mapping[str, str]) -> str:
    from perfmodel.report.drawing.page import Page

    page = Page(f"What if: {report.result.answers.scenario.name}", report.command, "what if")
    page.list(report.title, report.words)
    for svg in pictures.values():
        page.picture(svg)
    for table in report.tables:
        page.table(table.title, table.head, table.rows)
    if report.notes:
        page.list("Notes", report.notes)
    return page.render()

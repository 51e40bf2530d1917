"""A study as a document: Markdown with pictures beside it, or one HTML page; and its JSON."""

__all__ = ["StudyPart", "StudyReport", "write_document", "write_study"]

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from perfmodel import __version__
from perfmodel.errors import SpecError
from perfmodel.plan.studies.study import Answers
from perfmodel.report.studies.pictures import study_pictures
from perfmodel.report.studies.tables import StudyTable, markdown_table, problems_of, study_tables
from perfmodel.report.studies.words import agreement_words, answer_words
from perfmodel.specs.study import Study


@dataclass(frozen=True)
class StudyPart:
    """The study asked on one machine. `answers`: by clock, the one that counts first."""

    title: str
    answers: Mapping[str, Answers]

    @property
    def tables(self) -> list[StudyTable]:
        first = next(iter(self.answers.values()))
        names = [n for n in _metrics(first.study) if any(n in record.values for record in first.records.values())]
        return study_tables(self.answers, names)

    @property
    def words(self) -> list[str]:
        lines = answer_words(next(iter(self.answers.values())))
        if len(self.answers) > 1:
            executed, simulated = list(self.answers.values())[:2]
            lines.append(agreement_words(executed, simulated))
        return [line for line in lines if line]

    @property
    def notes(self) -> list[str]:
        found = [text for each in self.answers.values() for text in problems_of(each)]
        found += [note for each in self.answers.values() for r in each.records.values() for note in r.notes]
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class StudyReport:
    """All that a study says; `command` is what wrote it."""

    study: Study
    parts: Sequence[StudyPart]
    command: str
    notes: Sequence[str] = ()

    @property
    def pictures(self) -> dict[str, str]:
        return study_pictures([(part.title, part.answers) for part in self.parts])

    def to_json(self) -> dict[str, Any]:
        """Every point with its variant, place and values, and the sentences."""
        return {
            "study": self.study.study,
            "question": self.study.question,
            "metrics": list(_metrics(self.study)),
            "baseline": self.study.reference,
            "parts": [
                {
                    "title": part.title,
                    "answer": part.words,
                    "points": [row for answers in part.answers.items() for row in _points(*answers)],
                    "notes": part.notes,
                }
                for part in self.parts
            ],
            "notes": list(self.notes),
        }


def write_study(report: StudyReport, path: Path) -> list[Path]:
    """Write FILE.md with FILE.json and FILE.*.svg, or FILE.html with FILE.json; returns the files."""
    pictures = report.pictures
    return write_document(
        path, report.to_json(), pictures, partial(_markdown, report), partial(_html, report, pictures)
    )


def write_document(
    path: Path,
    document: Any,
    pictures: Mapping[str, str],
    markdown: Callable[[Sequence[str]], str],
    html: Callable[[], str],
) -> list[Path]:
    """Write FILE.md (`markdown` of its pictures' files) with FILE.*.svg, or FILE.html, and FILE.json beside it."""
    if path.suffix not in (".md", ".html"):
        raise SpecError(f"--report {path}: allowed a file ending in .md or .html; its .json gets the same name.")
    texts = {path.with_suffix(".json"): json.dumps(document, indent=1, ensure_ascii=False) + "\n"}
    if path.suffix == ".md":
        texts |= {path.with_suffix(f".{name}.svg"): svg for name, svg in pictures.items()}
        texts[path] = markdown([f"{path.stem}.{name}.svg" for name in pictures])
    else:
        texts[path] = html()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"--report {path}: cannot be written: {error.strerror}.") from None
    return [path, *(file for file in texts if file != path)]


def _metrics(study: Study) -> list[str]:
    quality = [study.quality.metric] if study.quality is not None else []
    return list(dict.fromkeys([*study.metrics, *quality]))


def _points(clock: str, answers: Answers) -> Iterator[dict[str, Any]]:
    for (variant, at), record in answers.records.items():
        yield {
            "variant": variant,
            **({"at": dict(zip(answers.axes, at, strict=True))} if at else {}),
            "clock": clock,
            "origin": record.origin,
            "values": dict(record.values),
            **({"problem": record.problem} if record.problem else {}),
        }


def _markdown(report: StudyReport, pictures: Sequence[str]) -> str:
    study = report.study
    today = datetime.date.today().isoformat()
    lines = [f"# Study: {study.study.replace('_', ' ')}", "", "```", report.command, "```", ""]
    lines += [f"Generated by this command on {today}, perfmodel {__version__}.", ""]
    lines += [f"**{study.question.strip()}**", ""]
    for part in report.parts:
        lines += [f"{part.title}:", "", *(f"- {line}" for line in part.words), ""]
    for name in pictures:
        lines += [f"![{name}]({name})", ""]
    for part in report.parts:
        lines += [f"## {part.title}", ""]
        reference = next(iter(part.answers.values())).reference
        lines += [f"In brackets: how many times better than {reference}.", ""]
        for table in part.tables:
            lines += markdown_table(table)
    notes = [*report.notes, *(note for part in report.parts for note in part.notes)]
    if notes:
        lines += ["## Notes", "", *(f"- {note}" for note in dict.fromkeys(notes))]
    return "\n".join(lines).rstrip() + "\n"


def _html(report: StudyReport, pictures: Mapping[str, str]) -> str:
    from perfmodel.report.drawing.page import Page

    page = Page(f"Study: {report.study.study.replace('_', ' ')}", report.command, "study")
    page.list(report.study.question.strip(), [f"{part.title}: {line}" for part in report.parts for line in part.words])
    for svg in pictures.values():
        page.picture(svg)
    for part in report.parts:
        for table in part.tables:
            page.table(f"{part.title}: {table.title or 'all metrics'}", table.head, table.rows)
    notes = [*report.notes, *(note for part in report.parts for note in part.notes)]
    if notes:
        page.list("Notes", list(dict.fromkeys(notes)))
    return page.render()

"""A study as a document: by metric, variants down, the values of an axis across; the answer before it."""

__all__ = ["study_json", "study_view"]

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.planning.metrics import Metric
from perfmodel.planning.studies.study import Answers, Label, StudyPart, StudyResult
from perfmodel.planning.sweeps.findings import better_by
from perfmodel.report.document import Block, Document, Heading, Notes, Paragraph, Sentences, Span, Table
from perfmodel.report.numbers import MISSING, format_factor, format_metric, format_short
from perfmodel.report.views.study.pictures import part_title, study_pictures
from perfmodel.report.views.study.sentences import agreement_sentence, answer_sentences, place_label
from perfmodel.specs.overrides import as_overrides

_MOST_PLACES = 4  # named of the points without values that have one reason


def study_view(result: StudyResult, command: str = "") -> Document:
    """The question, the answer, pictures, tables of each part, notes."""
    study = result.study
    blocks: list[Block] = [Paragraph(Span(sentence, "bad")) for sentence in _quick(result)]
    blocks += [Sentences(_sentences(part), part_title(part)) for part in result.parts]
    blocks += study_pictures(result.parts)
    for part in result.parts:
        blocks.append(Heading(part_title(part)))
        blocks.append(Paragraph(f"In brackets: how many times better than {part.first.reference}."))
        blocks += _tables(part)
    notes = [*result.notes, *(note for part in result.parts for note in _notes(part))]
    blocks.append(Notes(list(dict.fromkeys(notes))))
    return Document(f"Study: {study.study.replace('_', ' ')}", blocks, study.question.strip(), "study", command)


def _quick(result: StudyResult) -> list[str]:
    """That a quick form is no answer to the study's question, and what it changes."""
    if not result.is_quick:
        return []
    changes = as_overrides(result.study.quick.set)
    changed = f" and {'; '.join(changes)}" if changes else ""
    return [
        f"Quick: fewer values of each axis{changed}. It shows that the study runs; the answer to its question is that "
        f"of the whole study, which may differ."
    ]


def study_json(result: StudyResult) -> dict[str, Any]:
    """Every point with its variant, place and values, and the sentences."""
    return {
        "study": result.study.study,
        "question": result.study.question,
        "metrics": result.study.all_metrics,
        "baseline": result.study.reference,
        "quick": result.is_quick,
        "parts": [
            {
                "title": part_title(part),
                "answer": [*_quick(result), *_sentences(part)],
                "points": [row for answers in part.answers.items() for row in _points(*answers)],
                "notes": _notes(part),
            }
            for part in result.parts
        ],
        "notes": list(result.notes),
        "provenance": _provenance(result),
    }


def _provenance(result: StudyResult) -> dict[str, Any]:
    scenarios = [part.scenario for part in result.parts]
    inputs = {"study": resolved(result.study), "scenario": resolved(scenarios[0])}
    return provenance_of(scenarios).to_json("study", inputs)


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


def _sentences(part: StudyPart) -> list[str]:
    lines = answer_sentences(part.first)
    if len(part.answers) > 1:
        executed, simulated = list(part.answers.values())[:2]
        lines.append(agreement_sentence(executed, simulated))
    return [line for line in lines if line]


def _notes(part: StudyPart) -> list[str]:
    """Why there are points without values, and what the records say."""
    problems = [text for each in part.answers.values() for text in _problems(each)]
    return list(dict.fromkeys([*problems, *part.notes]))


def _problems(answers: Answers) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for (variant, at), record in answers.records.items():
        if record.problem:
            place = place_label(dict(zip(answers.axes, at, strict=True)))
            found.setdefault(record.problem, []).append(f"{variant} at {place}" if place else variant)
    for problem, places in found.items():
        more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
        yield f"{'; '.join(places[:_MOST_PLACES])}{more}: {problem}"


def _tables(part: StudyPart) -> list[Table]:
    """Answers by clock side by side; without an axis one table of all metrics, else one for each metric."""
    metrics = [part.first.study.metric_named(name) for name in part.metrics]
    if not part.first.axes:
        return [_without_axes(part.answers, metrics)]
    return [_over_axis(part.answers, metric) for metric in metrics]


def _without_axes(answers: Mapping[str, Answers], metrics: Sequence[Metric]) -> Table:
    of_clock = {origin: f", {origin}" if len(answers) > 1 else "" for origin in answers}
    head = ["variant", *(f"{metric.title}{of_clock[origin]}" for metric in metrics for origin in answers)]
    variants = list(dict.fromkeys(v for each in answers.values() for v in each.variants))
    rows = [
        [variant, *(_cell(each, variant, {}, metric) for metric in metrics for each in answers.values())]
        for variant in variants
    ]
    return Table(head, rows)


def _over_axis(answers: Mapping[str, Answers], metric: Metric) -> Table:
    first = next(iter(answers.values()))
    axis = next((name for name, each in first.axes.items() if each.is_numeric), list(first.axes)[-1])
    others = [name for name in first.axes if name != axis]
    names = [*others, "variant", *(["clock"] if len(answers) > 1 else [])]
    labels = first.axes[axis].labels
    rows = []
    for fixed in first.places(axis):
        for variant in first.variants:
            for origin, each in answers.items():
                if variant in each.variants:
                    place = [
                        *(_label(fixed[name]) for name in others),
                        variant,
                        *([origin] if len(answers) > 1 else []),
                    ]
                    rows.append([*place, *(_cell(each, variant, {**fixed, axis: label}, metric) for label in labels)])
    unit = f" ({first.axes[axis].unit})" if first.axes[axis].unit else ""
    title = f"{metric.title}, by {axis}{unit}"
    return Table([*names, *map(_label, labels)], rows, title, left=len(names))


def _cell(answers: Answers, variant: str, at: Mapping[str, Label], metric: Metric) -> str:
    """The value, and in brackets how many times better than the baseline's."""
    value = answers.value(variant, at, metric.key) if variant in answers.variants else None
    if value is None:
        return MISSING
    reference = answers.reference
    base = answers.value(reference, at, metric.key) if reference in answers.variants and variant != reference else None
    gain = f" ({format_factor(better_by(value, base, metric.is_better_low))})" if base and value else ""
    return format_metric(metric, value) + gain


def _label(label: Label) -> str:
    return format_short(label) if isinstance(label, int | float) and not isinstance(label, bool) else str(label)

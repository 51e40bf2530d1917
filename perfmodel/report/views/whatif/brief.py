"""A what-if on one screen: what the ends of each axis do, the values of an axis that has its own table."""

__all__ = ["whatif_brief"]

from collections.abc import Iterator
from dataclasses import replace

from perfmodel.planning.metrics import study_metric
from perfmodel.planning.sensitivity.ask import WhatIfResult
from perfmodel.planning.sensitivity.whatif import Sensitivity, WhatIfAnswers
from perfmodel.report.document import Block, Document, Line, Paragraph, Sentences, Span, Table
from perfmodel.report.numbers import MISSING, format_metric
from perfmodel.report.views.scenario import MORE, few_notes, headline_with_slo, trust_line
from perfmodel.report.views.whatif.sentences import path_label, whatif_sentences, x_label
from perfmodel.report.views.whatif.view import has_own_table, values_tables, whatif_notes
from perfmodel.trust import trust_of

_MOST_AXES, _MOST_METRICS, _MOST_SENTENCES = 8, 4, 6
_MOST_TABLES, _MOST_VALUES = 2, 9  # of axes that have one of their own
_ENDS = "Each varied alone (* counts most)"
_SHORT = {
    "mean_ttft_ms": "TTFT, ms", "mean_tpot_ms": "TPOT, ms",
    "output_throughput": "output tok/s", "request_goodput": "goodput req/s", "request_throughput": "req/s",
}  # fmt: skip


def whatif_brief(result: WhatIfResult) -> Document:
    """What the ends of each axis do to the first metrics, and the sentences that no table has."""
    answers = result.answers
    sentences = whatif_sentences(result, counts=False)
    left = f" {len(sentences) - _MOST_SENTENCES} more sentences." if len(sentences) > _MOST_SENTENCES else ""
    metrics = [study_metric(name) for name in answers.question.base.metrics[:_MOST_METRICS]]
    blocks: list[Block] = [
        *_ends(answers),
        *[replace(table, rows=table.rows[:_MOST_VALUES]) for table in values_tables(answers, metrics)][:_MOST_TABLES],
        Sentences(sentences[:_MOST_SENTENCES]),
        *trust_line(trust_of(answers.scenario)),
        *few_notes(whatif_notes(result)),
        Paragraph(f"Next: `plan` says which deployment serves it. {MORE}, --report FILE.{left}"),
    ]
    return Document(f"What if: {answers.scenario.name}", blocks, headline_with_slo(answers.scenario), "what if")


def _ends(answers: WhatIfAnswers) -> Iterator[Table]:
    """The base values, then a row per numeric axis: `126 .. 666` from its low to its high end."""
    names = answers.question.base.metrics[:_MOST_METRICS]
    effects = {name: [effect for effect in answers.of_metric(name) if effect.axis.xs] for name in names}
    strongest = {
        name: max(candidates, key=lambda each: abs(each.elasticity or 0.0), default=None)
        for name, candidates in effects.items()
    }
    axes = [axis for axis in answers.question.axes if not has_own_table(answers, axis)][:_MOST_AXES]
    rows: list[list[Line]] = []
    for axis in axes:
        low, high = (x_label(x, axis.unit) for x in (axis.xs[0], axis.xs[-1]))
        row: list[Line] = [path_label(axis.path), f"{low} .. {high}"]
        for name, candidates in effects.items():
            own = next((effect for effect in candidates if effect.axis is axis), None)
            row.append("" if own is None else _ends_of(own, is_strongest=own is strongest[name]))
        rows.append(row)
    metrics = [study_metric(name) for name in names]
    base: list[Line] = [format_metric(metric, answers.base.values.get(metric.key)) for metric in metrics]
    if rows:
        titles = [_SHORT.get(metric.key, metric.title) for metric in metrics]
        yield Table(("varied", "from .. to", *titles), [["as given", "", *base], *rows], _ENDS, left=2)


def _ends_of(each: Sensitivity, is_strongest: bool) -> Line:
    metric = study_metric(each.metric)
    text = " .. ".join(MISSING if end is None else format_metric(metric, end) for end in (each.low, each.high))
    return Span(f"* {text}", "strong") if is_strongest else text

"""Answers on one screen of 100 x 40: the answer, the reason, how sure, what next. `--details` has all of them."""

__all__ = ["bench_brief", "run_brief", "step_brief", "whatif_brief"]

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perfmodel.planning.metrics import LATENCIES, metric_of, study_metric
from perfmodel.planning.sensitivity.result import WhatIfResult
from perfmodel.planning.sensitivity.whatif import Sensitivity, WhatIfAnswers
from perfmodel.planning.sweeps.step_report import StepReport
from perfmodel.report.document import Block, Document, Line, Notes, Paragraph, Sentences, Span, Table
from perfmodel.report.numbers import MISSING, format_in, format_metric, format_number
from perfmodel.report.views.bench import what_is_assumed
from perfmodel.report.views.run import latency_table, overload, shares
from perfmodel.report.views.scenario import describe_traffic, headline
from perfmodel.report.views.step import estimate_blocks
from perfmodel.report.views.trust import trust_blocks
from perfmodel.report.views.whatif.sentences import path_label, whatif_sentences, x_label
from perfmodel.report.views.whatif.view import has_own_table, values_tables, whatif_notes
from perfmodel.sim.records.result import RunResult
from perfmodel.trust import trust_of
from perfmodel.validate.report import ValidationReport

_STATISTICS = ("mean", "median", "p90", "p99")
_LINES = {  # of a run: what stands on one line -> metrics and what they read as
    "Throughput": {
        "output_throughput": "{} output tok/s",
        "output_throughput_per_gpu": "{} a device",
        "request_throughput": "{} req/s",
        "request_goodput": "{} within the SLO",
    },
    "Efficiency": {
        "mfu": "MFU {} %",
        "mbu": "MBU {} %",
        "kv_cache_usage_peak": "KV cache at most {} % full",
        "prefix_cache_hit_rate": "prefix cache hits {} %",
        "preemptions": "{} preemptions",
    },
    "Speculation": {"acceptance_rate": "{} % of drafts accepted", "mean_acceptance_length": "{} tokens a step"},
    "Offline job": {"tail_s": "tail of {} s", "tail_share": "{} % of the run"},
    "Cost": {
        "usd_per_million_output_tokens": "{} USD per million output tokens",
        "usd_per_million_tokens": "{} per million of all",
        "usd_total": "{} in all",
    },
    "Energy": {"mean_power_w": "{} W a device", "joules_per_output_token": "{} J per output token"},
}
_SHORT = {"output_throughput": "output tok/s", "request_goodput": "goodput req/s", "request_throughput": "req/s"}
_MOST_NOTES, _NOTE_WIDTH = 3, 190
_MOST_AXES, _MOST_METRICS, _MOST_SENTENCES = 8, 4, 6
_MOST_RUNS = 8
_MOST_TABLES, _MOST_VALUES = 2, 9  # of what-ifs along an axis
_MOST_OPERATORS = 20
_MORE = "Everything else: --details, --json"


def run_brief(result: RunResult) -> Document:
    """A run in some thirty lines; `run_view` has all of it."""
    scenario, summary = result.scenario, result.summary
    blocks: list[Block] = [
        *overload(summary),
        Paragraph(Span(_served(summary), "strong")),
        latency_table(result, _STATISTICS),
        Sentences([line for name, texts in _LINES.items() if (line := _figures(name, texts, summary))]),
        *shares(summary),
        *list(trust_blocks(result.trust))[:1],
        *_few(result.notes),
        Paragraph(
            f"Next: `perfmodel explain` says what a step takes, `plan` how many GPUs serve it. {_MORE}, --out DIR."
        ),
    ]
    title = f"{scenario.name}: {headline(scenario)}, {result.clock}"
    return Document(title, blocks, f"{describe_traffic(scenario.traffic)}, seed {scenario.seed}", result.clock)


def _served(summary: Mapping[str, Any]) -> str:
    """`1,000 requests in 248 s, 97.7 % of them within the SLO, 2 failed`"""
    text = f"{summary.get('completed', 0):,} requests answered in {format_number(summary.get('duration'))} s"
    if (attained := summary.get("slo_attainment")) is not None:
        text += f", {attained:.1%} of all within the SLO"
    lost = [
        f"{summary[key]:,} {key.replace('_', ' ')}" for key in ("failed", "timed_out", "rejected") if summary.get(key)
    ]
    return ", ".join([text, *lost]) + "."


def _figures(name: str, texts: Mapping[str, str], summary: Mapping[str, Any]) -> str:
    """The figures of a line; nothing without any."""
    shown = {key: text for key, text in texts.items() if summary.get(key) is not None}
    parts = [text.format(format_in(summary, metric_of(key))) for key, text in shown.items()]
    return f"{name}: {', '.join(parts)}." if parts else ""


def _few(notes: Sequence[str]) -> Iterator[Block]:
    """The first notes, long ones up to their first lines, and how many there are beside."""
    shown = [note if len(note) <= _NOTE_WIDTH else f"{note[:_NOTE_WIDTH].rsplit(' ', 1)[0]} ..." for note in notes]
    if len(notes) > _MOST_NOTES:
        shown = [*shown[:_MOST_NOTES], f"{len(notes) - _MOST_NOTES} more with --details."]
    if shown:
        yield Notes(shown)


def step_brief(report: StepReport) -> Document:
    """A step whose shortest operators are one row together."""
    estimate = report.estimate
    blocks: list[Block] = [
        *estimate_blocks(estimate, _MOST_OPERATORS),
        *list(trust_blocks(trust_of(report.scenario)))[:1],
        *_few(report.notes),
        Paragraph(f"Next: `whatif` says what would make it faster. {_MORE}."),
    ]
    return Document(headline(report.scenario), blocks, f"{report.label}, per device", f"{estimate.origin} times")


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
        *list(trust_blocks(trust_of(answers.scenario)))[:1],
        *_few(whatif_notes(result)),
        Paragraph(f"{_MORE}, --report FILE.{left}"),
    ]
    return Document(f"What if: {answers.scenario.name}", blocks, headline(answers.scenario), "what if")


def _ends(answers: WhatIfAnswers) -> Iterator[Table]:
    """A row for each axis of numbers, a column for each metric: `126 .. 666` from one end to the other."""
    names = answers.question.base.metrics[:_MOST_METRICS]
    effects = {name: [each for each in answers.of_metric(name) if each.axis.xs] for name in names}
    most = {name: max(found, key=_strength, default=None) for name, found in effects.items()}
    axes = [axis for axis in answers.question.axes if not has_own_table(answers, axis)][:_MOST_AXES]
    rows: list[list[Line]] = []
    for axis in axes:
        low, high = (x_label(x, axis.unit) for x in (axis.xs[0], axis.xs[-1]))
        row: list[Line] = [path_label(axis.path), f"{low} .. {high}"]
        for name, found in effects.items():
            own = next((each for each in found if each.axis is axis), None)
            row.append("" if own is None else _ends_of(own, is_strongest=own is most[name]))
        rows.append(row)
    metrics = [study_metric(name) for name in names]
    base = [
        f"{_SHORT.get(each.key, each.title)}: {format_metric(each, answers.base.values.get(each.key))}"
        for each in metrics
    ]
    if rows:
        yield Table(("varied (* counts most)", "from .. to", *base), rows, left=2)


def _strength(each: Sensitivity) -> float:
    return abs(each.elasticity or 0.0)


def _ends_of(each: Sensitivity, is_strongest: bool) -> Line:
    metric = study_metric(each.metric)
    text = " .. ".join(MISSING if end is None else format_metric(metric, end) for end in (each.low, each.high))
    return Span(f"* {text}", "strong") if is_strongest else text


def bench_brief(report: ValidationReport) -> Document:
    """Own load tests: measured and predicted means of each, the errors of all, what was assumed."""
    rows = [_of_run(run) for run in report.runs[:_MOST_RUNS]]
    head = ("run", *(f"{LATENCIES[name][0]} ms" for name in ("ttft", "tpot", "e2el")), "output tok/s")
    errors = [
        f"{metric_of(name).label} {stats.median_ape:.0%}"
        for name, stats in report.metrics.items()
        if stats.median_ape is not None
    ]
    blocks: list[Block] = [
        Table(head, rows, "Measured -> predicted"),
        Paragraph(f"Median error over {report.covered:,} of {report.rows:,} rows: {', '.join(errors)}."),
        Sentences(list(_causes(report.runs))),
        Paragraph(what_is_assumed(report.runs)),
        *_few(report.notes),
        Paragraph(f"{_MORE}, --report FILE. `perfmodel calibrate --bench` fits the engine's host to such runs."),
    ]
    setups = dict.fromkeys(f"{run['model']} on {run['hardware']}" for run in report.runs)
    return Document("Predicted beside measured: bench", blocks, ", ".join(setups), "validation")


def _of_run(run: Mapping[str, Any]) -> list[Line]:
    """`41.4 -> 35.8 (-14 %)` by metric."""
    figures = {each["metric"]: each for each in run["figures"]}
    cells: list[Line] = [run["run"]]
    for key in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput"):
        found = figures.get(key)
        if found is None:
            cells.append(MISSING)
            continue
        text = f"{found['measured']:.3g} -> {found['predicted']:.3g} ({found['error']:+.0%})"
        cells.append(Span(text, "" if found.get("is_within", True) else "warn"))
    return cells


def _causes(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where the time of the run that is predicted worst goes."""
    worst = max(runs, key=lambda run: max((abs(each["error"]) for each in run["figures"]), default=0.0), default=None)
    for key, breakdown in (worst or {"breakdown": {}})["breakdown"].items():
        yield f"{metric_of(key).label} of {worst['run'] if worst else ''}: {breakdown['why']}."

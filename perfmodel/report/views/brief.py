"""Answers on one screen of 100 x 40: the answer, the reason, how sure, what next. `--details` has all of them."""

__all__ = ["MORE", "few_notes", "run_brief", "step_brief"]

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfmodel.planning.metrics import metric_of
from perfmodel.planning.sweeps.typical_step import StepReport
from perfmodel.report.document import Block, Document, Notes, Paragraph, Sentences, Span
from perfmodel.report.numbers import format_in, format_number
from perfmodel.report.views.run import latency_table, overload, shares, slo_verdict
from perfmodel.report.views.scenario import describe_traffic, headline, trust_line
from perfmodel.report.views.step import estimate_blocks
from perfmodel.sim.records.result import RunResult
from perfmodel.trust import trust_of

_STATISTICS = ("mean", "median", "p90", "p99")
_LINES = {  # of a run: what stands on one line -> metrics and what they read as
    "Throughput": {
        "output_throughput": "{} output tok/s",
        "output_throughput_per_gpu": "{} a device",
        "request_throughput": "{} req/s",
        "request_goodput": "{} within the SLO",
    },
    "Efficiency": {
        "mean_batch": "mean batch {}",
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
_MOST_NOTES, _NOTE_WIDTH = 3, 190
_MOST_OPERATORS = 20
MORE = "Everything else: --details, --json"


def run_brief(result: RunResult) -> Document:
    """A run in some thirty lines; `run_view` has all of it."""
    scenario, summary = result.scenario, result.summary
    blocks: list[Block] = [
        *overload(summary),
        Paragraph(Span(_served(result), "strong")),
        *slo_verdict(result),
        latency_table(result, _STATISTICS),
        Sentences([line for name, texts in _LINES.items() if (line := _figures(name, texts, summary))]),
        *shares(summary),
        *trust_line(result.trust),
        *few_notes(result.notes),
        Paragraph(
            f"Next: `perfmodel explain` says what a step takes, `plan` how many GPUs serve it. {MORE}, --out DIR."
        ),
    ]
    title = f"{scenario.name}: {headline(scenario)}, {result.clock}"
    return Document(title, blocks, f"{describe_traffic(scenario.traffic)}, seed {scenario.seed}", result.clock)


def _served(result: RunResult) -> str:
    """`1,000 requests answered in 248 s, 2 failed`; where classes alone have limits, the share within them, too."""
    summary = result.summary
    text = f"{summary.get('completed', 0):,} requests answered in {format_number(summary.get('duration'))} s"
    if result.slo is None and (attained := summary.get("slo_attainment")) is not None:
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


def few_notes(notes: Sequence[str]) -> Iterator[Block]:
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
        *trust_line(trust_of(report.scenario)),
        *few_notes(report.notes),
        Paragraph(f"Next: `whatif` says what would make it faster. {MORE}."),
    ]
    return Document(headline(report.scenario), blocks, f"{report.label}, per device", f"{estimate.origin} times")

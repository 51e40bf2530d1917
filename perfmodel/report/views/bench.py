"""Runs of load tools as blocks: predicted beside measured, where the time goes, and what the answer rests on."""

__all__ = ["bench_blocks", "bench_brief", "own_server_view"]

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfmodel.evidence.fit.own_server import OwnServerFit
from perfmodel.evidence.report import ValidationReport
from perfmodel.planning.metrics import LATENCIES, metric_of
from perfmodel.report.document import Block, Document, Item, Line, Notes, Paragraph, Sentences, Span, Table
from perfmodel.report.numbers import MISSING
from perfmodel.report.views.brief import MORE, few_notes

_HEAD = ("figure", "predicted", "measured", "error", "80 % interval", "")
_LEAST_SHARE = 0.005
_MOST_RUNS = 8  # in brief


def bench_blocks(runs: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    """The blocks of `ValidationReport.runs`; nothing without any."""
    for run in runs:
        by_request = "Its requests are compared one by one as well." if run["is_by_request"] else ""
        yield Table(_HEAD, [_row(each) for each in run["figures"]], _title(run), note=by_request)
        yield from _parts(run)
    yield from _facts(runs)


def _title(run: Mapping[str, Any]) -> str:
    failed = f", {run['failed']:,} failed" if run["failed"] else ""
    return f"{run['run']} ({run['tool']}): {run['model']} on {run['hardware']}, {run['completed']:,} requests{failed}"


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    metric = metric_of(row["metric"])
    low, high = row.get("interval", (None, None))
    ends = "" if low is None else f"{low:.4g} to {high:.4g}"
    verdict = "" if low is None else "in it" if row["is_within"] else "outside"
    values = (f"{row['predicted']:.4g}", f"{row['measured']:.4g}", f"{row['error']:+.1%}")
    return metric.title, *values, ends, verdict


def _parts(run: Mapping[str, Any]) -> Iterator[Sentences]:
    items = []
    for key, breakdown in run["breakdown"].items():
        shares = [f"{name} {share:.0%}" for name, share in breakdown["parts"].items() if share >= _LEAST_SHARE]
        where = breakdown.get("step") or breakdown.get("prefill_steps")
        told = f": {', '.join(shares)} ({where}). {breakdown['why'][0].upper()}{breakdown['why'][1:]}."
        items.append(Item((Span(metric_of(key).label, "strong"), told)))
    if items:
        yield Sentences(items, "Where the time goes")


def _facts(runs: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Each fact once, with the runs that it is of where they differ; what nobody said first."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        for fact in run["facts"]:
            found.setdefault((fact["fact"], fact["value"], fact["said_by"]), []).append(run["run"])
    rows = [
        (name, value, said_by, "all" if len(of) == len(runs) else "; ".join(of))
        for (name, value, said_by), of in sorted(found.items(), key=lambda each: each[0][2] != "assumed")
    ]
    if rows:
        head = ("fact", "simulated as", "said by", "of")
        yield Table(head, rows, "What the answer rests on", left=4, note=_what_is_assumed(runs))


def _what_is_assumed(runs: Sequence[Mapping[str, Any]]) -> str:
    """How many facts no file says."""
    facts = {(fact["fact"], fact["value"], fact["said_by"]) for run in runs for fact in run["facts"]}
    assumed = sum(said_by == "assumed" for *_, said_by in facts)
    return (
        f"{assumed} facts of {len(facts)} are assumed, because no file says them: give them in a scenario "
        f"(--scenario), or with --set."
    )


def own_server_view(fit: OwnServerFit) -> Document:
    """What the fit to one's own server has moved, and how far its predictions are off before and after."""
    said = ("shipped", "fitted", "held out")
    errors = [
        (metric_of(metric).label, *(f"{found[each]:.1%}" if each in found else "" for each in said))
        for metric, found in fit.errors.items()
    ]
    moved = [
        (name, f"{old * 1e6:,.1f} µs", f"{new * 1e6:,.1f} µs", f"{new / old:.2f}x")
        for name, (old, new) in fit.moved.items()
    ]
    note = (
        "Medians of |predicted / measured - 1| over the runs: under the shipped profile, under the fitted one, and of "
        "each run under what the others say."
    )
    blocks: list[Block] = [
        Table(("figure", *said), errors, "How far predictions are off", note=note),
        Table(("number", "shipped", "fitted", "moved"), moved, "What moved"),
        Notes(fit.notes),
    ]
    title = f"{fit.profile.name}: {fit.profile.engine} as {len(fit.runs)} load test{'s' * (len(fit.runs) > 1)} have it"
    return Document(title, blocks, fit.profile.source)


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
        Table(head, rows, "Measured -> predicted, error"),
        Paragraph(f"Median error over {report.covered:,} of {report.rows:,} rows: {', '.join(errors)}."),
        Sentences(list(_causes(report.runs))),
        Paragraph(_what_is_assumed(report.runs)),
        *few_notes(report.notes),
        Paragraph(f"{MORE}, --report FILE. `perfmodel calibrate --bench` fits the engine's host to such runs."),
    ]
    setups = dict.fromkeys(f"{run['model']} on {run['hardware']}" for run in report.runs)
    return Document("Predicted beside measured: bench", blocks, ", ".join(setups), "validation")


def _of_run(run: Mapping[str, Any]) -> list[Line]:
    """`41.4 -> 35.8 -14%` by metric."""
    figures = {row["metric"]: row for row in run["figures"]}
    cells: list[Line] = [run["run"]]
    for key in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput"):
        row = figures.get(key)
        if row is None:
            cells.append(MISSING)
            continue
        text = f"{row['measured']:.3g} -> {row['predicted']:.3g} {row['error']:+.0%}"
        cells.append(Span(text, "" if row.get("is_within", True) else "warn"))
    return cells


def _causes(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where the time of the run that is predicted worst goes."""
    worst = max(runs, key=lambda run: max((abs(each["error"]) for each in run["figures"]), default=0.0), default=None)
    for key, breakdown in (worst or {"breakdown": {}})["breakdown"].items():
        yield f"{metric_of(key).label} of {worst['run'] if worst else ''}: {breakdown['why']}."

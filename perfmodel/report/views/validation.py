"""Predicted vs measured as a document: errors of all rows and by what they have in common, plots; runs of load tools; a
calibration; replayed plans."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import exp
from typing import Any

from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.evidence.fit.server_fit import UserServerFit
from perfmodel.evidence.fit.suggested import Suggestion
from perfmodel.evidence.kinds.plans import PlansReport
from perfmodel.evidence.observation import grouped
from perfmodel.evidence.report import NOT_APPLICABLE, Comparison, ErrorStats, ValidationReport
from perfmodel.planning.metrics import LATENCIES, metric_of
from perfmodel.report import document as doc
from perfmodel.report.document import Block, Commands, Document, Line, Notes, Paragraph, Plot, Sentences, Span, Table
from perfmodel.report.drawing.charts import Series, ecdf_figure, scatter_figure
from perfmodel.report.numbers import MISSING
from perfmodel.report.views.scenario import MORE, few_notes

_MIN_SHARE = 0.005
_MAX_RUNS = 8  # in brief
_MAX_OPERATORS, _MAX_GROUPS, _MAX_OTHERS, _MAX_PLOTS = 5, 30, 100, 3
_MAX_PLANS, _MAX_PLAN_LETTERS = 3, 90
# By metric: what stands for it in tables by group, where all metrics would be too many.
_HEADLINES = (
    *("latency", "e2el_mean", "itl_mean", "tpot_mean", "ttft_mean", "ttft", "tpot", "e2el", "step"),
    *("kernels", "steps", "systems", "system ratios", "memory"),  # of published figures
    *("speedup", "throughput", "static_throughput", "decode_tokens_per_s", "prompt_tokens_per_s"),
)
_HEAD = ("rows", "median", "trivial", "mean", "p90", "bias", "in interval")
_ERRORS = (
    "Errors are |predicted / measured - 1| of single rows; trivial is the median error of the simplest predictor: the "
    "benchmark's limit, the declared peaks of a kernel, else the median of the device's other rows; bias is "
    "mean(predicted) / mean(measured) - 1; in interval is the share of rows whose measured value lies in the "
    "prediction's 80 % interval, width the median of its high over its low end, and the last column how wide the "
    "simplest predictor's has to be."
)
_SPEEDUPS = (
    "Speedups say how many times better the metric is than the baseline's; quotient is simulated / executed, the "
    "median over the runs, each with a seed of its own. Bias: how much longer executed steps were predicted to take "
    "than they took. Verdict: right where more than 5 % is executed on the simulated side, the 95 % interval of the "
    "paired runs excludes 1, and the simulated speedup lies in it or within 10 % of the executed one; proves nothing "
    "where no such effect is executed."
)


def validation_view(report: ValidationReport, command: str = "") -> Document:
    """Errors over all rows, single figures, plots, groups, the largest errors with their parts, notes."""
    share = f" ({report.covered / report.rows:.1%})" if report.rows else ""
    basis = list(dict.fromkeys((fit.name, fit.date, fit.source) for fit in report.provenance.fitted))
    rows = [
        (metric_of(name).label, *_cells(stats), _ratio(stats.interval_width), _ratio(stats.trivial_width))
        for name, stats in report.metrics.items()
    ]
    about: list[Block] = [Paragraph(report.about)] if report.about else []
    blocks: list[Block] = [
        doc.Details([*about, Table(("calibration", "date", "source"), basis, "Predicted with", left=3)]),
        Table(("metric", *_HEAD, "width", "trivial"), rows, "All rows", note=_ERRORS),
        *_load_tests(report.runs),
        _published(report.figures),
        _techniques(report.techniques),
        *_plots(report),
        *_dimensions(report.comparisons),
        _other_groups(report),
        *_worst(report.worst),
        Notes(report.notes),
    ]
    subtitle = f"{report.covered:,} of {report.rows:,} rows predicted{share}"
    return Document(f"Predicted vs measured: {report.kind}", blocks, subtitle, "validation", command)


def _cells(stats: ErrorStats) -> tuple[str, ...]:
    inside = "" if stats.interval_coverage is None else f"{stats.interval_coverage:.0%}"
    values = (stats.median_ape, stats.trivial_ape, stats.mean_ape, stats.p90_ape)
    errors = ("" if value is None else f"{value:.1%}" for value in values)
    return (f"{stats.rows:,}", *errors, f"{stats.bias:+.1%}", inside)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _dimensions(comparisons: Sequence[Comparison]) -> Iterator[Table]:
    """A table for each dimension that has more than one group: a line per group and headline metric that has it; of
    very many groups those that are predicted worst."""
    headlines = _headlines(comparisons)
    for dimension in dict.fromkeys(name for comparison in headlines for name in comparison.dimensions):
        shown = [comparison for comparison in headlines if dimension in comparison.dimensions]
        stats = {(name, of.metric): rows.stats() for of in shown for name, rows in of.groups(dimension)}
        groups = [name for name in dict.fromkeys(name for name, _ in stats) if name != NOT_APPLICABLE]
        if len(groups) < 2:
            continue
        chosen, note, metric = groups, "", shown[0].metric
        if len(groups) > _MAX_GROUPS:
            judged = [name for name in groups if (name, metric) in stats]
            chosen = sorted(judged, key=lambda name: -stats[name, metric].mean_ape)[:_MAX_GROUPS]
            note = f"The {len(chosen)} of {len(groups)} groups with the largest mean error."
        several = len(shown) > 1
        rows = [
            (name, *([metric_of(of.metric).label] * several), *_cells(stats[name, of.metric]))
            for name in _in_order(chosen, shown[0].dimensions[dimension].names)
            for of in shown
            if (name, of.metric) in stats
        ]
        head = (dimension, *(["metric"] * several), *_HEAD)
        yield Table(head, rows, f"By {dimension}", left=1 + several, note=note)


def _headlines(comparisons: Sequence[Comparison]) -> list[Comparison]:
    shown = [comparison for comparison in comparisons if comparison.metric in _HEADLINES and len(comparison.rows)]
    return sorted(shown, key=lambda comparison: _HEADLINES.index(comparison.metric))


def _in_order(groups: list[str], names: Sequence[str]) -> list[str]:
    """By number where all groups begin with one, else the dimension's own order of `names`."""
    begins = {name: name.split()[0].replace(",", "") for name in groups}
    if all(begin.isdecimal() for begin in begins.values()):
        return sorted(groups, key=lambda name: (float(begins[name]), name))
    order = {name: i for i, name in enumerate(names)}
    return sorted(groups, key=lambda name: order.get(name, len(order)))


def _other_groups(report: ValidationReport) -> Table:
    """Groups that are of no dimension: those of runs without comparisons, those that the reader of the rows names; of
    very many those that are predicted worst."""
    dimensions = tuple(f"{name} " for comparison in report.comparisons for name in comparison.dimensions)
    named = {group: metrics for group, metrics in report.by.items() if not group.startswith(dimensions)}
    chosen, note = list(named), ""
    if len(chosen) > _MAX_OTHERS:
        worst_first = sorted(named, key=lambda group: -max(stats.mean_ape for stats in named[group].values()))
        chosen = worst_first[:_MAX_GROUPS]
        note = f"The {_MAX_GROUPS} of {len(named)} groups with the largest mean error."
    rows = [(group, metric_of(name).label, *_cells(of)) for group in chosen for name, of in named[group].items()]
    return Table(("group", "metric", *_HEAD), rows, "By group", left=2, note=note)


def _published(figures: Sequence[Mapping[str, Any]]) -> Table:
    head = ("figure", "technique", "metric", "published", "predicted", "ratio", "source", "made of")
    rows = [
        (
            *(str(row["id"]), str(row["technique"]), metric_of(row["metric"]).label),
            *(f"{row['published']:.4g} {row['unit']}", f"{row['predicted']:.4g}", f"{row['ratio']:.2f}"),
            *(str(row["source"]), str(row["reason"])),
        )
        for row in figures
    ]
    return Table(head, rows, "Figures", left=3, num_wide=2)


def _techniques(techniques: Sequence[Mapping[str, Any]]) -> Table:
    speedups, biases = ("simulated", "executed", "quotient"), ("step_bias", "baseline_step_bias")
    bias_heads = ("bias of steps", "of the baseline's")
    head = ("technique", "metric", "verdict", *speedups, "95 % interval", *bias_heads, "quotient of each run", "date")
    rows = [
        (
            *(str(row["technique"]), metric_of(row["metric"]).label, str(row["verdict"])),
            *(f"{row[name]:.3f}" for name in speedups),
            " to ".join(f"{end:.2f}" for end in row["executed_interval"]),
            *(f"{row[name]:+.1%}" for name in biases),
            *(", ".join(f"{quotient:.3f}" for quotient in row["quotients"]), str(row["date"])),
        )
        for row in techniques
    ]
    return Table(head, rows, "Techniques", left=3, note=_SPEEDUPS, num_wide=1)


def _worst(worst: Sequence[Mapping[str, Any]]) -> Iterator[Sentences]:
    """The rows with the largest errors, each with the parts of its prediction and what they would have to be."""
    items = []
    for row in worst:
        values = f"{row['predicted']:.4g} predicted, {row['measured']:.4g} measured"
        head = Span(f"{metric_of(row['metric']).label} {row['error']:+.1%}", "strong")
        items.append(doc.Item((head, f" ({values}): {row['row']}"), list(_parts(row.get("breakdown", {})))))
    if items:
        yield Sentences(items, "The largest errors")


def _parts(breakdown: Mapping[str, Any]) -> Iterator[str]:
    if breakdown.get("why"):
        yield f"{breakdown['why']}."
    if breakdown.get("sizes"):
        yield ", ".join(f"{name} {value:,.6g}" for name, value in breakdown["sizes"].items())
    if shares := _shares(breakdown):
        where = breakdown.get("step") or breakdown.get("prefill_steps")
        yield shares + (f" ({where})" if where else "")
    resources = [f"{key[:-2]} {breakdown[key] * 1e6:,.1f} µs" for key in breakdown if key.endswith("_s")]
    if resources:
        yield f"each resource alone: {', '.join(resources)}; bound by {breakdown['bound']}"
    if operators := breakdown.get("operators", ())[:_MAX_OPERATORS]:
        largest = ", ".join(f"{row['name']} {row['ms']:.2f} ms ({row['bound']})" for row in operators)
        yield f"of {breakdown['step_ms']:.2f} ms a step: {largest}"


def _shares(breakdown: Mapping[str, Any]) -> str:
    parts = breakdown.get("parts", {}).items()
    return ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= _MIN_SHARE)


def _plots(report: ValidationReport) -> Iterator[Plot]:
    """A scatter plot for each of the first headline metrics by device, and one of how errors are distributed."""
    shown = _headlines(report.comparisons)
    for comparison in shown[:_MAX_PLOTS]:
        title = f"{report.kind}: {metric_of(comparison.metric).label}, predicted over measured"
        draw = partial(scatter_figure, _series(comparison), comparison.unit)
        yield Plot(title, draw, name=f"scatter-{comparison.metric}")
    if shown:
        by = [(metric_of(of.metric).label, of.rows) for of in shown] if shown[1:] else _series(shown[0])
        yield Plot(f"{report.kind}: distribution of absolute errors", partial(ecdf_figure, by), name="errors")


def _series(comparison: Comparison) -> list[Series]:
    """The rows by the first dimension that has several groups."""
    for dimension in ("kernel", "device", *comparison.dimensions):
        if dimension in comparison.dimensions and len(dict(comparison.groups(dimension))) > 1:
            return list(comparison.groups(dimension))
    return [(metric_of(comparison.metric).label, comparison.rows)]


def _load_tests(runs: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    """The figures of each run, where its time goes, and what is simulated of it; nothing without any run."""
    for run in runs:
        rows = []
        for row in run["figures"]:
            low, high = row.get("interval", (None, None))
            ends = "" if low is None else f"{low:.4g} to {high:.4g}"
            verdict = "" if low is None else "in it" if row["is_within"] else "outside"
            values = (f"{row['predicted']:.4g}", f"{row['measured']:.4g}", f"{row['error']:+.1%}")
            rows.append((metric_of(row["metric"]).title, *values, ends, verdict))
        failed = f", {run['failed']:,} failed" if run["failed"] else ""
        setup = f"{run['model']} on {run['hardware']}, {run['completed']:,} requests{failed}"
        head = ("figure", "predicted", "measured", "error", "80 % interval", "")
        by_request = "Its requests are compared one by one as well." if run["is_by_request"] else ""
        yield Table(head, rows, f"{run['run']} ({run['tool']}): {setup}", note=by_request)
        items = []
        for key, breakdown in run["breakdown"].items():
            where, why = breakdown.get("step") or breakdown.get("prefill_steps"), breakdown["why"]
            text = f": {_shares(breakdown)} ({where}). {why[0].upper()}{why[1:]}."
            items.append(doc.Item((Span(metric_of(key).label, "strong"), text)))
        if items:
            yield Sentences(items, "Where the time goes")
    facts = _facts(runs)
    if facts:
        of_facts = [
            (*fact, "all" if len(of) == len(runs) else "; ".join(of))
            for fact, of in sorted(facts.items(), key=lambda item: item[0][2] != "assumed")
        ]
        columns = ("fact", "simulated as", "said by", "of")
        yield Table(columns, of_facts, "What the answer rests on", left=4, note=_what_is_assumed(runs))


def _facts(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], list[str]]:
    """(fact, value, who says it) -> the runs that it is of."""
    facts = ((fact, run["run"]) for run in runs for fact in run["facts"])
    return grouped(((fact["fact"], fact["value"], fact["said_by"]), run) for fact, run in facts)


def _what_is_assumed(runs: Sequence[Mapping[str, Any]]) -> str:
    facts = _facts(runs)
    return (
        f"{sum(said_by == 'assumed' for *_, said_by in facts)} facts of {len(facts)} are assumed, because no file says "
        f"them: give them in a scenario (--scenario), or with --set."
    )


def bench_brief(report: ValidationReport) -> Document:
    """Own load tests: measured and predicted means of each, the errors of all, what was assumed."""
    head = ("run", *(f"{LATENCIES[name][0]} ms" for name in ("ttft", "tpot", "e2el")), "output tok/s")
    rows: list[list[Line]] = []
    for run in report.runs[:_MAX_RUNS]:  # `41.4 -> 35.8 -14%` by metric
        figures = {row["metric"]: row for row in run["figures"]}
        rows.append([run["run"]])
        for key in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput"):
            if (row := figures.get(key)) is None:
                rows[-1].append(MISSING)
            else:
                text = f"{row['measured']:.3g} -> {row['predicted']:.3g} {row['error']:+.0%}"
                rows[-1].append(Span(text, "" if row.get("is_within", True) else "warn"))
    errors = [
        f"{metric_of(name).label} {stats.median_ape:.0%}"
        for name, stats in report.metrics.items()
        if stats.median_ape is not None
    ]
    worst_first = sorted(report.runs, key=lambda run: -max((abs(row["error"]) for row in run["figures"]), default=0.0))
    causes = [
        f"{metric_of(key).label} of {run['run']}: {breakdown['why']}."
        for run in worst_first[:1]
        for key, breakdown in run["breakdown"].items()
    ]
    blocks: list[Block] = [
        Table(head, rows, "Measured -> predicted, error"),
        Paragraph(f"Median error over {report.covered:,} of {report.rows:,} rows: {', '.join(errors)}."),
        Sentences(causes),
        Paragraph(_what_is_assumed(report.runs)),
        *few_notes(report.notes),
        Paragraph(f"{MORE}, --report FILE. `perfmodel calibrate --name NAME` fits the engine's host to such runs."),
    ]
    setups = dict.fromkeys(f"{run['model']} on {run['hardware']}" for run in report.runs)
    return Document("Predicted vs measured: bench", blocks, ", ".join(setups), "validation")


def server_fit_view(fit: UserServerFit) -> Document:
    """What the fit to one's own server has moved, and how far its predictions are off before and after."""
    under = ("shipped", "fitted", "held out")
    errors = [
        (metric_of(metric).label, *(f"{medians[name]:.1%}" if name in medians else "" for name in under))
        for metric, medians in fit.errors.items()
    ]
    moved = [
        (
            name,
            *(f"{value * 1e6:,.1f} µs" if name.endswith("_s") else f"{value:.3f}" for value in pair),
            f"{ratio:.2f}x",
        )
        for name, pair in fit.moved.items()
        for ratio in (pair[1] / pair[0],)
    ]
    note = (
        "Medians of |predicted / measured - 1| over the runs: under the shipped profile, under the fitted one, and of "
        "each run under what the others say."
    )
    blocks: list[Block] = [
        Table(("figure", *under), errors, "How far predictions are off", note=note),
        Table(("number", "shipped", "fitted", "moved"), moved, "What moved"),
        *_certainty(fit),
        Notes(fit.notes),
    ]
    title = f"{fit.profile.name}: {fit.profile.engine} as {len(fit.runs)} load test{'s' * (len(fit.runs) > 1)} have it"
    return Document(title, blocks, fit.profile.source)


def _certainty(fit: UserServerFit) -> Iterator[Block]:
    if fit.certainty:
        rows = [
            (metric_of(f"mean_{figure}_ms").label, f"+- {before:.0%}", f"+- {after:.0%}")
            for figure, (before, after) in fit.certainty.items()
        ]
        note = "Half of the 80 % interval of each mean, at the traffic of the scenario itself."
        yield Table(("figure", "before", "now"), rows, "How sure the scenario's own traffic is", note=note)


def suggestion_view(suggestion: Suggestion) -> Document:
    """The load tests to run, what each leaves of the intervals, and the commands."""
    labels = {figure: metric_of(f"mean_{figure}_ms").label for figure in suggestion.now}

    def widths(values: Mapping[str, float]) -> tuple[str, ...]:
        return tuple(f"+- {values[figure]:.0%}" for figure in labels)

    rows = [("as it is", "", *widths(suggestion.now))]
    rows += [
        (f"{number}. {run.what}", f"{run.minutes:.1f}", *widths(run.widths))
        for number, run in enumerate(suggestion.runs, 1)
    ]
    note = (
        "Half of the 80 % interval of each mean at the scenario's own traffic, expected once the runs so far are in; "
        "a single run leaves it, since nothing is left to check it with."
    )
    commands = [run.command for run in suggestion.runs] + [suggestion.then]
    blocks: list[Block] = [
        Table(("run", "minutes", *labels.values()), rows, "What each run leaves", note=note, left=1),
        Commands("Against the server, then here", commands),
    ]
    return Document(f"{suggestion.scenario}: what to measure next", blocks, "Chosen from nine loads; simulated")


def calibration_view(calibration: Calibration) -> Document:
    """Fractions of the declared peak, times per kernel or item; zeros left out."""
    fits = {**calibration.families, "all others": calibration.default}
    rows = [(family, ", ".join(_parameters(fit.model_dump(exclude={"residuals"})))) for family, fit in fits.items()]
    blocks: list[Block] = [Table(("operators", "fitted"), rows, left=2)]
    spread = calibration.step_residuals
    if spread.num_rows:
        low, high = exp(spread.p10) - 1, exp(spread.p90) - 1
        blocks.append(
            Paragraph(f"80 % of {spread.num_rows:,} steps measured within {low:+.1%} and {high:+.1%} of the fit.")
        )
    return Document(f"{calibration.device} running {calibration.engine}", blocks, calibration.source)


def _parameters(parameters: dict[str, Any]) -> Iterator[str]:
    """`memory 71.0 % of peak`, `overhead 2.31 µs`"""
    for name, value in parameters.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1e-12:
            continue
        if name.endswith("_fraction"):
            yield f"{name.removesuffix('_fraction')} {value:.1%} of peak"
        elif name.endswith("_s"):
            yield f"{name.removesuffix('_s').replace('_', ' ')} {value * 1e6:.2f} µs"
        else:
            yield f"{name.replace('_', ' ')} {value:.3g}"


def plans_view(report: PlansReport, command: str = "") -> Document:
    """Equal cases of all, by engine and feature; the first difference of some cases that differ."""
    rows = [(name, f"{group['equal']:,}", f"{group['rows']:,}") for name, group in report.by.items()]
    blocks: list[Block] = [Table(("cases with", "equal", "cases"), rows)]
    for row in report.worst[:_MAX_PLANS]:
        plans = [f"{name}: {_cut(row[name])}" for name in ("recorded", "ours")]
        blocks.append(Sentences(plans, f"Case {row['case']} ({', '.join(row['features'])}), step {row['step']}"))
    if len(report.worst) > _MAX_PLANS:
        blocks.append(Paragraph("--json lists more of the cases that differ."))
    blocks.append(Notes(report.notes[:_MAX_PLANS]))
    share = f" ({report.equal / report.rows:.1%})" if report.rows else ""
    subtitle = f"{report.equal:,} of {report.rows:,} cases equal from the first plan to the last{share}"
    return Document("Plans: the engine's own scheduler vs ours", blocks, subtitle, "plans", command)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_PLAN_LETTERS else text[: _MAX_PLAN_LETTERS - 4] + " ..."

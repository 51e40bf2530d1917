"""Predicted beside measured as a document: errors of all rows and by what they have in common, plots; a calibration."""

__all__ = ["calibration_view", "validation_view"]

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import exp
from typing import Any

from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.evidence.report import NOT_APPLICABLE, Comparison, ErrorStats, Rows, ValidationReport
from perfmodel.planning.metrics import metric_of
from perfmodel.report.document import (
    Block,
    Details,
    Document,
    Item,
    Notes,
    Paragraph,
    Picture,
    Sentences,
    Span,
    Table,
)
from perfmodel.report.drawing.charts import Series, ecdf_svg, scatter_svg
from perfmodel.report.views.bench import bench_blocks

# By metric: what stands for it in tables by group, where all metrics would be too many.
_HEADLINES = (
    *("latency", "e2el_mean", "itl_mean", "tpot_mean", "ttft_mean", "ttft", "tpot", "e2el", "step"),
    *("kernels", "steps", "systems", "system ratios", "memory"),  # of published figures
    *("speedup", "throughput", "static_throughput", "decode_tokens_per_s", "prompt_tokens_per_s"),
)
_HEAD = ("rows", "median", "mean", "p90", "bias", "in 80 % interval")
_ERRORS = (
    "Errors are |predicted / measured - 1| of single rows; bias is mean(predicted) / mean(measured) - 1; the last "
    "column is the share of rows whose measured value lies in the prediction's 80 % interval."
)
_SPEEDUPS = (
    "Speedups say how many times better the metric is than the baseline's; quotient is simulated / executed, the "
    "median over the runs, each with a seed of its own. Bias: how much longer executed steps were predicted to take "
    "than they took. Verdict: right where both speedups lie on one side of 1 and the quotient within 15 % of it; "
    "proves nothing where less than 5 % is simulated."
)
_MOST_OPERATORS = 5
_MOST_GROUPS = 30
_MOST_PLOTS = 3


def validation_view(report: ValidationReport, command: str = "") -> Document:
    """Errors over all rows, single figures, plots, groups, the largest errors with their parts, notes."""
    share = f" ({report.covered / report.rows:.1%})" if report.rows else ""
    basis = [(each.name, each.date, each.source) for each in report.provenance.fitted]
    rows = [(metric_of(name).label, *_cells(stats)) for name, stats in report.metrics.items()]
    blocks: list[Block] = [
        Details(
            [
                *([Paragraph(report.about)] if report.about else []),
                Table(("calibration", "date", "source"), basis, "Predicted with", left=3),
            ]
        ),
        Table(("metric", *_HEAD), rows, "All rows", note=_ERRORS),
        *bench_blocks(report.runs),
        *_figures(report.figures),
        *_techniques(report.techniques),
        *_pictures(report),
        *_dimensions(report.comparisons),
        *_other_groups(report),
        *_worst(report.worst),
        Notes(report.notes),
    ]
    subtitle = f"{report.covered:,} of {report.rows:,} rows predicted{share}"
    return Document(f"Predicted beside measured: {report.kind}", blocks, subtitle, "validation", command)


def _headlines(comparisons: Sequence[Comparison]) -> list[Comparison]:
    found = [each for each in comparisons if each.metric in _HEADLINES and len(each.rows)]
    return sorted(found, key=lambda each: _HEADLINES.index(each.metric))


def _dimensions(comparisons: Sequence[Comparison]) -> Iterator[Table]:
    """A table for each dimension that has more than one group: a line per group and headline metric that has it."""
    headlines = _headlines(comparisons)
    for dimension in dict.fromkeys(name for each in headlines for name in each.dimensions):
        shown = [each for each in headlines if dimension in each.dimensions]
        stats = {(name, each.metric): rows.stats() for each in shown for name, rows in each.groups(dimension)}
        groups = [name for name in dict.fromkeys(name for name, _ in stats) if name != NOT_APPLICABLE]
        if len(groups) < 2:
            continue
        chosen = _in_order(_chosen(groups, stats, shown[0].metric), shown[0], dimension)
        note = f"The {len(chosen)} of {len(groups)} groups with the largest mean error." * (len(chosen) < len(groups))
        several = len(shown) > 1
        rows = [
            (name, *([metric_of(each.metric).label] * several), *_cells(stats[name, each.metric]))
            for name in chosen
            for each in shown
            if (name, each.metric) in stats
        ]
        head = (dimension, *(["metric"] * several), *_HEAD)
        yield Table(head, rows, f"By {dimension}", left=1 + several, note=note)


def _chosen(groups: list[str], stats: Mapping[tuple[str, str], ErrorStats], metric: str) -> list[str]:
    """All groups, or of very many those that are predicted worst."""
    if len(groups) <= _MOST_GROUPS:
        return groups
    judged = [name for name in groups if (name, metric) in stats]
    return sorted(judged, key=lambda name: -stats[name, metric].mean_ape)[:_MOST_GROUPS]


def _in_order(groups: list[str], comparison: Comparison, dimension: str) -> list[str]:
    """By number where all names begin with one, else the dimension's own order."""
    order = {name: i for i, name in enumerate(comparison.dimensions[dimension].names)}
    begins = {name: name.split()[0].replace(",", "") for name in groups}
    if all(begin.isdecimal() for begin in begins.values()):
        return sorted(groups, key=lambda name: (float(begins[name]), name))
    return sorted(groups, key=lambda name: order.get(name, len(order)))


def _other_groups(report: ValidationReport) -> Iterator[Table]:
    """Groups that are of no dimension: those of runs without comparisons, those that the reader of the rows names."""
    dimensions = {f"{name} " for each in report.comparisons for name in each.dimensions}
    rows = [
        (group, metric_of(name).label, *_cells(stats))
        for group, metrics in report.by.items()
        if not group.startswith(tuple(dimensions))
        for name, stats in metrics.items()
    ]
    yield Table(("group", "metric", *_HEAD), rows, "By group", left=2)


def _figures(figures: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Every published figure by itself."""
    head = ("figure", "technique", "metric", "published", "predicted", "ratio", "source", "made of")
    rows = [
        (
            str(row["id"]),
            str(row["technique"]),
            metric_of(row["metric"]).label,
            f"{row['published']:.4g} {row['unit']}",
            f"{row['predicted']:.4g}",
            f"{row['ratio']:.2f}",
            *(str(row[name]) for name in ("source", "reason")),
        )
        for row in figures
    ]
    yield Table(head, rows, "Figures", left=3, num_wide=2)


def _techniques(techniques: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Every technique by itself."""
    speedups, biases = ("simulated", "executed", "quotient"), ("step_bias", "baseline_step_bias")
    bias_heads = ("bias of steps", "of the baseline's")
    head = ("technique", "metric", "verdict", *speedups, *bias_heads, "quotient of each run", "date")
    rows = [
        (
            str(row["technique"]),
            metric_of(row["metric"]).label,
            str(row["verdict"]),
            *(f"{row[name]:.3f}" for name in speedups),
            *(f"{row[name]:+.1%}" for name in biases),
            ", ".join(f"{quotient:.3f}" for quotient in row["quotients"]),
            str(row["date"]),
        )
        for row in techniques
    ]
    yield Table(head, rows, "Techniques", left=3, note=_SPEEDUPS, num_wide=1)


def _cells(stats: ErrorStats) -> tuple[str, ...]:
    inside = "" if stats.interval_coverage is None else f"{stats.interval_coverage:.0%}"
    errors = (f"{value:.1%}" for value in (stats.median_ape, stats.mean_ape, stats.p90_ape))
    return (f"{stats.rows:,}", *errors, f"{stats.bias:+.1%}", inside)


def _worst(worst: Sequence[Mapping[str, Any]]) -> Iterator[Sentences]:
    """The rows with the largest errors, each with the parts of its prediction and what they would have to be."""
    items = []
    for row in worst:
        values = f"{row['predicted']:.4g} predicted, {row['measured']:.4g} measured"
        head = Span(f"{metric_of(row['metric']).label} {row['error']:+.1%}", "strong")
        items.append(Item((head, f" ({values}): {row['row']}"), list(_parts(row.get("breakdown", {})))))
    if items:
        yield Sentences(items, "The largest errors")


def _parts(breakdown: Mapping[str, Any]) -> Iterator[str]:
    if breakdown.get("why"):
        yield f"{breakdown['why']}."
    if breakdown.get("sizes"):
        yield ", ".join(f"{name} {value:,.6g}" for name, value in breakdown["sizes"].items())
    parts = [f"{name} {share:.0%}" for name, share in breakdown.get("parts", {}).items() if share >= 0.005]
    if parts:
        where = breakdown.get("step") or breakdown.get("prefill_steps")
        yield ", ".join(parts) + (f" ({where})" if where else "")
    resources = [f"{key[:-2]} {breakdown[key] * 1e6:,.1f} µs" for key in breakdown if key.endswith("_s")]
    if resources:
        yield f"each resource alone: {', '.join(resources)}; bound by {breakdown['bound']}"
    operators = breakdown.get("operators", ())[:_MOST_OPERATORS]
    if operators:
        largest = ", ".join(f"{each['name']} {each['ms']:.2f} ms ({each['bound']})" for each in operators)
        yield f"of {breakdown['step_ms']:.2f} ms a step: {largest}"


def _pictures(report: ValidationReport) -> Iterator[Picture]:
    """A scatter plot for each of the first headline metrics by device, and one of how errors are distributed."""
    shown = _headlines(report.comparisons)
    for each in shown[:_MOST_PLOTS]:
        title = f"{report.kind}: {metric_of(each.metric).label}, predicted over measured"
        yield Picture(f"scatter-{each.metric}", partial(scatter_svg, _series(each), each.unit, title))
    if shown:
        by = [_one(metric_of(each.metric).label, each.rows) for each in shown] if len(shown) > 1 else _series(shown[0])
        yield Picture("errors", partial(ecdf_svg, by, f"{report.kind}: distribution of absolute errors"))


def _series(comparison: Comparison) -> list[Series]:
    """The rows by the first dimension that has several groups."""
    for dimension in ("kernel", "device", *comparison.dimensions):
        if dimension in comparison.dimensions and len(dict(comparison.groups(dimension))) > 1:
            return [_one(name, rows) for name, rows in comparison.groups(dimension)]
    return [_one(metric_of(comparison.metric).label, comparison.rows)]


def _one(name: str, rows: Rows) -> Series:
    return Series(name, rows.predicted, rows.measured)


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

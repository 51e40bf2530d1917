"""Tables for a terminal: the summary of a run with vLLM's labels, and runs side by side."""

__all__ = [
    "BOUND_STYLES",
    "bound_line",
    "comparison_table",
    "latency_table",
    "print_summary",
    "rows_table",
    "summary_table",
]

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from perfmodel.report.drawing.fields import (
    GROUPS,
    LATENCIES,
    STATISTICS,
    format_number,
    latencies_of,
    latency,
    prediction_interval,
)
from perfmodel.report.runs.facts import describe_traffic, headline
from perfmodel.report.runs.group_tables import group_tables
from perfmodel.sim.records.result import RunResult
from perfmodel.specs.prices import price_lines

BOUND_STYLES = {"compute": "blue", "memory": "green", "communication": "yellow", "overhead": "bright_black"}


def print_summary(result: RunResult, console: Console) -> None:
    """The whole answer of `simulate` and `execute`."""
    scenario = result.scenario
    console.print()
    console.print(Text(f"{scenario.name}: {headline(scenario)}, {result.clock}", style="bold"))
    console.print(Text(f"{describe_traffic(scenario.traffic)}, seed {scenario.seed}", style="dim"))
    console.print(summary_table(result))
    console.print(latency_table(result))
    for table in group_tables(result.summary):
        console.print(table)
    shares = bound_line(result.summary.get("bound_share") or {})
    if shares.plain:
        console.print(Text("Time bound by: ").append_text(shares))
    if split := result.summary.get("energy_split_j"):
        taken = {name: joules / sum(split.values()) for name, joules in split.items()}
        console.print(Text("Energy taken by: ").append_text(bound_line(taken)))
    if origin := result.summary.get("origin"):
        console.print(f"Origin of step times: [bold]{origin}[/bold]", highlight=False)
    for line in price_lines(scenario):
        console.print(Text(line))
    for note in result.notes:
        console.print(Text(f"Note: {note}", style="dim"))


def summary_table(result: RunResult) -> Table:
    """Counts, throughput, efficiency and cost, one row each; rows without a value are left out."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column("quantity")
    table.add_column("value", justify="right")
    table.add_column("unit", style="dim")
    for name, fields in GROUPS:
        shown = [field for field in fields if field.is_shown(result.summary)]
        if not shown:
            continue
        table.add_row(Text(name, style="bold cyan"), "", "")
        for field in shown:
            table.add_row(f"  {field.label}", field.show(result.summary), field.unit)
    return table


def latency_table(result: RunResult) -> Table:
    """TTFT, TPOT, ITL and E2E by statistic, in ms, with the share of requests within the SLO where there is one."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Latency (ms)", title_justify="left", title_style="bold")
    table.add_column("")
    for statistic in STATISTICS:
        table.add_column(statistic, justify="right")
    has_interval = any(prediction_interval(result.summary, metric) for metric, _, _ in LATENCIES)
    if has_interval:
        table.add_column("80 % interval of mean", justify="right", style="dim")
    slo = result.scenario.slo
    if slo.is_given:
        table.add_column("SLO", justify="right")
    for metric, short, _ in latencies_of(result.summary):
        cells: list[str | Text] = [format_number(latency(result.summary, s, metric)) for s in STATISTICS]
        if has_interval:
            interval = prediction_interval(result.summary, metric)
            cells.append(f"{format_number(interval[0])} to {format_number(interval[1])}" if interval else "")
        if slo.is_given:
            cells.append(_slo_cell(slo.limit_ms(metric), metric, result.summary))
        table.add_row(Text(short, style="bold"), *cells)
    return table


def _slo_cell(limit: float | None, metric: str, summary: Mapping[str, Any]) -> Text:
    """The limit beside the p99; of one that differs from request to request, the share that meets it."""
    if limit is None:
        share = (summary.get("slo_attainment_by") or {}).get(metric)
        return Text("" if share is None else f"{share:.1%} met", style="" if share is None or share < 0.99 else "green")
    p99 = latency(summary, "p99", metric)
    met = p99 is not None and p99 <= limit
    return Text(f"{limit:g} {'p99 ok' if met else 'p99 over'}", style="green" if met else "red")


def bound_line(shares: Mapping[str, float]) -> Text:
    """`memory 71 %  compute 20 %  overhead 9 %`, largest first."""
    line = Text()
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share:
            line.append(f"{name} {share:.0%}  ", style=BOUND_STYLES.get(name, ""))
    return line


def comparison_table(results: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """Summaries side by side; every run after the first also shows its ratio to the first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for position, (name, _) in enumerate(results):
        table.add_column(name, justify="right")
        if position:
            table.add_column("ratio", justify="right", style="dim")
    for label, key, digits, scale in _compared():
        values = [_scaled(summary.get(key), scale) for _, summary in results]
        if any(value is not None for value in values):
            table.add_row(label, *_compared_cells(values, digits))
    return table


def _compared() -> Iterable[tuple[str, str, int, float]]:
    for _, fields in GROUPS:
        for field in fields:
            label = f"{field.label} ({field.unit})" if field.unit else field.label
            yield label, field.key, field.digits, field.scale
    for metric, short, _ in LATENCIES:
        for statistic in ("mean", "p99"):
            yield f"{statistic.capitalize()} {short} (ms)", f"{statistic}_{metric}_ms", 2, 1.0


def _scaled(value: Any, scale: float) -> float | None:
    return float(value) * scale if isinstance(value, int | float) else None


def _compared_cells(values: Sequence[float | None], digits: int) -> list[str]:
    first, cells = values[0], [format_number(values[0], digits)]
    for value in values[1:]:
        cells.append(format_number(value, digits))
        cells.append(f"{value / first:.2f}x" if first and value is not None else "")
    return cells


def rows_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """Plain rows; the first `left` columns are text, the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position < left else "right")
    for row in rows:
        table.add_row(*row)
    return table

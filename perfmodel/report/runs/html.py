"""The report of a run: one HTML file that opens anywhere, without a network."""

__all__ = ["render_report", "render_step", "write_text"]

from pathlib import Path

from perfmodel.report.drawing.fields import (
    GROUPS,
    LATENCIES,
    STATISTICS,
    Field,
    format_number,
    format_si,
    latencies_of,
    latency,
    prediction_interval,
)
from perfmodel.report.drawing.page import Page
from perfmodel.report.runs import plots
from perfmodel.report.runs.facts import headline, scenario_facts
from perfmodel.report.runs.roofline import memory_figure, operators_figure, roofline_figure
from perfmodel.report.runs.series import MAX_BINS, MAX_POINTS
from perfmodel.report.runs.step_view import StepView, ridge_points
from perfmodel.sim.records.result import RunResult
from perfmodel.specs.prices import price_lines
from perfmodel.specs.scenario import Scenario

_DEFINITIONS = (
    "TTFT: from arrival to the first output token, queueing included. TPOT: (E2E - TTFT) / (output tokens - 1), "
    "requests of one output token have none. ITL: gap between consecutive tokens of a request. "
    "E2E: from arrival to the last token. The names are those of vLLM's bench serve."
)


def render_report(result: RunResult, step: StepView | None = None) -> str:
    """The report's text. Equal results give equal bytes."""
    scenario = result.scenario
    page = Page(scenario.name, f"{headline(scenario)} - {result.clock} by perfmodel", result.clock)
    page.tiles(_tiles(result))
    page.facts("What was run", scenario_facts(scenario))
    _add_tables(page, result)
    _add_run_figures(page, result)
    if step is not None:
        _add_step_figures(page, scenario, step)
    page.list("Where the numbers come from", _origins(result))
    return page.render()


def render_step(scenario: Scenario, step: StepView) -> str:
    """A page about one step alone: roofline, operators, ridge points."""
    page = Page(f"{scenario.name}: roofline", f"{headline(scenario)} - {step.label}", "datasheet roofs")
    page.facts("Scenario", scenario_facts(scenario))
    _add_step_figures(page, scenario, step)
    rows = [
        (rate, format_si(scenario.hardware.declared.peak_flops_per_s[rate], "FLOP/s"), format_number(ridge, 1))
        for rate, ridge in ridge_points(scenario.hardware).items()
    ]
    page.table("Ridge points", ("dtype", "peak", "FLOP/byte"), rows)
    page.list("Where the numbers come from", [_hardware_source(scenario)])
    return page.render()


def write_text(path: Path, text: str) -> Path:
    """Write through a temporary name, so that a file is either whole or not there."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    return partial.replace(path)


def _tiles(result: RunResult) -> list[tuple[str, str, str, str, str]]:
    summary, slo = result.summary, result.scenario.slo
    tiles = []
    for metric, short, _ in LATENCIES:
        if metric == "itl":
            continue
        mean, p99 = latency(summary, "mean", metric), latency(summary, "p99", metric)
        limit = slo.limit_ms(metric)
        aside, css = f"p99 {_short(p99)} ms", ""
        if limit is not None and p99 is not None:
            aside, css = f"{aside}, SLO {limit:g}", "ok" if p99 <= limit else "over"
        tiles.append((f"mean {short}", _short(mean), "ms", aside, css))
    goodput, requests = summary.get("request_goodput"), summary.get("request_throughput")
    good = f"{goodput / requests:.1%} within the SLO" if goodput is not None and requests else ""
    tiles.append(("output", _short(summary.get("output_throughput")), "tok/s", "", ""))
    tiles.append(("requests", _short(requests), "per s", good, ""))
    cost = summary.get("usd_per_million_output_tokens")
    if cost is not None:
        tiles.append(("cost", f"{cost:,.2f}", "USD", "per million output tokens", ""))
    return tiles


def _short(value: float | None) -> str:
    """Three significant digits, as large numbers are read at a glance."""
    if value is None:
        return format_number(None)
    return format_number(value, 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2)


def _add_tables(page: Page, result: RunResult) -> None:
    rows = []
    for metric, short, name in latencies_of(result.summary):
        interval = prediction_interval(result.summary, metric)
        cells = [format_number(latency(result.summary, statistic, metric)) for statistic in STATISTICS]
        between = f"{format_number(interval[0])} to {format_number(interval[1])}" if interval else format_number(None)
        rows.append((f"{short}, {name}", *cells, between))
    page.table("Latency (ms)", ("", *STATISTICS, "80 % interval of the mean"), rows, _DEFINITIONS)
    groups = [
        (name, [(field.label, f"{field.show(result.summary)} {field.unit}") for field in fields if _has(result, field)])
        for name, fields in GROUPS
    ]
    page.facts("Summary", groups)


def _has(result: RunResult, field: Field) -> bool:
    return field.is_shown(result.summary)


def _add_run_figures(page: Page, result: RunResult) -> None:
    requests, steps = result.requests, result.steps
    if requests is not None and len(requests):
        note = f"Share of {len(requests):,} requests at or below each latency."
        if len(requests) > MAX_POINTS:
            note += f" Drawn through {MAX_POINTS} of them, evenly spaced in rank, the extremes included."
        page.figure("Latency distributions", plots.latency_figure(requests, result.scenario.slo), note)
    if steps is not None and len(steps):
        binned = f"Means over at most {MAX_BINS} equal intervals; {len(steps):,} step records in all."
        page.figure("Tokens per second", plots.throughput_figure(steps), binned)
        page.figure("Requests in the system", plots.load_figure(steps), "All replicas together. " + binned)
        if result.num_blocks:
            page.figure("KV cache in use", plots.kv_figure(steps, result.num_blocks), binned)
    shares = result.summary.get("bound_share")
    if shares:
        page.figure("What bounded the time", plots.bound_figure(shares))


def _add_step_figures(page: Page, scenario: Scenario, step: StepView) -> None:
    hidden = [point.name for point in step.points if not point.is_drawable]
    if step.points:
        note = f"{step.label}. One device's share; marker area follows the time."
        if hidden:
            note += f" Not on the plot, because they do no counted FLOPs or move no bytes: {', '.join(hidden)}."
        page.figure("Roofline of one step", roofline_figure(scenario.hardware, step.points), note)
        page.figure("Operators of that step", operators_figure(step.points), step.label + ".")
    if step.memory_parts:
        figure = memory_figure(step.memory_parts, step.memory_bytes or scenario.hardware.memory_bytes)
        page.figure("Device memory", figure, "One device; the line is what a process sees of it.")


def _origins(result: RunResult) -> list[str]:
    scenario = result.scenario
    origin = result.summary.get("origin")
    if result.clock == "executed":
        lines = ["Step times: measured while the model ran on this machine, on a clock that counts those times alone."]
    elif origin == "calibrated":
        lines = [
            f"Step times: predicted by a calibration fitted to measurements (profile {scenario.engine.profile!r})."
        ]
    else:
        lines = ["Step times: predicted from the datasheet alone; no measurement of this device was used."]
    lines.append(_hardware_source(scenario))
    return [*lines, *price_lines(scenario), *result.notes]


def _hardware_source(scenario: Scenario) -> str:
    declared = scenario.hardware.declared
    text = f"Hardware facts of {scenario.hardware.name}: {declared.source}."
    if declared.unconfirmed:
        text += f" Not confirmed in a vendor's document: {', '.join(declared.unconfirmed)}."
    return text

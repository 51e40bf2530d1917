"""Deployments side by side: rows of figures relative to the first, as in `perfmodel compare`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from perfmodel.planning.metrics import study_metric
from perfmodel.report.numbers import MISSING
from perfmodel.web.figures import value_at
from perfmodel.web.results import QueryResult, without_marks
from perfmodel.web.service import QueryState
from perfmodel.web.state import PageState


@dataclass(frozen=True, slots=True)
class CellRow:
    """One row. of: index of each column's request; path, form: see `figure`; aside: remark."""

    label: str
    of: int
    path: str
    form: str = ""
    aside: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure. share: of the row's largest, for its bar; words: change from the first column; tone: good or bad,
    where one direction is better; refusal: why there is none"""

    shown: QueryResult | None
    share: float = 0.0
    words: str = ""
    tone: str = ""
    refusal: str = ""


class Compared(NamedTuple):
    """A row with its cells in column order."""

    row: CellRow
    cells: tuple[Cell, ...]


OF_DEPLOYMENTS = (
    CellRow("weights, per device", 0, "weight_bytes", "bytes"),
    CellRow("KV cache, per device", 0, "kv_bytes", "bytes"),
    CellRow("tokens in the KV cache", 0, "max_tokens", "count"),
    CellRow("largest batch at 2,048 tokens", 0, "max_batch_at_2048_tokens", "count"),
    CellRow("step time", 1, "duration_s", "seconds", "of the same step"),
)
OF_TRAFFIC = (
    CellRow("mean TTFT", 0, "mean_ttft_ms"),
    CellRow("p99 TTFT", 0, "p99_ttft_ms", "latency_ms"),
    CellRow("mean TPOT", 0, "mean_tpot_ms"),
    CellRow("p99 TPOT", 0, "p99_tpot_ms", "latency_ms"),
    CellRow("mean E2E", 0, "mean_e2el_ms"),
    CellRow("output", 0, "output_throughput", "tok_s"),
    CellRow("requests within the SLO", 0, "slo_attainment", "percent"),
    CellRow(
        "largest rate within the SLO", 1, "load.within_slo.max_rate", "req_s", "by 90 % of requests, or plan.attainment"
    ),
    CellRow("cost per million tokens", 0, "usd_per_million_tokens", "usd", "prompts and answers"),
    CellRow("energy per output token", 0, "joules_per_output_token"),
)


def compared(findings: Sequence[QueryState], rows: Sequence[CellRow], num_columns: int) -> list[Compared]:
    """Rows with figures from `findings` (all requests, by column); rows without any are dropped."""
    per_column = len(findings) // num_columns
    columns = [findings[per_column * number : per_column * (number + 1)] for number in range(num_columns)]
    changes = [_changes(columns[0], column) for column in columns]
    compared_rows = []
    for row in rows:
        answers = [column[row.of].shown for column in columns]
        values = [None if answer is None else value_at(answer.data, row.path) for answer in answers]
        values = [value if isinstance(value, int | float) else None for value in values]
        most, cells = max((value for value in values if value is not None), default=0) or 1, []
        for number, (column, value) in enumerate(zip(columns, values, strict=True)):
            if value is None:
                cells.append(Cell(None, refusal=column[row.of].refusal))
            else:
                words, tone = _words(changes[number].get(row.path), number, values[0])
                cells.append(Cell(column[row.of].shown, max(value / most, 0.0), words, tone))
        if any(cell.shown for cell in cells):
            compared_rows.append(Compared(row, tuple(cells)))
    return compared_rows


@dataclass(frozen=True, slots=True)
class SpeedReading:
    """Where a curve gives its users the speed that is asked for.

    in_flight: requests at the points around it; at the last point if even that is faster
    values:    metric -> read off the curve there, as it is drawn
    lead:      of the cheapest of several, the share by which it costs less than the next; else None"""

    in_flight: str
    values: Mapping[str, float]
    lead: float | None = None


COST, _THROUGHPUT = "usd_per_million_output_tokens", "output_throughput_per_gpu"
SPEED_METRICS = {
    _THROUGHPUT: "tokens/s of a device",
    COST: "USD per million output tokens",
    "joules_per_output_token": "J per output token",
}


def at_speed(answers: Sequence[QueryResult | None], speed: float) -> list[SpeedReading | None]:
    """A reading of each curve at `speed`, in tokens/s of a user; None where one request in flight is slower already."""
    readings = [None if answer is None else _reading(answer.data["points"], speed) for answer in answers]
    costs = sorted(reading.values[COST] for reading in readings if reading is not None and COST in reading.values)
    if len(costs) < 2:
        return readings
    lead = 1 - costs[0] / costs[1]
    return [
        replace(reading, lead=lead) if reading is not None and reading.values.get(COST) == costs[0] else reading
        for reading in readings
    ]


def reading_text(metric: str, reading: SpeedReading) -> str:
    """A value that was read off a curve, to three digits."""
    value = reading.values.get(metric)
    return MISSING if value is None else f"≈ {value * study_metric(metric).scale:,.3g}"


def _reading(points: Sequence[Mapping[str, Any]], speed: float) -> SpeedReading | None:
    rows = [(1e3 / tpot_ms, point) for point in points if (tpot_ms := point["values"].get("mean_tpot_ms"))]
    number = max((number for number, (own_speed, _) in enumerate(rows) if own_speed >= speed), default=None)
    if number is None:
        return None
    (above, first), (below, second) = rows[number], rows[min(number + 1, len(rows) - 1)]
    share = (above - speed) / (above - below) if above > below else 0.0
    counts = [point["set"].rpartition("=")[2] for point in (first, second)]
    values = {}
    for metric in SPEED_METRICS:
        low, high = first["values"].get(metric), second["values"].get(metric)
        if low and high:  # axes of cost and energy are logarithmic
            is_even = metric == _THROUGHPUT
            values[metric] = low + share * (high - low) if is_even else low * (high / low) ** share
    return SpeedReading(f"{counts[0]} to {counts[1]}" if first is not second else f"{counts[0]} or more", values)


def headings(columns: Sequence[PageState], findings: Sequence[QueryState]) -> list[tuple[str, str]]:
    """(model, devices) per column from its first answer in `findings`, else from its address."""
    names = []
    for column, finding in zip(columns, findings[:: len(findings) // len(columns)], strict=True):
        if finding.shown is None:
            flags = column.flags
            model, devices = flags.get("model", column.get("scenario")), flags.get("hardware", "")
            names.append((without_marks(model), without_marks(devices)))
        elif "num_devices" in (data := finding.shown.data):  # of `memory`
            names.append((data["model"], f"{data['num_devices']} x {data['hardware']}"))
        else:  # of `simulate`
            scenario = data["provenance"]["inputs"]["scenario"]
            devices = f"{data['mean_num_devices']:g} x {scenario['hardware']['name']}"
            names.append((scenario["model"]["name"], devices))
    return names


def _changes(first: Sequence[QueryState], other: Sequence[QueryState]) -> dict[str, Any]:
    """Path -> change by `perfmodel compare` between two columns."""
    from perfmodel.commands.runs import compared as results_compared

    changes: dict[str, Any] = {}
    for one, another in zip(first, other, strict=True):
        if one.shown is None or another.shown is None or one is another:
            continue
        answers = results_compared(one.shown.data, another.shown.data, "first", "other").data["answers"]
        changes |= {".".join([*change["place"].split(), change["metric"]]): change for change in answers}
    return changes


def _words(change: Mapping[str, Any] | None, number: int, first: float | None) -> tuple[str, str]:
    """`12 % lower, better`, or `the same`; empty for the first column."""
    if not number or first is None:
        return "", ""
    if change is None:
        return "the same", ""
    if change["relative"] is None:
        return "", ""
    size, verdict = change["relative"], change["verdict"]
    text = f"{abs(size):.1%} {'higher' if size > 0 else 'lower'}".replace("%", " %")
    text = f"{1 + size:.3g} times" if size >= 1 else text
    return f"{text}, {verdict}" if verdict else text, {"better": "good", "worse": "bad"}.get(verdict, "")

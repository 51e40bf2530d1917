"""Answers side by side: rows of figures, each beside the first deployment's as `perfmodel compare` compares results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.web.figures import value_at
from perfmodel.web.results import QueryResult, without_marks
from perfmodel.web.service import QueryState
from perfmodel.web.state import PageState


@dataclass(frozen=True, slots=True)
class CellRow:
    """One row. label: what it is; of: the request of each column that answers it; path, form: as of `figure`

    aside: what else is to be known of it
    """

    label: str
    of: int
    path: str
    form: str = ""
    aside: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of one column. share: of the row's largest, for its bar; words: beside the first column's

    tone: good or bad, where one way is better; refusal: why there is none
    """

    shown: QueryResult | None
    share: float = 0.0
    words: str = ""
    tone: str = ""
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """A row with its cells, in the order of the columns."""

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
    """The rows with their figures; those that no column has are left out.

    findings: of all requests, column by column
    """
    each = len(findings) // num_columns
    columns = [findings[each * number : each * (number + 1)] for number in range(num_columns)]
    changes = [_changes(columns[0], column) for column in columns]
    found = [_row(row, columns, changes) for row in rows]
    return [row for row in found if any(cell.shown for cell in row.cells)]


def headings(columns: Sequence[PageState], findings: Sequence[QueryState]) -> list[tuple[str, str]]:
    """(model, devices) of each column, as its first answer says; of a refused one as the address does.

    findings: of all requests, column by column
    """
    each = len(findings) // len(columns)
    return [_heading(column, findings[each * number]) for number, column in enumerate(columns)]


def _heading(column: PageState, finding: QueryState) -> tuple[str, str]:
    if finding.shown is None:
        asked = column.flags
        return without_marks(asked.get("model", column.get("scenario"))), without_marks(asked.get("hardware", ""))
    data = finding.shown.data
    if "num_devices" in data:  # of `memory`
        return data["model"], f"{data['num_devices']} x {data['hardware']}"
    scenario = data["provenance"]["inputs"]["scenario"]  # of `simulate`
    return scenario["model"]["name"], f"{data['mean_num_devices']:g} x {scenario['hardware']['name']}"


def _row(row: CellRow, columns: Sequence[Sequence[QueryState]], changes: Sequence[Mapping[str, Any]]) -> Compared:
    values = [_value(column[row.of], row.path) for column in columns]
    most = max((value for value in values if value is not None), default=0) or 1
    cells = []
    for number, (column, value) in enumerate(zip(columns, values, strict=True)):
        if value is None:
            cells.append(Cell(None, refusal=column[row.of].refusal))
            continue
        words, tone = _words(changes[number].get(row.path), number, values[0])
        cells.append(Cell(column[row.of].shown, max(value / most, 0.0), words, tone))
    return Compared(row, tuple(cells))


def _value(finding: QueryState, path: str) -> float | None:
    value = None if finding.shown is None else value_at(finding.shown.data, path)
    return value if isinstance(value, int | float) else None


def _changes(first: Sequence[QueryState], other: Sequence[QueryState]) -> dict[str, Any]:
    """Path -> what `perfmodel compare` says of it, between the answers of two columns."""
    from perfmodel.commands.runs import compared as results_compared

    found: dict[str, Any] = {}
    for one, another in zip(first, other, strict=True):
        if one.shown is None or another.shown is None or one is another:
            continue
        data = results_compared(one.shown.data, another.shown.data, "first", "other").data
        found |= {".".join([*each["place"].split(), each["metric"]]): each for each in data["answers"]}
    return found


def _words(change: Mapping[str, Any] | None, number: int, first: float | None) -> tuple[str, str]:
    """`12 % lower, better`; of the first column nothing, where both have the same `the same`."""
    if not number or first is None:
        return "", ""
    if change is None:
        return "the same", ""
    if change["relative"] is None:
        return "", ""
    size, verdict = change["relative"], change["verdict"]
    text = (
        f"{1 + size:.3g} times"
        if size >= 1
        else f"{abs(size):.1%} {'higher' if size > 0 else 'lower'}".replace("%", " %")
    )
    return f"{text}, {verdict}" if verdict else text, {"better": "good", "worse": "bad"}.get(verdict, "")

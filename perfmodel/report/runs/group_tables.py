"""Tables of a run told apart: its pools, and its priority classes."""

__all__ = ["group_tables"]

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from perfmodel.report.drawing.fields import Field

_COLUMNS = (
    Field("completed", "completed", digits=0),
    Field("failed", "failed", digits=0),
    Field("timed_out", "timed out", digits=0),
    Field("request_goodput", "goodput", "req/s"),
    Field("mean_ttft_ms", "mean TTFT", "ms", 1),
    Field("p99_ttft_ms", "p99 TTFT", "ms", 1),
    Field("mean_tpot_ms", "mean TPOT", "ms"),
    Field("p99_e2el_ms", "p99 E2E", "ms", 0),
    Field("busy_share", "busy", "%", 0, 100.0),
    Field("replicas_peak", "most replicas", digits=0),
    Field("failures", "failures", digits=0),
    Field("gpu_hours", "device hours", "h", 3),
)


def group_tables(summary: Mapping[str, Any]) -> list[Table]:
    """One table for the pools and one for the classes, where there are several."""
    found = []
    for key, title in (("pools", "Pools"), ("classes", "Classes")):
        rows = summary.get(key) or ()
        if rows:
            found.append(_table(title, rows))
    return found


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("")
    columns = [field for field in _COLUMNS if any(row.get(field.key) is not None for row in rows)]
    for field in columns:
        table.add_column(f"{field.label} {field.unit}".strip(), justify="right")
    for number, row in enumerate(rows):
        table.add_row(_name(number, row), *(field.show(row) for field in columns))
    return table


def _name(number: int, row: Mapping[str, Any]) -> str:
    """What a row is called: its own name, else its deployment and its role."""
    place = " ".join(str(row[key]) for key in ("deployment", "role") if row.get(key))
    name = str(row.get("name") or place or number)
    return f"{name} (shadow)" if row.get("shadow") else name

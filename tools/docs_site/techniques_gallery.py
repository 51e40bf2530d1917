"""The table of all techniques: the switch, and what has been shown of each, from the committed reports."""

__all__ = ["techniques_table"]

from itertools import groupby
from pathlib import Path
from typing import Any

from docs_site.tables import as_code, in_cell, table
from perfmodel.evidence.executed.technique import read_status

_HEADER = ("technique", "switch", "speedup simulated / executed", "executed", "published", "quality")
_PUBLISHED = {"yes": "within a quarter", "missed": "missed", "no": ""}


def techniques_table() -> str:
    """By family, in the order of `perfmodel techniques`."""
    listed = [row.to_json() for row in read_status()]
    text = ""
    for family, rows in groupby(listed, lambda row: str(row["family"])):
        text += f"### {family[:1].upper()}{family[1:]}\n\n{table(_HEADER, map(_row, rows))}\n"
    return text


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    name = f"[{in_cell(row['technique'])}]({Path(row['page']).name})" if row["page"] else in_cell(row["technique"])
    switches = "<br>".join(as_code(item) for item in row["switch"]) or in_cell(row["why_not_simulated"] or "")
    gains = "<br>".join(
        f"{item['simulated']:.2f} / {item['executed']:.2f}"
        for item in row["speedups"].values()
        if item.get("simulated") and item.get("executed")
    )
    executed = "as simulated" if row["executed"] else in_cell(row["why_not_executed"] or row["executed_verdict"] or "")
    published, off = _PUBLISHED.get(row["validated"], row["validated"]), row["predicted_over_published"]
    shown = f"{published} (predicted {off:.2f} of it)" if off is not None else published
    return name, switches, gains, executed, shown, in_cell(row["quality"] or "")

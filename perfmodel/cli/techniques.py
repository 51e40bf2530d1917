"""`perfmodel techniques`: which techniques there are, and what has been shown of each."""

__all__ = ["techniques"]

from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import print_json, stdout

if TYPE_CHECKING:
    from perfmodel.validate.techniques.status import TechniqueStatus

Family = Annotated[
    str | None,
    typer.Option("--family", metavar="NAME", help="Only these, as in serving or decoding.", show_default=False),
]


def techniques(family: Family = None, as_json: JsonFlag = False) -> None:
    """List every technique: simulated, executed, and how far from what was published.

    Figures are those of the committed reports: predicted over published in the median, simulated over executed speedup.
    A technique is validated within 25 %; what is farther off is shown as missed.
    """
    from perfmodel.validate.techniques.status import read_status

    rows = _of_family(read_status(), family)
    if as_json:
        print_json([row.to_json() for row in rows])
        return
    _print(rows)


def _of_family(rows: "list[TechniqueStatus]", family: str | None) -> "list[TechniqueStatus]":
    from perfmodel.errors import SpecError, did_you_mean
    from perfmodel.files.catalog import normal_name

    if family is None:
        return rows
    known = list(dict.fromkeys(row.family for row in rows))
    found = [row for row in rows if normal_name(row.family) == normal_name(family)]
    if not found:
        near = did_you_mean(family, known)
        raise SpecError(f"--family: found {family!r}, allowed: {', '.join(known)}.{near}")
    return found


def _print(rows: "list[TechniqueStatus]") -> None:
    from rich.text import Text

    from perfmodel.report.runs.tables import rows_table

    columns = ("technique", "simulated", "executed", "validated: predicted / published")
    for family in dict.fromkeys(row.family for row in rows):
        mine = [row for row in rows if row.family == family]
        stdout().print(Text(family, style="bold cyan"))
        cells = [(row.entry.name, _simulated(row), _executed(row), _validated(row)) for row in mine]
        stdout().print(rows_table(columns, cells, left=4))
        for reason in dict.fromkeys(row.entry.missing for row in mine if row.entry.missing):
            names = ", ".join(row.entry.name for row in mine if row.entry.missing == reason)
            stdout().print(Text(f" Not yet: {names}: {reason}", style="dim"))
    counts = {
        "simulated": sum(row.is_simulated for row in rows),
        "executed": sum(row.is_executed for row in rows),
        "validated": sum(row.validated == "yes" for row in rows),
        "missed": sum(row.validated == "missed" for row in rows),
    }
    words = ", ".join(f"{count} {name}" for name, count in counts.items())
    stdout().print(f"{len(rows)} techniques: {words}", highlight=False)


def _simulated(row: "TechniqueStatus") -> str:
    return "yes" if row.is_simulated else "not yet"


def _executed(row: "TechniqueStatus") -> str:
    if not row.is_executed:
        return f"no: {row.why_not_executed}"
    return "yes" if row.quotient is None else f"yes, simulated / executed {row.quotient:.2f}"


def _validated(row: "TechniqueStatus") -> str:
    if row.ratio is None:
        return "no figure"
    count = f"{len(row.ratios)} figures" if len(row.ratios) > 1 else next(iter(row.ratios))
    return f"{'missed, ' if row.validated == 'missed' else ''}{row.ratio:.2f} ({count})"

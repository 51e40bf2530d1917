"""`perfmodel techniques`: which techniques there are, and what has been shown of each."""

__all__ = ["techniques"]

from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import answer

if TYPE_CHECKING:
    from perfmodel.validate.techniques.status import TechniqueStatus

Family = Annotated[
    str | None,
    typer.Option("--family", metavar="NAME", help="Only these, as in serving or decoding.", show_default=False),
]


def techniques(family: Family = None, as_json: JsonFlag = False) -> None:
    """List every technique: simulated, executed as simulated, and how far from what was published.

    Figures are those of the committed reports: predicted over published in the median, simulated and executed speedup
    of a pair of scenarios. A technique is executed where both speedups point the same way and lie within 15 % of each
    other, and validated within 25 %; what is farther off is shown as missed, and a pair without a gain proves nothing.
    """
    from perfmodel.report.views.catalog import techniques_view
    from perfmodel.validate.techniques.status import read_status

    rows = _of_family(read_status(), family)
    answer(techniques_view(rows), [row.to_json() for row in rows], as_json)


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

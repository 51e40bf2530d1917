"""`perfmodel techniques`: which techniques there are, and what has been shown of each."""

__all__ = ["techniques"]

from typing import Annotated

import typer

from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import give

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
    from perfmodel.answers.techniques import answer_techniques

    give(answer_techniques(family), as_json)

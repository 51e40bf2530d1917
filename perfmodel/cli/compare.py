"""`perfmodel compare A B`: what differs between two results, or between two scenarios simulated now."""

__all__ = ["compare"]

from typing import Annotated

import typer

from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import give, progress_bar

One = Annotated[
    str,
    typer.Argument(metavar="A", help="A file that a command wrote with --json, or a scenario.", show_default=False),
]
Other = Annotated[str, typer.Argument(metavar="B", help="Another of the same command.", show_default=False)]


def compare(one: One, other: Other, as_json: JsonFlag = False) -> None:
    """Say what differs between two results: in inputs, field by field; in versions; in answers, the best first.

    Results are files that a command wrote with `--json` (`--out` and `--report` write them, too). Scenarios, by their
    names or files, are simulated and compared.
    """
    from perfmodel.answers.compare import answer_compare

    give(answer_compare(one, other, progress_bar), as_json)

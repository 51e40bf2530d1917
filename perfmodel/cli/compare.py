"""`perfmodel compare A B`: what differs between two results, or between two scenarios simulated now."""

__all__ = ["compare"]

from pathlib import Path
from typing import Annotated, Any

import typer

from perfmodel.cli.options import JsonFlag, load
from perfmodel.cli.terminal import answer, progress_bar

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
    from perfmodel.planning.comparison import compare_results
    from perfmodel.report.views.comparison import comparison_view

    found = compare_results(_result(one), _result(other), one, other)
    answer(comparison_view(found), found.to_json(), as_json)


def _result(name: str) -> dict[str, Any]:
    """The result in a file, or of a scenario that is simulated now."""
    if name.endswith(".json"):
        from perfmodel.planning.comparison import read_result

        return read_result(Path(name))
    from perfmodel import sim

    scenario = load(name, None)
    with progress_bar("simulating") as progress:
        result = sim.simulate(scenario, progress=progress, keep_steps=False, intervals=True)
    return result.to_json()

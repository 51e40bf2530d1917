"""`perfmodel whatif SCENARIO`: which resource counts, where bounds change, where an alternative pays."""

__all__ = ["whatif"]

from typing import Annotated

import typer

from perfmodel.cli.asked import Asked
from perfmodel.cli.flags import takes_flags
from perfmodel.cli.options import EngineName, Given, JsonFlag, Overrides, ReportFile, command_line
from perfmodel.cli.terminal import answer, progress_bar
from perfmodel.errors import SpecError

Vary = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        metavar="PATH=LO..HI[:N]",
        help="Vary one value, over a range or PATH=A,B,C; 0.5x..2x are multiples. May be given several times.",
        show_default=False,
    ),
]
Metric = Annotated[
    list[str] | None,
    typer.Option(
        "--metric", metavar="NAME", help="Of a run, a step or memory. May be given several times.", show_default=False
    ),
]
Grid = Annotated[bool, typer.Option("--grid", help="Both varied values in all their combinations.")]
Against = Annotated[
    str | None,
    typer.Option(
        "--against", metavar="'KEY=VALUE ...'", help="An alternative: where does it begin to pay?", show_default=False
    ),
]


@takes_flags()
def whatif(
    asked: Asked,
    vary: Vary = None,
    metric: Metric = None,
    grid: Grid = False,
    against: Against = None,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
    report_file: ReportFile = None,
    engine: EngineName = "local",
) -> None:
    """Vary a scenario one value at a time: sensitivities, elasticities, where bounds change, where an alternative pays.

    Without --vary: the resources that could be bought (peak FLOPs, bandwidths, capacity, overheads), and the load. All
    points see the same requests. `--set step.batch=64` gives the step of metrics like step_ms, else it is the typical
    one.
    """
    from dataclasses import replace

    from perfmodel.planning.sensitivity.ask import ask_whatif
    from perfmodel.report.views.whatif.view import whatif_json, whatif_view
    from perfmodel.report.written import check_report_file

    check_report_file(report_file)
    result = ask_whatif(
        asked.source(),
        vary or (),
        overrides or (),
        metric or (),
        grid,
        _overrides(against),
        None,
        engine,
        progress_bar,
    )
    result = replace(result, assumed=asked.assumed(result.answers.scenario))
    flags: dict[str, Given] = {
        **asked.given,
        "vary": vary,
        "metric": metric,
        "grid": grid,
        "against": against,
        "set": overrides,
    }
    command = command_line("whatif", *asked.arguments, **flags, report=report_file)
    answer(whatif_view(result, command), whatif_json(result), as_json, report_file)


def _overrides(against: str | None) -> list[str]:
    """The overrides of an alternative. Raises SpecError for a quote without its end."""
    import shlex

    try:
        return shlex.split(against or "")
    except ValueError as error:
        raise SpecError(f"--against {against}: {error}; quote it as in --against 'a=1 b=2'.") from None

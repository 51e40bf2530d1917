"""`perfmodel whatif SCENARIO`: which resource counts, where bounds change, where an alternative pays."""

__all__ = ["whatif"]

from typing import Annotated

import typer

from perfmodel.answers.asked import Asked
from perfmodel.answers.command_lines import Given, command_line
from perfmodel.cli.flags import takes_flags, takes_short_forms
from perfmodel.cli.options import Details, EngineName, JsonFlag, Overrides, ReportFile
from perfmodel.cli.terminal import give, progress_bar

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

Intervals = Annotated[
    bool, typer.Option("--intervals", help="Also the 80 % intervals of means; each point is simulated several times.")
]


@takes_flags()
@takes_short_forms()
def whatif(
    asked: Asked,
    vary: Vary = None,
    metric: Metric = None,
    grid: Grid = False,
    against: Against = None,
    intervals: Intervals = False,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
    report_file: ReportFile = None,
    engine: EngineName = "local",
    has_details: Details = False,
) -> None:
    """Vary a scenario one value at a time: sensitivities, elasticities, where bounds change, where an alternative pays.

    Without --vary: the resources that could be bought (peak FLOPs, bandwidths, capacity, overheads), and the load. All
    points see the same requests. `--set step.batch=64` gives the step of metrics like step_ms, else it is the typical
    one.
    """
    from perfmodel.answers.whatif import answer_whatif
    from perfmodel.report.pages import check_report_file

    check_report_file(report_file)
    flags: dict[str, Given] = {
        **asked.given,
        "vary": vary,
        "metric": metric,
        "grid": grid,
        "against": against,
        "intervals": intervals,
        "set": overrides,
    }
    command = command_line("whatif", *asked.arguments, **flags, report=report_file)
    answer = answer_whatif(
        asked, vary, metric, grid, against, overrides, None, engine, progress_bar, command, intervals
    )
    give(answer, as_json, report_file, has_details)

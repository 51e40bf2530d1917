"""`perfmodel whatif SCENARIO`: which resource counts, where bounds change, where an alternative pays."""

__all__ = ["whatif"]

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.options import EngineName, JsonFlag, Overrides, ScenarioName
from perfmodel.cli.terminal import print_json, progress_bar, say, stdout
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
ReportFile = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write FILE.md with pictures, or FILE.html.", show_default=False),
]


def whatif(
    scenario: ScenarioName,
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
    import shlex

    if report_file is not None and report_file.suffix not in (".md", ".html"):
        raise SpecError(f"--report {report_file}: allowed a file ending in .md or .html.")
    from perfmodel.plan.sensitivity.ask import ask_whatif
    from perfmodel.report.whatifs.written import WhatIfReport, write_whatif

    result = ask_whatif(
        scenario,
        vary or (),
        overrides or (),
        metric or (),
        grid,
        shlex.split(against or ""),
        None,
        engine,
        progress_bar,
    )
    command = _command(scenario, vary, metric, grid, against, overrides, report_file)
    report = WhatIfReport(result, command)
    if report_file is not None:
        for written in write_whatif(report, report_file):
            say(f"Written to {written}")
    if as_json:
        print_json(report.to_json())
    else:
        report.show(stdout())


def _command(
    scenario: str,
    vary: list[str] | None,
    metrics: list[str] | None,
    grid: bool,
    against: str | None,
    overrides: list[str] | None,
    report_file: Path | None,
) -> str:
    """The command as anyone would give it."""
    flags = [f"--set {text}" for text in overrides or ()] + [f"--vary {text}" for text in vary or ()]
    flags += [f"--metric {name}" for name in metrics or ()] + (["--grid"] if grid else [])
    flags += [f"--against '{against}'"] if against else []
    flags += [f"--report {report_file.name if report_file.is_absolute() else report_file}"] if report_file else []
    return " ".join(["perfmodel whatif", Path(scenario).name if "/" in scenario else scenario, *flags])

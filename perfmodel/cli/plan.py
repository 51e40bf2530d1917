"""`perfmodel plan SCENARIO`: the deployment that serves the traffic within its SLO, best by an objective."""

__all__ = ["plan"]

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.answers.asked import Asked
from perfmodel.answers.command_lines import Given, command_line
from perfmodel.cli.flags import takes_flags, takes_short_forms
from perfmodel.cli.options import Details, EngineName, JsonFlag, Overrides, ReportFile
from perfmodel.cli.terminal import EXIT_NO_ANSWER, give, progress_bar, progress_lines, say
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.planning.deployments.choice import Preliminary
    from perfmodel.planning.deployments.result import PlanResult
    from perfmodel.planning.jobs.result import PreliminaryJob

ExportFolder = Annotated[
    Path | None,
    typer.Option(
        "--export",
        metavar="DIR",
        help="Write the choice: serve.sh (vLLM), a scenario, Kubernetes objects.",
        show_default=False,
    ),
]
StoreFile = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="FILE",
        help="Where evaluated points are stored; by default in the user's cache folder.",
        show_default=False,
    ),
]


@takes_flags()
@takes_short_forms(is_plan=True)
def plan(
    asked: Asked,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
    report_file: ReportFile = None,
    export: ExportFolder = None,
    store: StoreFile = None,
    engine: EngineName = "local",
    has_details: Details = False,
) -> None:
    """Find the deployment that serves a scenario's rate within its SLO: cheapest, fewest GPUs, most goodput per GPU, or
    lowest latency; or that does its offline job: at the lowest cost before a deadline, or first.

    The scenario's `plan` block says what to look for, and where (`--set plan.objective=fewest_gpus`,
    `--set plan.space.hardware=[a100-sxm-80gb, h100-sxm-80gb]`). Candidates are screened in closed form, the best are
    simulated. Every simulated point is stored: a plan that was stopped resumes where it was. Exit status: 0 with a
    deployment, 1 where none serves what is asked for, 2 for what cannot be read.
    """
    from perfmodel.answers.plan import answer_plan
    from perfmodel.report.pages import check_report_file

    check_report_file(report_file)
    flags: dict[str, Given] = {**asked.given, "set": overrides, "report": report_file}
    command = command_line("plan", *asked.arguments, **flags)
    tell = partial(_tell, export)
    watch = progress_bar if sys.stderr.isatty() else progress_lines
    answer = answer_plan(asked, overrides, store, None, engine, watch, tell, say, command)
    give(answer, as_json, report_file, has_details)
    if answer.result.winner is None:  # scripts see by the status that nothing serves what was asked for
        if export is not None:
            say(f"--export {export}: nothing was written, since nothing serves what was asked for.")
        raise typer.Exit(EXIT_NO_ANSWER)
    if export is not None:
        _export(answer.result, export)


def _tell(export: Path | None, found: "Preliminary | PreliminaryJob") -> None:
    """Say what the screen has found. Raises SpecError for a job that is to be exported."""
    from perfmodel.answers.plan import told
    from perfmodel.planning.jobs.result import PreliminaryJob

    if export is not None and isinstance(found, PreliminaryJob):
        raise SpecError(f"--export {export}: writes what serves a rate; of a job the answer has the command.")
    say(told(found))


def _export(result: "PlanResult", export: Path) -> None:
    from perfmodel.planning.deployments.export import export_plan

    for written in export_plan(result, export):
        say(f"Written to {written}")

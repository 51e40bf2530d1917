"""`perfmodel study STUDY`: one question, many scenarios, the answer in sentences, tables and pictures."""

__all__ = ["study"]

from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.answers.command_lines import command_line
from perfmodel.cli import completion
from perfmodel.cli.options import EngineName, JsonFlag, Overrides, ReportFile
from perfmodel.cli.terminal import give, progress_bar, say

if TYPE_CHECKING:
    from perfmodel.planning.studies.spec import StudyFile

StudyName = Annotated[
    str,
    typer.Argument(
        metavar="STUDY",
        help="A study's name, or a path to a study file.",
        show_default=False,
        autocompletion=completion.studies,
    ),
]
Execute = Annotated[bool, typer.Option("--execute", help="Also run the study's executed part on this machine.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few values of each axis and fewer requests.")]
QualityModel = Annotated[
    str | None,
    typer.Option(
        "--quality", metavar="MODEL.gguf", help="First measure the study's perplexities anew.", show_default=False
    ),
]


def study(
    name: StudyName,
    execute: Execute = False,
    quick: Quick = False,
    overrides: Overrides = None,
    quality_model: QualityModel = None,
    as_json: JsonFlag = False,
    report_file: ReportFile = None,
    engine: EngineName = "local",
) -> None:
    """Ask one question of many scenarios: variants of a base scenario along axes, simulated in parallel processes.

    The shipped ones lie in workloads/scenarios/studies. `--execute` runs the small form that the study describes on
    this machine and compares it with its simulation, calibrated here and now (needs the executor extra). `--set`
    changes the study's base scenario. `--quality` writes the file of perplexities that the study's `quality` names.
    """
    from perfmodel.answers.studies import answer_study_file
    from perfmodel.planning.studies.spec import load_study
    from perfmodel.report.pages import check_report_file

    check_report_file(report_file)
    file = load_study(name, overrides or ())
    if quality_model is not None:
        _measure_quality(file, quality_model)
    command = command_line("study", name, execute=execute, quick=quick, set=overrides, report=report_file)
    give(answer_study_file(file, quick, execute, None, engine, progress_bar, command), as_json, report_file)


def _measure_quality(file: "StudyFile", model: str) -> None:
    from perfmodel.validate.executed.study import measure_study_quality

    with progress_bar("measuring perplexity") as progress:
        written = measure_study_quality(file, model, progress)
    say(f"Written to {written}")

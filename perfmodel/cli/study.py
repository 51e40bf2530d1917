"""`perfmodel study STUDY`: one question, many scenarios, the answer in sentences, tables and pictures."""

__all__ = ["study"]

from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli import completion
from perfmodel.cli.options import EngineName, JsonFlag, Overrides, ReportFile, command_line
from perfmodel.cli.terminal import answer, progress_bar, say

if TYPE_CHECKING:
    from perfmodel.planning.studies.spec import StudyFile
    from perfmodel.planning.studies.study import Answers, StudyPart, StudyPoints

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

    workloads/scenarios/studies has seven. `--execute` runs the small form that the study describes on this machine
    and puts the simulation of the same, calibrated here and now, beside it (needs the executor extra). `--set`
    changes the study's base scenario. `--quality` writes the file of perplexities that the study's `quality` names.
    """
    from perfmodel.planning.studies.spec import load_study
    from perfmodel.planning.studies.study import StudyResult, executed_points, simulated_points
    from perfmodel.planning.studies.study import quick as quickened
    from perfmodel.report.views.study.view import study_json, study_view
    from perfmodel.report.written import check_report_file

    check_report_file(report_file)
    file = load_study(name, overrides or ())
    if quality_model is not None:
        _measure_quality(file, quality_model)
    points = quickened(simulated_points(file)) if quick else simulated_points(file)
    points.check()
    executed = executed_points(file) if execute else None
    if executed is not None and quick:
        executed = quickened(executed, changes=False)  # it is small to begin with
    if executed is not None:
        executed.check()
    parts = [_simulated(file, points, engine)]
    if executed is not None:
        parts.append(_executed(executed))
    result = StudyResult(file.study, parts, _notes(file, execute), quick)
    command = command_line("study", name, execute=execute, quick=quick, set=overrides, report=report_file)
    answer(study_view(result, command), study_json(result), as_json, report_file)


def _measure_quality(file: "StudyFile", model: str) -> None:
    from perfmodel.validate.executed.study import measure_study_quality

    with progress_bar("measuring perplexity") as progress:
        written = measure_study_quality(file, model, progress)
    say(f"Written to {written}")


def _simulated(file: "StudyFile", points: "StudyPoints", engine: str) -> "StudyPart":
    from perfmodel.planning.studies.study import StudyPart, with_quality
    from perfmodel.planning.sweeps.sweep import sweep

    scenario = points.check()
    with progress_bar("simulating") as progress:
        records = points.located(lambda: sweep(list(points.points.values()), progress, engine=engine))
    answers = with_quality(points.answered(records), file)
    return StudyPart(scenario, {"simulated": answers})


def _executed(points: "StudyPoints") -> "StudyPart":
    from perfmodel.planning.studies.study import StudyPart, with_quality
    from perfmodel.validate.executed.study import execute_study

    scenario = points.check()
    with progress_bar("executing") as progress:
        answers: dict[str, Answers] = execute_study(points, progress)
    answers = {clock: with_quality(each, points.file) for clock, each in answers.items()}
    return StudyPart(scenario, answers)


def _notes(file: "StudyFile", execute: bool) -> list[str]:
    from perfmodel.planning.studies.study import quality_note

    part = file.study.executed
    of_quality = [note] if (note := quality_note(file)) else []
    if part is None or not execute:
        return of_quality
    apart = (
        "Executed points share one drift meter; the simulations beside them come from one calibration for each model "
    )
    apart += "and format, minutes apart, so that the machine's drift between calibrations is in the simulated gains."
    return [*of_quality, apart, *(f"Not executed: {label}: {why}" for label, why in part.leave_out.items())]

"""One question, many scenarios: `perfmodel study`."""

__all__ = ["answer_study", "answer_study_file"]

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfmodel.answers.answer import Answer, Watch, unwatched

if TYPE_CHECKING:
    from perfmodel.planning.study import Answers, StudyFile, StudyPart, StudyPoints


def answer_study(
    name: str,
    overrides: Sequence[str] | None = None,
    quick: bool = False,
    workers: int | None = None,
    engine: str = "local",
    progress: Watch = unwatched,
    command: str = "",
) -> Answer:
    """A study by its name or file, simulated. See `answer_study_file`.

    name:      of the study, or a path to its file
    overrides: of its base scenario, as `--set` takes them
    quick, workers, engine, command: as there
    """
    from perfmodel.planning.study import load_study

    file = load_study(name, overrides or ())
    return answer_study_file(file, quick, False, workers, engine, progress, command)


def answer_study_file(
    file: "StudyFile",
    quick: bool = False,
    execute: bool = False,
    workers: int | None = None,
    engine: str = "local",
    progress: Watch = unwatched,
    command: str = "",
) -> Answer:
    """Variants of a base scenario along axes; `result` is the StudyResult.

    file:     as `load_study` reads it
    quick:    a few values of each axis, and fewer requests
    execute:  also run the study's executed part on this machine
    workers, engine: as of `perfmodel.planning.sweep`
    progress: a stage's name -> what shows how far it is
    command:  that the document says to give the answer again

    Raises SpecError for points that cannot be read, and for a study without the part that is to be executed.
    """
    from perfmodel.planning.study import StudyResult, executed_points, simulated_points
    from perfmodel.planning.study import quick as quickened
    from perfmodel.report.views.study import study_json, study_view

    points = quickened(simulated_points(file)) if quick else simulated_points(file)
    points.check()
    executed = executed_points(file) if execute else None
    if executed is not None and quick:
        executed = quickened(executed, changes=False)  # it is small to begin with
    if executed is not None:
        executed.check()
    parts = [_simulated(file, points, workers, engine, progress)]
    if executed is not None:
        parts.append(_executed(executed, progress))
    result = StudyResult(file.study, parts, _notes(file, execute), quick)
    return Answer(lambda: study_json(result), lambda: study_view(result, command), result)


def _simulated(file: "StudyFile", points: "StudyPoints", workers: int | None, engine: str, watch: Watch) -> "StudyPart":
    from perfmodel.planning.study import StudyPart, with_quality
    from perfmodel.planning.sweep import sweep

    scenario = points.check()
    with watch("simulating") as progress:
        records = points.located(lambda: sweep(list(points.points.values()), progress, workers, engine))
    answers = with_quality(points.answered(records), file)
    return StudyPart(scenario, {"simulated": answers})


def _executed(points: "StudyPoints", watch: Watch) -> "StudyPart":
    from perfmodel.evidence.executed.study import execute_study
    from perfmodel.planning.study import StudyPart, with_quality

    scenario = points.check()
    with watch("executing") as progress:
        answers: dict[str, Answers] = execute_study(points, progress)
    answers = {clock: with_quality(each, points.file) for clock, each in answers.items()}
    return StudyPart(scenario, answers)


def _notes(file: "StudyFile", execute: bool) -> list[str]:
    from perfmodel.planning.study import quality_note

    part = file.study.executed
    of_quality = [note] if (note := quality_note(file)) else []
    if part is None or not execute:
        return of_quality
    apart = (
        "Executed points share one drift meter; the simulations beside them come from one calibration for each model "
    )
    apart += "and format, minutes apart, so that the machine's drift between calibrations is in the simulated gains."
    return [*of_quality, apart, *(f"Not executed: {label}: {why}" for label, why in part.leave_out.items())]

"""The deployment that serves a rate within its SLO, or does an offline job: `perfmodel plan`."""

__all__ = ["Tell", "answer_plan", "told"]

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.answers.answer import Answer, Watch, unwatched
from perfmodel.answers.asked import MOST_KINDS, Asked, load

if TYPE_CHECKING:
    from perfmodel.planning.finalist import Preliminary, PreliminaryJob

Tell = Callable[["Preliminary | PreliminaryJob"], None]


def answer_plan(
    asked: Asked,
    overrides: Sequence[str] | None = None,
    store: Path | None = None,
    workers: int | None = None,
    engine: str = "local",
    progress: Watch = unwatched,
    tell: Tell | None = None,
    say: Callable[[str], None] | None = None,
    command: str = "",
) -> Answer:
    """The plan; `result` is a PlanResult or, of an offline objective, a JobPlan, whose `winner` is None where nothing
    does what is asked for.

    overrides: as `--set` takes them
    store:     file with points that are already known, and for those evaluated now; default: the user's
    workers, engine: as of `perfmodel.planning.sweep`
    progress:  a stage's name -> what shows how far it is
    tell:      called with what the screen has found, before anything is simulated; `told` says it in a sentence
    say:       called with what is assumed where the flags leave it open, before the minutes that a plan may take
    command:   that the document says to give the answer again

    Raises SpecError for a scenario without an SLO or a rate, or with a mistake in it.
    """
    from perfmodel.planning.result import PlanResult
    from perfmodel.planning.search import make_plan

    source = asked.source(MOST_KINDS)
    assumed = asked.assumed(load(source, overrides), overrides, {"engine.tensor_parallel_size"})
    if say is not None:
        for sentence in assumed:
            say(sentence)
    planned = make_plan(source, overrides or (), store, workers, engine, progress, tell)
    result = replace(planned, notes=[*assumed, *planned.notes])
    if isinstance(result, PlanResult):
        from perfmodel.report.views.plan import brief_view, plan_json, plan_question, plan_view

        return Answer(
            lambda: plan_json(result),
            lambda: plan_view(result, command),
            result,
            lambda: brief_view(result, plan_question(result)),
        )
    from perfmodel.report.views.plan import job_json, job_view

    return Answer(lambda: job_json(result), lambda: job_view(result, command), result)


def told(found: "Preliminary | PreliminaryJob") -> str:
    """What the screen has found, in a sentence."""
    from perfmodel.report.views.plan import preliminary_sentence

    return preliminary_sentence(found)

"""What a simulated run gives: `perfmodel simulate`."""

__all__ = ["answer_of_run", "answer_run", "simulated"]

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.answers.answer import Answer, Progress
from perfmodel.answers.asked import Asked

if TYPE_CHECKING:
    from perfmodel.report.document import Document
    from perfmodel.sim.records.result import RunResult
    from perfmodel.specs.scenario import Scenario


def answer_run(
    asked: Asked, overrides: Sequence[str] | None = None, seed: int | None = None, progress: Progress | None = None
) -> Answer:
    """Latencies, throughput, goodput, cost, and what bounds them, with intervals; `result` is the RunResult.

    overrides: as `--set` takes them
    seed:      of the scenario

    Raises SpecError for what cannot be read, DoesNotFitError for a model too large for the devices, WorkloadError for
    traffic that cannot be served.
    """
    loaded = asked.load(overrides, seed)
    return answer_of_run(simulated(loaded, asked.assumed(loaded, overrides), progress))


def simulated(
    scenario: "Scenario", notes: Sequence[str] = (), progress: Progress | None = None, out: Path | None = None
) -> "RunResult":
    """The run of `perfmodel simulate`.

    notes: of the answer, before the run's own
    out:   folder to stream records to; step records are kept in memory only beside them
    """
    from perfmodel import sim

    keep_steps = None if out else False
    result = sim.simulate(scenario, progress=progress, out=out, keep_steps=keep_steps, intervals=True)
    return replace(result, notes=(*notes, *result.notes))


def answer_of_run(result: "RunResult") -> Answer:
    """What is said of a run, simulated or executed."""

    def document() -> "Document":
        from perfmodel.report.views.run import run_view

        return run_view(result)

    def brief() -> "Document":
        from perfmodel.report.views.brief import run_brief

        return run_brief(result)

    return Answer(result.to_json, document, result, brief)

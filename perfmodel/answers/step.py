"""Where the time of a step, or of a run's steps, goes: `perfmodel explain` and `perfmodel roofline`."""

__all__ = ["answer_occupancy", "answer_roofline", "answer_run_steps", "answer_step"]

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from perfmodel.answers.answer import Answer, Progress
from perfmodel.answers.asked import Asked

if TYPE_CHECKING:
    from perfmodel.planning.typical_step import StepReport
    from perfmodel.report.document import Document


def answer_step(
    asked: Asked,
    overrides: Sequence[str] | None = None,
    batch: int | None = None,
    context: int | None = None,
    prefill: int | None = None,
    seed: int | None = None,
) -> Answer:
    """One step operator by operator; `result` is the StepReport.

    asked:     the scenario
    overrides: as `--set` takes them
    batch, context: of a step that decodes: sequences, and tokens in the KV cache of each
    prefill:   of a step that prefills: tokens of its prompt; without any of them it is the typical decode step
    seed:      of the scenario

    Raises SpecError for what cannot be read, DoesNotFitError for a step too large for the devices.
    """
    report = _report(asked, overrides, batch, context, prefill, seed)

    def brief() -> "Document":
        from perfmodel.report.views.brief import step_brief

        return step_brief(report)

    return Answer(report.to_json, lambda: _view(report), report, brief)


def answer_roofline(
    asked: Asked,
    overrides: Sequence[str] | None = None,
    batch: int | None = None,
    context: int | None = None,
    prefill: int | None = None,
) -> Answer:
    """See `answer_step`: the same step under the device's roofline, with the ridge point of each dtype."""
    report = _report(asked, overrides, batch, context, prefill, None)

    def data() -> dict[str, object]:
        from perfmodel.report.views.step import ridge_points

        return {**report.to_json(), "ridge_flop_per_byte": ridge_points(report.scenario.hardware)}

    return Answer(data, lambda: _view(report, is_roofline=True), report)


def answer_run_steps(
    asked: Asked, overrides: Sequence[str] | None = None, seed: int | None = None, progress: Progress | None = None
) -> Answer:
    """Kinds of steps of a whole run, and what their time went to; `result` is the RunResult.

    overrides, seed: as of `answer_step`
    """
    scenario = asked.load(overrides, seed)
    from perfmodel import sim
    from perfmodel.report.views.step import kinds_of_steps, kinds_view

    result = sim.simulate(scenario, progress=progress)
    result = replace(result, notes=(*asked.assumed(scenario, overrides), *result.notes))
    kinds = kinds_of_steps(result.steps) if result.steps is not None else []

    def data() -> dict[str, object]:
        shares = {key: result.summary.get(key) for key in ("bound_share", "mfu", "mbu", "duration", "origin")}
        data = {"scenario": scenario.name, **shares, "steps": [asdict(kind) for kind in kinds]}
        return {**data, "notes": list(result.notes), "provenance": result.provenance("steps of a run")}

    return Answer(data, lambda: kinds_view(result, kinds), result)


def answer_occupancy(report: "StepReport", progress: Progress | None = None) -> Answer:
    """What the executor's kernels of a step take of its GPU, compiled for it."""
    from perfmodel.evidence.executed.bridge import explain_occupancy
    from perfmodel.report.views.step import occupancy_view

    rows = explain_occupancy(report.scenario, report.shape, progress)

    def data() -> dict[str, object]:
        return {
            "scenario": report.scenario.name,
            "step": report.label,
            "kernels": rows,
            "notes": list(report.assumed),
            "provenance": report.provenance("kernels of a step"),
        }

    return Answer(data, lambda: occupancy_view(report, rows), report)


def _report(
    asked: Asked,
    overrides: Sequence[str] | None,
    batch: int | None,
    context: int | None,
    prefill: int | None,
    seed: int | None,
) -> "StepReport":
    loaded = asked.load(overrides, seed)
    from perfmodel.planning.typical_step import estimate_choice

    return replace(estimate_choice(loaded, batch, context, prefill), assumed=asked.assumed(loaded, overrides))


def _view(report: "StepReport", is_roofline: bool = False) -> "Document":
    from perfmodel.report.views.step import step_view

    return step_view(report, is_roofline=is_roofline)

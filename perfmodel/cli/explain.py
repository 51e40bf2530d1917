"""`perfmodel explain SCENARIO`: where the time of a step, or of a run, goes."""

__all__ = ["Batch", "Context", "Prefill", "explain"]

from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli.asked import Asked
from perfmodel.cli.flags import takes_flags
from perfmodel.cli.options import JsonFlag, Overrides, Seed, count
from perfmodel.cli.terminal import answer, progress_bar
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.planning.sweeps.step_report import StepReport
    from perfmodel.specs.scenario import Scenario

Batch = Annotated[
    int | None,
    typer.Option("--batch", parser=count, metavar="N", help="Decode this many sequences.", show_default=False),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        parser=count,
        metavar="N",
        help="Tokens in each sequence's KV cache; 8k is 8,000, 8K is 8,192.",
        show_default=False,
    ),
]
Prefill = Annotated[
    int | None,
    typer.Option(
        "--prefill", parser=count, metavar="N", help="Prefill a prompt of this many tokens.", show_default=False
    ),
]
WholeRun = Annotated[bool, typer.Option("--run", help="Simulate, and show what the whole run's time went to.")]
Occupancy = Annotated[
    bool,
    typer.Option("--occupancy", help="Compile the executor's kernels for this GPU; show what they take of it."),
]


@takes_flags("model", "hardware", "rate", "traffic")
def explain(
    asked: Asked,
    overrides: Overrides = None,
    batch: Batch = None,
    context: Context = None,
    prefill: Prefill = None,
    whole_run: WholeRun = False,
    occupancy: Occupancy = False,
    as_json: JsonFlag = False,
    seed: Seed = None,
) -> None:
    """Show one step operator by operator: FLOPs, bytes, intensity, time, bound.

    Without a batch, a context or a prefill it is the scenario's typical decode step: the mean batch that the
    arrival rate implies (Little's law), each sequence with its prompt and half of its answer. `--occupancy` compiles
    the step's Triton kernels ahead of time, no GPU needed: registers, SRAM, spills, thread blocks, waves.
    """
    if occupancy and whole_run:
        raise SpecError("--occupancy explains the kernels of one step; leave --run out.")
    if prefill is not None and (batch is not None or context is not None):
        raise SpecError("--prefill does not go with --batch and --context: one step prefills or decodes here.")
    if whole_run and (prefill or batch or context):
        raise SpecError("--run explains the whole run; leave --batch, --context and --prefill out.")
    loaded = asked.load(overrides, seed)
    if whole_run:
        _explain_run(loaded, asked.assumed(loaded), as_json)
        return
    from dataclasses import replace

    from perfmodel.planning.sweeps.step_report import estimate_choice
    from perfmodel.report.views.step import step_view

    report = replace(estimate_choice(loaded, batch, context, prefill), assumed=asked.assumed(loaded))
    if occupancy:
        _explain_occupancy(report, as_json)
    else:
        answer(step_view(report), report.to_json(), as_json)


def _explain_run(scenario: "Scenario", assumed: tuple[str, ...], as_json: bool) -> None:
    from dataclasses import asdict, replace

    from perfmodel import sim
    from perfmodel.report.views.step import kinds_of_steps, kinds_view

    with progress_bar("simulating") as progress:
        result = sim.simulate(scenario, progress=progress)
    result = replace(result, notes=(*assumed, *result.notes))
    kinds = kinds_of_steps(result.steps) if result.steps is not None else []
    shares = {key: result.summary.get(key) for key in ("bound_share", "mfu", "mbu", "duration", "origin")}
    data = {"scenario": scenario.name, **shares, "steps": [asdict(kind) for kind in kinds]}
    data["notes"], data["provenance"] = list(result.notes), result.provenance("steps of a run")
    answer(kinds_view(result, kinds), data, as_json)


def _explain_occupancy(report: "StepReport", as_json: bool) -> None:
    from perfmodel.report.views.step import occupancy_view
    from perfmodel.validate.executed.bridge import explain_occupancy

    with progress_bar("compiling") as progress:
        rows = explain_occupancy(report.scenario, report.shape, progress)
    data = {
        "scenario": report.scenario.name,
        "step": report.label,
        "kernels": rows,
        "notes": list(report.assumed),
        "provenance": report.provenance("kernels of a step"),
    }
    answer(occupancy_view(report, rows), data, as_json)

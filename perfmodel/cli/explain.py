"""`perfmodel explain SCENARIO`: where the time of a step, or of a run, goes."""

__all__ = ["Batch", "Context", "Prefill", "explain", "step_document"]

from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli.options import JsonFlag, Overrides, ScenarioName, Seed, load
from perfmodel.cli.terminal import print_json, progress_bar, stdout
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.report.runs.step_view import StepReport
    from perfmodel.specs.scenario import Scenario

Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Decode this many sequences.", show_default=False)]
Context = Annotated[
    int | None, typer.Option("--context", min=1, help="Tokens in each sequence's KV cache.", show_default=False)
]
Prefill = Annotated[
    int | None, typer.Option("--prefill", min=1, help="Prefill a prompt of this many tokens.", show_default=False)
]
WholeRun = Annotated[bool, typer.Option("--run", help="Simulate, and show what the whole run's time went to.")]
Occupancy = Annotated[
    bool,
    typer.Option("--occupancy", help="Compile the executor's kernels for this GPU; show what they take of it."),
]


def explain(
    scenario: ScenarioName,
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
    loaded = load(scenario, overrides, seed)
    if whole_run:
        _explain_run(loaded, as_json)
        return
    from perfmodel.report.runs.step_view import estimate_choice

    report = estimate_choice(loaded, batch, context, prefill)
    if occupancy:
        _explain_occupancy(loaded, report, as_json)
        return
    if as_json:
        print_json(step_document(loaded, report))
        return
    _print_step(loaded, report)


def _print_step(scenario: "Scenario", report: "StepReport") -> None:
    from perfmodel.report.runs.facts import headline
    from perfmodel.report.runs.step_table import step_table
    from perfmodel.report.runs.tables import bound_line

    console, estimate = stdout(), report.estimate
    console.print(f"[bold]{headline(scenario)}[/bold]: {report.label}, per device", highlight=False)
    console.print(step_table(estimate))
    console.print(
        f"{estimate.duration_s * 1e3:.3f} ms a step ({estimate.origin}), {estimate.num_kernels} kernels, "
        f"MFU {estimate.mfu:.1%}, MBU {estimate.mbu:.1%}; bound by",
        bound_line(estimate.bound_share),
        highlight=False,
    )
    if estimate.pipeline is not None:
        from perfmodel.report.runs.step_table import pipeline_line

        console.print(pipeline_line(estimate.pipeline), highlight=False)


def step_document(scenario: "Scenario", report: "StepReport") -> dict[str, Any]:
    """The JSON form of one explained step; quantities are totals over the operator's `count` runs on one device."""
    from dataclasses import asdict

    estimate, shape = report.estimate, report.shape
    return {
        "scenario": scenario.name,
        "step": report.label,
        "num_tokens": shape.num_tokens,
        "num_decodes": shape.num_decodes,
        "decode_context": shape.decode_context,
        "duration_s": estimate.duration_s,
        "device_s": estimate.device_s,
        "flops": estimate.flops,
        "hbm_bytes": estimate.hbm_bytes,
        "mfu": estimate.mfu,
        "mbu": estimate.mbu,
        "bound_share": estimate.bound_share,
        "origin": estimate.origin,
        **({} if estimate.pipeline is None else {"pipeline": asdict(estimate.pipeline)}),
        "operators": [
            {
                "name": row.name,
                "family": row.work.family,
                "rate": row.work.rate,
                "count": row.count,
                "flops": row.flops,
                "hbm_bytes": row.hbm_bytes,
                "message_bytes": row.message_bytes,
                "link": row.link or None,
                "num_nodes": row.num_nodes,
                "intensity": row.intensity,
                "duration_s": row.duration_s,
                "bound": row.bound,
            }
            for row in estimate.rows
        ],
    }


def _explain_run(scenario: "Scenario", as_json: bool) -> None:
    from dataclasses import asdict

    from perfmodel import sim
    from perfmodel.report.runs.facts import headline
    from perfmodel.report.runs.step_table import kinds_of_steps, kinds_table
    from perfmodel.report.runs.tables import bound_line

    with progress_bar("simulating") as progress:
        result = sim.simulate(scenario, progress=progress)
    kinds = kinds_of_steps(result.steps) if result.steps is not None else []
    if as_json:
        shares = {key: result.summary.get(key) for key in ("bound_share", "mfu", "mbu", "duration", "origin")}
        print_json({"scenario": scenario.name, **shares, "steps": [asdict(kind) for kind in kinds]})
        return
    console = stdout()
    console.print(f"[bold]{headline(scenario)}[/bold]: the whole run, simulated", highlight=False)
    console.print(kinds_table(kinds))
    console.print("Time bound by:", bound_line(result.summary.get("bound_share") or {}), highlight=False)


def _explain_occupancy(scenario: "Scenario", report: "StepReport", as_json: bool) -> None:
    from perfmodel.report.runs.occupancy_table import occupancy_table
    from perfmodel.validate.executed.bridge import explain_occupancy

    with progress_bar("compiling") as progress:
        rows = explain_occupancy(scenario, report.shape, progress)
    if as_json:
        print_json({"scenario": scenario.name, "step": report.label, "kernels": rows})
        return
    console = stdout()
    console.print(f"[bold]{report.label}[/bold]: kernels compiled for {scenario.hardware.name}", highlight=False)
    console.print(occupancy_table(rows))

"""`perfmodel plan SCENARIO`: the deployment that serves the traffic within its SLO, best by an objective."""

__all__ = ["plan"]

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.asked import (
    MOST_KINDS,
    E2eFlag,
    HardwareFlag,
    ModelFlag,
    RateFlag,
    TpotFlag,
    TrafficFlag,
    TtftFlag,
    asked_scenario,
    say_assumed,
)
from perfmodel.cli.options import (
    EngineName,
    Given,
    JsonFlag,
    Overrides,
    ReportFile,
    ScenarioOrFlags,
    command_line,
    load,
)
from perfmodel.cli.terminal import EXIT_NO_ANSWER, answer, progress_bar, say
from perfmodel.errors import SpecError

ExportFolder = Annotated[
    Path | None,
    typer.Option(
        "--export", metavar="DIR", help="Write the choice as serve.sh (vLLM) and as a scenario.", show_default=False
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


def plan(
    scenario: ScenarioOrFlags = None,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
    report_file: ReportFile = None,
    export: ExportFolder = None,
    store: StoreFile = None,
    engine: EngineName = "local",
    model: ModelFlag = None,
    hardware: HardwareFlag = None,
    rate: RateFlag = None,
    ttft: TtftFlag = None,
    tpot: TpotFlag = None,
    e2e: E2eFlag = None,
    traffic: TrafficFlag = None,
) -> None:
    """Find the deployment that serves a scenario's rate within its SLO: cheapest, fewest GPUs, most goodput per GPU, or
    lowest latency; or that does its offline job: at the lowest cost before a deadline, or first.

    The scenario's `plan` block says what to look for, and where (`--set plan.objective=fewest_gpus`,
    `--set plan.space.hardware=[a100-sxm-80gb, h100-sxm-80gb]`). Candidates are screened in closed form, the best are
    simulated. Every simulated point is stored: a plan that was stopped resumes where it was. Exit status: 0 with a
    deployment, 1 where none serves what is asked for, 2 for what cannot be read.
    """
    from perfmodel.planning.deployments.result import PlanResult
    from perfmodel.planning.search import make_plan
    from perfmodel.report.views.plan.job import job_json, job_view
    from perfmodel.report.views.plan.sentences import preliminary_sentence
    from perfmodel.report.views.plan.view import plan_json, plan_view
    from perfmodel.report.written import check_report_file

    check_report_file(report_file)
    flags: dict[str, Given] = {"model": model, "hardware": hardware, "rate": rate, "ttft": ttft, "tpot": tpot}
    flags |= {"e2e": e2e, "traffic": traffic}
    asked = asked_scenario(scenario, flags, MOST_KINDS)
    if scenario is None:
        say_assumed(load(asked, overrides), flags)
    result = make_plan(
        asked,
        overrides or (),
        store,
        None,
        engine,
        progress_bar,
        lambda found: say(preliminary_sentence(found)),
    )
    command = command_line("plan", *([scenario] if scenario else []), **flags, set=overrides, report=report_file)
    if isinstance(result, PlanResult):
        if export is not None:
            from perfmodel.planning.deployments.export import export_plan

            for written in export_plan(result, export):
                say(f"Written to {written}")
        answer(plan_view(result, command), plan_json(result), as_json, report_file)
        _leave_unless_found(result.winner)
        return
    if export is not None:
        raise SpecError(f"--export {export}: writes what serves a rate; of a job the answer has the command.")
    answer(job_view(result, command), job_json(result), as_json, report_file)
    _leave_unless_found(result.winner)


def _leave_unless_found(winner: object) -> None:
    """Scripts see by the status that nothing serves what was asked for."""
    if winner is None:
        raise typer.Exit(EXIT_NO_ANSWER)

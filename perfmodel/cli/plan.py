"""`perfmodel plan SCENARIO`: the deployment that serves the traffic within its SLO, best by an objective."""

__all__ = ["plan"]

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.options import EngineName, JsonFlag, Overrides, ScenarioName
from perfmodel.cli.terminal import print_json, progress_bar, say, stdout
from perfmodel.errors import SpecError

ExportFolder = Annotated[
    Path | None,
    typer.Option(
        "--export", metavar="DIR", help="Write the choice as serve.sh (vLLM) and as a scenario.", show_default=False
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write FILE.md with pictures, or FILE.html.", show_default=False),
]
StoreFile = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="FILE",
        help="Where evaluated points are kept; by default in the user's cache folder.",
        show_default=False,
    ),
]


def plan(
    scenario: ScenarioName,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
    report_file: ReportFile = None,
    export: ExportFolder = None,
    store: StoreFile = None,
    engine: EngineName = "local",
) -> None:
    """Find the deployment that serves a scenario's rate within its SLO: cheapest, fewest GPUs, most goodput per GPU, or
    lowest latency; or that does its offline job: for the least money before a deadline, or first.

    The scenario's `plan` block says what to look for, and where (`--set plan.objective=fewest_gpus`,
    `--set plan.space.hardware=[a100-sxm-80gb, h100-sxm-80gb]`). Candidates are screened in closed form, the best are
    simulated. Every simulated point is kept: a plan that was stopped goes on where it was.
    """
    if report_file is not None and report_file.suffix not in (".md", ".html"):
        raise SpecError(f"--report {report_file}: allowed a file ending in .md or .html.")
    from perfmodel.plan.search import make_plan

    result = make_plan(scenario, overrides or (), store, None, engine, progress_bar)
    if report_file is not None:
        from perfmodel.report.plans.written import write_plan

        for written in write_plan(result, report_file, _command(scenario, overrides, report_file)):
            say(f"Written to {written}")
    if export is not None:
        from perfmodel.plan.deployments.export import export_plan
        from perfmodel.plan.deployments.result import PlanResult

        if not isinstance(result, PlanResult):
            raise SpecError(f"--export {export}: writes what serves a rate; of a job the answer has the command.")

        for written in export_plan(result, export):
            say(f"Written to {written}")
    if as_json:
        print_json(result.to_json())
    else:
        from perfmodel.report.plans.printed import print_plan

        print_plan(result, stdout())


def _command(scenario: str, overrides: list[str] | None, report_file: Path) -> str:
    """The command as anyone would give it."""
    shown = Path(scenario).name if Path(scenario).is_absolute() else scenario
    name = report_file.name if report_file.is_absolute() else report_file.as_posix()
    return " ".join(["perfmodel plan", shown, *(f"--set {text}" for text in overrides or ()), f"--report {name}"])

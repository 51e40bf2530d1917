"""`perfmodel roofline SCENARIO`: a step's operators under the device's roofline."""

__all__ = ["roofline"]

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli.explain import Batch, Context, Prefill, step_document
from perfmodel.cli.options import JsonFlag, Overrides, ScenarioName, load
from perfmodel.cli.runs import open_folder
from perfmodel.cli.terminal import print_json, stdout

PlotPath = Annotated[
    Path, typer.Option("--out", metavar="PATH", help="An .html file, or a folder to put roofline-SCENARIO.html in.")
]


def roofline(
    scenario: ScenarioName,
    overrides: Overrides = None,
    batch: Batch = None,
    context: Context = None,
    prefill: Prefill = None,
    out: PlotPath = Path("out"),
    as_json: JsonFlag = False,
) -> None:
    """Plot a step's operators on the roofline, with the ridge point of each dtype.

    Which step: as for `explain`.
    """
    loaded = load(scenario, overrides)
    from perfmodel.report.runs.html import render_step, write_text
    from perfmodel.report.runs.step_table import step_table
    from perfmodel.report.runs.step_view import estimate_choice, ridge_points
    from perfmodel.report.runs.tables import rows_table

    report = estimate_choice(loaded, batch, context, prefill)
    ridges = ridge_points(loaded.hardware)
    path = _plot_path(out, loaded.name)
    write_text(path, render_step(loaded, report.view(loaded)))
    if as_json:
        print_json({**step_document(loaded, report), "ridge_flop_per_byte": ridges, "plot": str(path)})
        return
    console = stdout()
    console.print(f"[bold]{loaded.hardware.name}[/bold]: ridge points, FLOP per byte of main memory", highlight=False)
    console.print(rows_table(("dtype", "FLOP/byte"), [(rate, f"{ridge:.1f}") for rate, ridge in ridges.items()]))
    console.print(f"{report.label}, per device", highlight=False)
    console.print(step_table(report.estimate))
    console.print(f"Plot: {path}", highlight=False)


def _plot_path(out: Path, name: str) -> Path:
    if out.suffix == ".html":
        open_folder(out.parent)
        return out
    return open_folder(out) / f"roofline-{name}.html"

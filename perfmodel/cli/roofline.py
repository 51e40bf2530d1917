"""`perfmodel roofline SCENARIO`: a step's operators under the device's roofline."""

__all__ = ["roofline"]

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from perfmodel.answers.asked import STEP_FLAGS, Asked
from perfmodel.answers.short_forms import STEP_FORMS
from perfmodel.cli.explain import Batch, Context, Prefill
from perfmodel.cli.flags import takes_flags, takes_short_forms
from perfmodel.cli.options import JsonFlag, Overrides
from perfmodel.cli.terminal import give
from perfmodel.errors import SpecError

_OTHER_FORMATS = (".csv", ".htm", ".jpeg", ".jpg", ".json", ".md", ".pdf", ".png", ".svg", ".txt")

PlotPath = Annotated[
    Path, typer.Option("--out", metavar="PATH", help="An .html file, or a folder to put roofline-SCENARIO.html in.")
]


@takes_flags(*STEP_FLAGS)
@takes_short_forms(*STEP_FORMS)
def roofline(
    asked: Asked,
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
    from perfmodel.answers.step import answer_roofline
    from perfmodel.files.whole import write_whole
    from perfmodel.report.pages import render_page

    answer = answer_roofline(asked, overrides, batch, context, prefill)
    path = _plot_path(out, answer.result.scenario.name)
    write_whole(path, render_page(answer.document))
    give(
        replace(answer, make_data=lambda: {**answer.data, "plot": str(path)}, make_document=lambda: answer.document),
        as_json,
    )
    if not as_json:
        print(f"Plot: {path}")


def _plot_path(out: Path, name: str) -> Path:
    if out.suffix == ".html":
        return out
    if out.suffix.lower() in _OTHER_FORMATS and not out.is_dir():
        raise SpecError(f"--out {out}: allowed an .html file, or a folder to put roofline-{name}.html in.")
    return out / f"roofline-{name}.html"

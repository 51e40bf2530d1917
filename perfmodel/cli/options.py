"""The flags that several commands share, each written once."""

__all__ = [
    "Details",
    "EngineName",
    "JsonFlag",
    "OutFolder",
    "Overrides",
    "ReportFile",
    "ScenarioName",
    "ScenarioOrFlags",
    "Seed",
    "count",
]

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli import completion

ScenarioName = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO",
        help="A scenario's name, a path to a scenario file, or - for stdin.",
        show_default=False,
        autocompletion=completion.scenarios,
    ),
]
# Of commands that also take what `perfmodel.answers.asked` reads, in place of a file.
ScenarioOrFlags = Annotated[
    str | None,
    typer.Argument(
        metavar="SCENARIO",
        help="A scenario's name, a path to its file, or - for stdin; or none, and --model and --hardware.",
        show_default=False,
        autocompletion=completion.scenarios,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one field, for example engine.max_num_seqs=64. May be given several times.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Override the scenario's seed.", show_default=False)]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Details = Annotated[bool, typer.Option("--details", help="All sentences, tables and notes.")]
OutFolder = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Write records, report.html and timeline.json to this folder.", show_default=False
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write FILE.md with pictures, or FILE.html.", show_default=False),
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help="Where points are worked on: local, ray, ray:HOST:PORT or ray://HOST:PORT (extra ray).",
    ),
]


def count(text: str | int) -> int:
    """The number of `64`, `8k` or `8K`. Raises BadParameter for what is none."""
    from perfmodel.files.units import parse_count

    try:
        found = int(parse_count(text))
    except ValueError:
        raise typer.BadParameter(
            f"found {text!r}, allowed a whole number, as in 64, 8k (8,000) or 8K (8,192)"
        ) from None
    if found < 1:
        raise typer.BadParameter(f"found {text}, allowed a number of at least 1")
    return found

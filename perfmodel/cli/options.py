"""The flags that several commands share; each is written once, so that it means the same everywhere."""

__all__ = ["EngineName", "JsonFlag", "OutFolder", "Overrides", "ReportFile", "ScenarioName", "Seed", "load"]

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from perfmodel.specs.scenario import Scenario

ScenarioName = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="A scenario's name, or a path to a scenario file.", show_default=False)
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


def load(scenario: str, overrides: list[str] | None, seed: int | None = None) -> "Scenario":
    """The scenario with `--set` and `--seed` applied."""
    from perfmodel.specs import load_scenario

    changes = list(overrides or ())
    if seed is not None:
        changes.append(f"seed={seed}")
    return load_scenario(scenario, changes)

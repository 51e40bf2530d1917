"""The flags that several commands share, each written once; and a command with its flags as anyone would type it."""

__all__ = [
    "EngineName",
    "Given",
    "JsonFlag",
    "OutFolder",
    "Overrides",
    "ReportFile",
    "ScenarioName",
    "ScenarioOrFlags",
    "Seed",
    "command_line",
    "count",
    "load",
]

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli import completion

if TYPE_CHECKING:
    from perfmodel.specs.scenario import Scenario

Given = str | int | Path | list[str] | None


def command_line(name: str, *arguments: str, **flags: Given) -> str:
    """`perfmodel NAME ARGUMENTS --flag value ...`; flags that were not given (None, False, no values) are left out.

    Of a path elsewhere the last two parts are shown, of a file to be written there its name.
    """
    texts = [f"perfmodel {name}", *(shlex.quote(_place(argument)) for argument in arguments)]
    for flag, value in flags.items():
        texts += _texts(f"--{flag}", value)
    return " ".join(texts)


def _texts(flag: str, value: Given) -> Iterator[str]:
    for each in value if isinstance(value, list) else [value]:
        if each is True:
            yield flag
        elif isinstance(each, Path):
            yield f"{flag} {shlex.quote(each.name if each.is_absolute() else each.as_posix())}"
        elif each is not None and each is not False:
            yield f"{flag} {shlex.quote(str(each))}"


def _place(argument: str) -> str:
    is_elsewhere = argument.startswith(("/", "../"))
    return "/".join(Path(argument).parts[-2:]) if is_elsewhere else argument


ScenarioName = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO",
        help="A scenario's name, a path to a scenario file, or - for stdin.",
        show_default=False,
        autocompletion=completion.scenarios,
    ),
]
# Of commands that also take what `perfmodel.cli.asked` reads, in place of a file.
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


def load(scenario: str, overrides: list[str] | None, seed: int | None = None) -> "Scenario":
    """The scenario, of stdin for `-`, with `--set` and `--seed` applied."""
    from perfmodel.specs import load_scenario
    from perfmodel.specs.scenario_source import given_source

    changes = list(overrides or ())
    if seed is not None:
        changes.append(f"seed={seed}")
    return load_scenario(given_source(scenario), changes)

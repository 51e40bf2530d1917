"""`perfmodel new LINE`: the scenario of a command line as it is, of a server and of a load test; never executed."""

__all__ = ["new"]

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli.asked import TRAFFIC, Asked
from perfmodel.cli.flags import takes_flags
from perfmodel.cli.terminal import say
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.specs.commands.line import LineScenario

_LONGEST = 1_000_000
_FILES = (".sh", ".yaml", ".yml", ".txt", ".env")


@takes_flags(has_file=False)
def new(
    line: Annotated[
        str,
        typer.Argument(
            metavar="LINE",
            help="A command line in quotes, a file that holds one (script, compose file, manifest), or - for stdin.",
            show_default=False,
        ),
    ],
    asked: Asked,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse what affects time and is not modelled; else it is a warning.")
    ] = False,
) -> None:
    """Print the scenario that a command line stands for: `vllm serve ...`, `sglang serve ...`, `trtllm-serve ...`, with
    its load test. It is read, never executed."""
    from perfmodel.specs import load_scenario
    from perfmodel.specs.commands.written import scenario_text
    from perfmodel.specs.scenario_source import as_text

    text, place, folder = _read(line)
    found = _scenario(text, place, folder, asked)
    for what, why in found.unmodelled:
        if strict:
            raise SpecError(
                f"--strict: {what}: affects time and is not modelled ({why}); take it out of the line, or leave out "
                f"--strict."
            )
    load_scenario(as_text(found.data, found.said))
    for what, why in found.unmodelled:
        say(f"warning: {what}: affects time and is not modelled ({why}).")
    typer.echo(scenario_text(found), nl=False)


def _read(line: str) -> tuple[str, str, Path]:
    """The text, what errors call it, and the folder that its files are in."""
    if line == "-":
        from perfmodel.specs.scenario_source import read_stdin

        return read_stdin(), "stdin", Path()
    from perfmodel.files.catalog import expanded

    path = expanded(line)
    try:
        is_file = "\n" not in line and path.is_file()
    except (OSError, ValueError):
        is_file = False
    if not is_file and len(line.split()) == 1 and path.suffix in _FILES:
        raise SpecError(f"{line}: no such file; give one, or a command line in quotes.")
    if not is_file:
        return line, "line", Path()
    from perfmodel.files.bounded import read_bounded_text

    try:
        return read_bounded_text(path, _LONGEST), path.name, path.parent
    except (OSError, UnicodeError) as error:
        raise SpecError(f"{line}: cannot be read as text: {error}.") from None


def _scenario(text: str, place: str, folder: Path, asked: Asked) -> "LineScenario":
    """What the line says, completed by the flags, and by what is assumed where neither says it."""
    from dataclasses import replace

    from perfmodel.specs.commands.line import Asking, read_line
    from perfmodel.specs.shorthand import name_of, scenario_name

    given = asked.given
    own: dict[str, Any] = {}
    if {"traffic", "ttft", "tpot", "e2e"} & set(given):
        blocks = Asked(None, {**asked.flags, "model": "-", "hardware": given.get("hardware", "cpu")}).data()
        own = {key: blocks[key] for key in ("traffic", "slo") if key in blocks and (key == "slo" or "traffic" in given)}
    said = {block: f"--{block}" for block in own}
    device = name_of("hardware", given["hardware"]) if "hardware" in given else None
    asking = Asking(given.get("model"), device, own, said, folder)
    found = read_line(text, asking, place)
    assumed = []
    if "traffic" not in found.data:
        blocks = Asked(None, {**asked.flags, "model": "-", "hardware": found.data["hardware"]}).data()
        found.data["traffic"] = blocks["traffic"]
        assumed.append(f"traffic {TRAFFIC}, as the line has no load test (--traffic, --rate)")
    elif "rate" in given and "traffic" not in given:
        from perfmodel.files.yaml_loader import parse_value

        arrivals = {"process": "poisson", "rate": parse_value(given["rate"], "--rate")}
        found.data["traffic"] = {**found.data["traffic"], "arrivals": arrivals}
    name = scenario_name(found.data["model"], found.data["hardware"])
    return replace(found, data={"name": name, **found.data}, assumed=(*found.assumed, *assumed))

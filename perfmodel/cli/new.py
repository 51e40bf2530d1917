"""`perfmodel new LINE`: the scenario of a command line as it is, of a server and of a load test; never executed."""

__all__ = ["new"]

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.answers.asked import Asked
from perfmodel.cli.flags import takes_flags
from perfmodel.cli.terminal import say
from perfmodel.errors import SpecError

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
    """Print the scenario that a command line stands for: `vllm serve ...`, `sglang serve ...`, `trtllm-serve ...`,
    `llama-server ...`, `ollama run ...`, with its load test. It is read, never executed."""
    from perfmodel.answers.line import answer_line

    text, place, folder = _read(line)
    answer = answer_line(text, asked, place, folder, strict)
    for warning in answer.warnings:
        say(f"warning: {warning}.")
    typer.echo(answer.text, nl=False)


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
    from perfmodel.files.reach import read_bounded_text

    try:
        return read_bounded_text(path, _LONGEST), path.name, path.parent
    except (OSError, UnicodeError) as error:
        raise SpecError(f"{line}: cannot be read as text: {error}.") from None

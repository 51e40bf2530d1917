"""The page of all commands: each with its arguments, flags, defaults and examples, as the program itself has them."""

__all__ = ["cli_page", "commands"]

import inspect
from collections.abc import Iterator
from enum import Enum
from typing import Any

import typer

from docs_site.tables import as_code, in_cell, table
from perfmodel.cli import app

_HEADER = ("flag", "value", "default", "meaning")


def cli_page() -> str:
    """What the page has below its introduction."""
    return "\n".join(_section(name, command) for name, command in commands())


def commands() -> Iterator[tuple[str, Any]]:
    """(words, command) of every command and sub-command, in the order of `--help`; the program itself first."""
    top = typer.main.get_command(app)
    yield "perfmodel", top
    yield from _below("perfmodel", top)


def _below(name: str, group: Any) -> Iterator[tuple[str, Any]]:
    for word in group.commands:
        command = group.commands[word]
        if not command.hidden:
            yield f"{name} {word}", command
            if hasattr(command, "commands"):
                yield from _below(f"{name} {word}", command)


def _section(name: str, command: Any) -> str:
    text = f"## {name}\n\n{inspect.cleandoc(command.help or '')}\n\n"
    if hasattr(command, "commands") and name != "perfmodel":
        names = ", ".join(f"[`{word}`](#{name} {word})".replace(" ", "-") for word in command.commands)
        text += f"Sub-commands: {names}.\n\n"
    rows = [_row(param) for param in command.params if not getattr(param, "hidden", False)]
    if rows:
        text += table(_HEADER, rows) + "\n"
    if command.epilog:
        lines = [line[2:] for line in command.epilog.splitlines() if line.startswith("- ")]
        text += "```bash\n" + "\n".join(line.strip("`") for line in lines) + "\n```\n"
    return text


def _row(parameter: Any) -> tuple[str, str, str, str]:
    is_argument = parameter.param_type_name == "argument"
    named = [parameter.metavar or parameter.name.upper()] if is_argument else parameter.opts
    flags = ", ".join(as_code(name) for name in [*named, *parameter.secondary_opts])
    meaning = in_cell(parameter.help or "")
    if is_argument and parameter.required:
        meaning = f"{meaning} Required.".strip()
    if parameter.multiple and "several times" not in meaning:
        meaning += " May be given several times."
    return flags, "" if is_argument else _value(parameter), _default(parameter), meaning


def _value(parameter: Any) -> str:
    if getattr(parameter, "is_flag", False):
        return ""
    kind = _kind(parameter)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " ".join(as_code(item.value) for item in kind)
    return as_code(parameter.metavar or getattr(kind, "__name__", "") or getattr(kind, "name", ""))


def _kind(parameter: Any) -> Any:
    """The type of a parameter's value, from typer's own parser or, before 0.28, from click's."""
    described = getattr(parameter, "type_descriptor", None)
    return described.annotation if described is not None else parameter.type


def _default(parameter: Any) -> str:
    value = parameter.default
    if value in (None, False, (), []) or callable(value):
        return ""
    return as_code(getattr(value, "value", value))

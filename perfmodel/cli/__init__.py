"""The command line: one file per command, and what the commands share.

    completion.py the names that a shell completes
    examples.py   what anyone would type, for the end of each --help
    options.py    the flags that several commands have
    terminal.py   consoles, the one JSON document, progress, errors as one line
    runs.py       what `simulate` and `execute` do with a result: tables, JSON, files

A command's file is loaded when its name is given, and imports what it needs when it runs: `perfmodel --help` loads
nothing but typer and rich.
"""

__all__ = ["app", "main"]

import atexit
import gc
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from perfmodel.cli.examples import epilog_of
from perfmodel.cli.terminal import close_stdout, guarded, open_closed_streams, replace_unprintable, say_refused

# In the order of `--help`. The function or app of each is in the module of its name.
_NAMES = (
    *("simulate", "execute", "explain", "roofline", "memory", "calibrate", "validate", "techniques", "quality"),
    *("study", "whatif", "plan", "compare", "serve", "web", "new", "schema", "scenarios", "hardware", "models"),
)


class _Commands(Mapping[str, Any]):
    """The commands by name: one is loaded, and its flags are put together, when it is asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in _NAMES:
            raise KeyError(name)
        if name not in self._loaded:
            found = getattr(import_module(f"perfmodel.cli.{name}"), name)
            alone = typer.Typer(rich_markup_mode="markdown")
            if isinstance(found, typer.Typer):
                alone.add_typer(found, name=name)
            else:
                alone.command()(guarded(found))
            command = self._loaded[name] = typer.main.get_group(alone).commands[name]
            command.epilog = epilog_of(name)
            for sub, each in getattr(command, "commands", {}).items():
                each.epilog = epilog_of(f"{name} {sub}")
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


class _Group(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]  # nothing is added


app = typer.Typer(
    name="perfmodel",
    cls=_Group,
    help="A performance model of LLM inference: simulate a serving scenario, or execute it with the same engine.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _top(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        from perfmodel.version import __version__

        typer.echo(f"perfmodel {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the `perfmodel` command."""
    # A simulation makes many long-lived objects and hardly a cycle: looking for those after every 700 takes a tenth
    # of its time.
    gc.set_threshold(100_000, 20, 20)
    # Nor does the interpreter need to look for them on its way out, when the operating system takes everything back.
    atexit.register(gc.freeze)
    # No plugin of pydantic has a part in the command, and to look for them it reads what every installed package says.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    open_closed_streams()
    replace_unprintable()
    try:
        app(prog_name="perfmodel")
    except OSError as error:  # of what is printed before a command has begun
        sys.exit(say_refused(error))
    finally:
        close_stdout()

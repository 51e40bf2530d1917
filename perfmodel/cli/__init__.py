"""The command line: one file per command, and what the commands share.

    options.py    the flags that several commands have
    terminal.py   consoles, the one JSON document, progress, errors as one line
    runs.py       what `simulate` and `execute` do with a result: tables, JSON, files

Commands import what they need when they run, so that `perfmodel --help` loads nothing but typer and rich.
"""

__all__ = ["app", "main"]

import atexit
import gc
import os

import typer

from perfmodel.cli.calibrate import calibrate
from perfmodel.cli.compare import compare
from perfmodel.cli.execute import execute
from perfmodel.cli.explain import explain
from perfmodel.cli.hardware import hardware_app
from perfmodel.cli.memory import memory
from perfmodel.cli.models import models_app
from perfmodel.cli.plan import plan
from perfmodel.cli.quality import quality
from perfmodel.cli.roofline import roofline
from perfmodel.cli.schema import schema
from perfmodel.cli.simulate import simulate
from perfmodel.cli.study import study
from perfmodel.cli.techniques import techniques
from perfmodel.cli.terminal import guarded
from perfmodel.cli.validate import validate
from perfmodel.cli.whatif import whatif

app = typer.Typer(
    name="perfmodel",
    help="A performance model of LLM inference: simulate a serving scenario, or execute it with the same engine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    simulate,
    execute,
    explain,
    roofline,
    memory,
    calibrate,
    validate,
    techniques,
    quality,
    study,
    whatif,
    plan,
    compare,
):
    app.command()(guarded(_command))
app.add_typer(hardware_app, name="hardware")
app.add_typer(models_app, name="models")
app.command()(guarded(schema))


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
    app(prog_name="perfmodel")

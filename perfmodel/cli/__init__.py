"""The command line: flags, exit codes, stdout and stderr. A command is a request (`perfmodel.commands`); its flags are
its fields, and its answer is printed.

    servers.py    the requests of `serve` and `web`, which are above the commands
    terminal.py   consoles, the one JSON document, progress, errors as one line

A command's module is loaded when its name is given: `perfmodel --help` loads nothing but typer and rich."""

__all__ = ["app", "main"]

import atexit
import dataclasses
import functools
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from perfmodel.cli import terminal
from perfmodel.cli.terminal import progress_lines

if TYPE_CHECKING:
    from perfmodel.commands.request import CommandRequest, Flag

_UsageError: Any = typer.BadParameter.__base__  # of click, or of typer's copy of it

# In the order of `--help`: each command's request. A group has several, whose names begin with its own.
_RUNS, _SEARCHES = "perfmodel.commands.runs", "perfmodel.commands.searches"
_CATALOG, _MEASUREMENTS = "perfmodel.commands.catalog", "perfmodel.commands.measurements"
COMMANDS: dict[str, str | dict[str, str]] = {
    "simulate": f"{_RUNS}:SimulateRequest",
    "execute": f"{_RUNS}:ExecuteRequest",
    "explain": f"{_RUNS}:ExplainRequest",
    "roofline": f"{_RUNS}:RooflineRequest",
    "memory": f"{_RUNS}:MemoryRequest",
    "calibrate": f"{_MEASUREMENTS}:CalibrateRequest",
    "validate": f"{_MEASUREMENTS}:ValidateRequest",
    "techniques": f"{_CATALOG}:TechniquesRequest",
    "quality": f"{_MEASUREMENTS}:QualityRequest",
    "study": f"{_SEARCHES}:StudyRequest",
    "whatif": f"{_SEARCHES}:WhatIfRequest",
    "plan": f"{_SEARCHES}:PlanRequest",
    "compare": f"{_RUNS}:CompareRequest",
    "serve": "perfmodel.cli.servers:ServeRequest",
    "watch": "perfmodel.cli.servers:WatchRequest",
    "web": "perfmodel.cli.servers:WebRequest",
    "new": f"{_CATALOG}:NewRequest",
    "schema": f"{_CATALOG}:SchemaRequest",
    "scenarios": {name: f"{_CATALOG}:Scenarios{name.title()}Request" for name in ("list", "show", "new")},
    "hardware": {name: f"{_CATALOG}:Hardware{name.title()}Request" for name in ("list", "show", "new", "detect")},
    "models": {name: f"{_CATALOG}:Models{name.title()}Request" for name in ("list", "show")},
    "prices": f"{_CATALOG}:PricesRequest",
}
_GROUPS = {
    "scenarios": "List the scenarios and traffic that come along, show one, or make one.",
    "hardware": "List the known devices, or show one.",
    "models": "List the known models, or show one.",
}


class _Commands(Mapping[str, Any]):
    """The commands by name: one is loaded, and its flags are put together, when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@contextmanager
def _one_sentence() -> Iterator[None]:
    """A wrong flag or command as one sentence, like any other mistake."""
    try:
        yield
    except _UsageError as error:
        if not (text := error.format_message()):  # of a group without a command, which has shown its help
            raise
        path = error.ctx.command_path if error.ctx is not None else "perfmodel"
        terminal.say(f"error: {text.rstrip('.').replace('Value error, ', '')} (see `{path} -h`).")
        raise typer.Exit(terminal.EXIT_BAD_INPUT) from None


class _Group(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]  # nothing is added

    def make_context(self, *args: Any, **settings: Any) -> Any:
        with _one_sentence():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        with _one_sentence():
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help of all commands needs their names and first sentences alone, no flags."""
        whole = self.commands
        texts = {name: _GROUPS.get(name) or inspect.getdoc(_request_class(COMMANDS[name])) for name in COMMANDS}
        self.commands = {name: TyperCommand(name, help=text) for name, text in texts.items()}
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = whole


app = typer.Typer(
    name="perfmodel",
    cls=_Group,
    help="A performance model of LLM inference: simulate a serving scenario, or execute it with the same engine.",
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# What `perfmodel` alone shows: a question, and the command that answers it in seconds.
FIRST = {
    "How fast would one H100 serve a chat with Llama 3.1 8B?": (
        "simulate --model llama-3.1-8b --hardware h100 --rate 4"
    ),
    "How many of which device carry 10 requests/s within these limits?": (
        "plan --model llama-3.1-8b --hardware h100,l40s --rate 10 --ttft 1s --tpot 50ms"
    ),
    "Where does the time of a step go?": "explain --model llama-3.1-8b --hardware h100 --batch 32 --context 2048",
}


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and leave.")
) -> None:
    from perfmodel.version import __version__

    if version:
        typer.echo(f"perfmodel {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(f"perfmodel {__version__}: a performance model of LLM inference. To begin with:\n")
        for question, command in FIRST.items():
            typer.echo(f"  {question}\n    perfmodel {command}\n")
        typer.echo("On a page: perfmodel web. All commands: perfmodel --help.")


# ---------------------------------------------------------------- from a request to a command


def _request_class(place: Any) -> "type[CommandRequest]":
    kind: type[CommandRequest] = resolve_name(place)
    return kind


@functools.cache
def _command(name: str) -> Any:
    """What typer makes of a command or of a group of them."""
    place, alone = COMMANDS[name], typer.Typer(rich_markup_mode="markdown")
    if isinstance(place, str):
        _add(alone, place)
        return next(iter(typer.main.get_group(alone).commands.values()))
    group = typer.Typer(help=_GROUPS[name], no_args_is_help=name != "scenarios")
    for sub in place.values():
        _add(group, sub)
    alone.add_typer(group, name=name)
    return typer.main.get_group(alone).commands[name]


def _add(group: typer.Typer, place: str) -> None:
    kind = _request_class(place)
    lines = "\n\n".join(["Examples:", *(f"- `perfmodel {line}`" for line in kind.examples)])
    group.command(kind.command.rpartition(" ")[2], epilog=lines)(terminal.handle_errors(_command_of(kind)))


def _command_of(kind: "type[CommandRequest]") -> Callable[..., None]:
    """A function for typer, whose parameters are the fields of a request, with what only the command line asks."""
    parameters = sorted(_parameters(kind), key=lambda parameter: parameter.default is not inspect.Parameter.empty)

    def run(**given: Any) -> None:
        as_json, has_details = given.pop("as_json", False), given.pop("has_details", True)
        _run(_request_of(kind, given), as_json, has_details)

    run.__doc__ = kind.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    return run


def _parameters(kind: "type[CommandRequest]") -> Iterator[inspect.Parameter]:
    """The parameters of a command."""
    from perfmodel.commands.request import SCENARIO_FLAGS, SHORT_FORMS, Flag

    hints, flags = get_type_hints(kind), kind.flags_of()
    for field in dataclasses.fields(kind):
        if field.name in flags:
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            yield _parameter(field.name, flags[field.name], hints[field.name], default)
    if kind.has_json:
        help_text = "Print one JSON document on stdout and nothing else."
        yield _parameter("as_json", Flag("--json", help_text), bool, False)
    if kind.has_details:
        yield _parameter("has_details", Flag("--details", "All sentences, tables and notes."), bool, False)
    for name in getattr(kind, "short_forms", ()):
        yield _parameter(name, SHORT_FORMS[name].flag, SHORT_FORMS[name].kind | None)
    for name in getattr(kind, "scenario_flags", ()):
        yield _parameter(name.replace("-", "_"), SCENARIO_FLAGS[name], str | None)


def _parameter(name: str, form: "Flag", hint: Any, default: Any = None) -> inspect.Parameter:
    """A command's parameter. name, hint, default: of the field, with its type; form: its flag"""
    if get_origin(hint) is tuple:
        hint, default = list[get_args(hint)[0]] | None, default or None  # type: ignore[misc]
    more: dict[str, Any] = {"help": form.help, "metavar": form.metavar, "show_default": form.shows_default}
    more |= {"hidden": form.is_hidden, "rich_help_panel": form.panel, "min": form.low, "max": form.high}
    if form.completes:
        more["autocompletion"] = _completion(form.completes)
    if form.is_count:
        more["parser"] = _count
    if hint in (Path, Path | None):
        more["parser"] = _path
    names = f"{form.name}/--no-{form.name.removeprefix('--')}" if hint is bool and default is True else form.name
    asked = typer.Argument(**more) if form.is_argument else typer.Option(names, **more)
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, either, default=default, annotation=Annotated[hint, asked])


def _count(text: str) -> int:
    """The number of `64`, `8k` or `8K`. Raises BadParameter for what is none."""
    from perfmodel.commands.request import count

    try:
        return count(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _path(text: str) -> Path:
    """A path. Raises BadParameter for an empty text, which would be this folder."""
    if not text:
        raise typer.BadParameter("got an empty text; expected a path (`.` is this folder)")
    return Path(text)


def _completion(kind: str) -> Callable[[str], list[str]]:
    """Names that a shell completes: of the files that are there, none of which is parsed."""

    def complete(incomplete: str) -> list[str]:
        others, comma, last = incomplete.rpartition(",") if kind == "hardware" else ("", "", incomplete)
        if kind == "hardware":
            from perfmodel.files.device_tables import device_names

            names = list(device_names())
        else:
            from perfmodel.files.catalog import list_names

            names = list_names(kind)  # type: ignore[arg-type]  # one of its kinds
        return [f"{others}{comma}{name}" for name in names if name.startswith(last)]

    return complete


def _request_of(kind: "type[CommandRequest]", given: dict[str, Any]) -> "CommandRequest":
    """The request that parsed parameters make; short forms become overrides."""
    from perfmodel.commands.request import short_overrides

    scenario_flags = getattr(kind, "scenario_flags", ())
    flags = [(name, given.pop(name.replace("-", "_"))) for name in scenario_flags]
    short = {name: given.pop(name) for name in getattr(kind, "short_forms", ())}
    # What typer gives for several values is a list, or nothing.
    several = {name for name in given if isinstance(getattr(kind, name, None), tuple)}
    values = {name: tuple(value or ()) if name in several else value for name, value in given.items()}
    if scenario_flags:
        values["flags"] = tuple((name, value) for name, value in flags if value is not None)
    if short := {name: value for name, value in short.items() if value is not None}:
        hardware = dict(flags).get("hardware") or "" if scenario_flags else None
        values["overrides"] = short_overrides(short, values["overrides"], hardware, kind.command == "plan")
    return kind(**values)


def _run(request: "CommandRequest", as_json: bool, has_details: bool) -> None:
    from perfmodel.commands.request import Console

    report_file = getattr(request, "report", None) if "report" in request.flags_of() else None
    if report_file is not None:
        from perfmodel.report.pages import check_report_file

        check_report_file(report_file)
    watch = progress_lines if request.is_long and not sys.stderr.isatty() else terminal.progress_bar
    answer = request.answer(Console(watch, terminal.say))
    if answer is None:
        return
    terminal.print_answer(answer, as_json or (not request.has_json and not answer.text), report_file, has_details)
    if answer.after is not None:
        answer.after()
    if answer.exit_status:
        raise typer.Exit(answer.exit_status)


def main() -> None:
    """Entry point of the `perfmodel` command."""
    # A simulation makes many long-lived objects and hardly a cycle: looking for those after every 700 takes a tenth
    # of its time.
    gc.set_threshold(250_000, 20, 20)
    # Nor does the interpreter need to look for them on its way out, when the operating system takes everything back.
    atexit.register(gc.freeze)
    # No plugin of pydantic has a part in the command, and to look for them it reads what every installed package says.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    terminal.open_closed_streams()
    terminal.replace_unprintable()
    try:
        app(prog_name="perfmodel")
    except OSError as error:  # of what is printed before a command has begun
        sys.exit(terminal.say_refused(error))
    finally:
        terminal.close_stdout()

"""`perfmodel scenarios list|show|new`: the scenarios that come along, one of them, and a file of what flags say."""

__all__ = ["scenarios"]

from typing import Annotated

import typer

from perfmodel.answers.asked import Asked
from perfmodel.cli import completion
from perfmodel.cli.flags import takes_flags
from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import give, guarded, print_json

scenarios = typer.Typer(help="List the scenarios and traffic that come along, show one, or make one.")


@scenarios.command("list")
@guarded
def list_scenarios(
    every: Annotated[bool, typer.Option("--all", help="Also those of studies, techniques and publications.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the scenarios, and the traffic that `--traffic` names, with what each is."""
    from perfmodel.answers.scenarios import answer_scenarios

    give(answer_scenarios(every), as_json)


@scenarios.command("show")
@guarded
def show_scenario(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A scenario's name, or a path to its file.",
            show_default=False,
            autocompletion=completion.scenarios,
        ),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Print a scenario's file, to be copied and changed; with --json, all its fields as resolved."""
    from perfmodel import specs
    from perfmodel.answers.scenarios import resolved_scenario

    fields = resolved_scenario(name)
    if as_json:
        print_json(fields)
    else:
        typer.echo(specs.find_file("scenarios", name).read_text(encoding="utf-8"), nl=False)


@scenarios.command("new")
@guarded
@takes_flags(has_file=False)
def new_scenario(asked: Asked) -> None:
    """Print the scenario file that these flags stand for in other commands."""
    from perfmodel.answers.scenarios import new_scenario_text

    typer.echo(new_scenario_text(asked), nl=False)

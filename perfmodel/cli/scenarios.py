"""`perfmodel scenarios list|show|new`: the scenarios that come along, one of them, and a file of what flags say."""

__all__ = ["scenarios"]

from typing import Annotated

import typer

from perfmodel.cli import completion
from perfmodel.cli.asked import Asked
from perfmodel.cli.flags import takes_flags
from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import answer, guarded, print_json
from perfmodel.errors import SpecError

scenarios = typer.Typer(help="List the scenarios and traffic that come along, show one, or make one.")


@scenarios.command("list")
@guarded
def list_scenarios(
    every: Annotated[bool, typer.Option("--all", help="Also those of studies, techniques and publications.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the scenarios, and the traffic that `--traffic` names, with what each is."""
    from perfmodel.report.views.catalog import scenarios_view
    from perfmodel.specs.examples import scenario_files, traffic_files

    found, traffic = scenario_files(every), traffic_files()
    answer(scenarios_view(found, traffic), {"scenarios": found, "traffic": traffic}, as_json)


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
    from perfmodel.cost.calibrations.provenance import resolved

    scenario = specs.load_scenario(name)
    if as_json:
        print_json(resolved(scenario))
    else:
        typer.echo(specs.find_file("scenarios", name).read_text(encoding="utf-8"), nl=False)


@scenarios.command("new")
@guarded
@takes_flags(has_file=False)
def new_scenario(asked: Asked) -> None:
    """Print the scenario file that these flags stand for in other commands."""
    from perfmodel.files.yaml_loader import dump_yaml

    if not {"model", "hardware"} & set(asked.given):
        raise SpecError("no model: give --model and --hardware, as in --model llama-3.1-8b --hardware h100.")
    typer.echo(dump_yaml(asked.data()), nl=False)

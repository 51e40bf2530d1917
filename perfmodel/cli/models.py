"""`perfmodel models list|show`: the model cards that are known, and what one consists of."""

__all__ = ["models"]

from typing import Annotated

import typer

from perfmodel.cli import completion
from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import give, guarded

models = typer.Typer(help="List the known models, or show one.", no_args_is_help=True)

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A model's name or alias, or a path to a config.json.",
        show_default=False,
        autocompletion=completion.models,
    ),
]


@models.command("list")
@guarded
def list_cards(as_json: JsonFlag = False) -> None:
    """List the models with their sizes."""
    from perfmodel.answers.models import answer_models

    give(answer_models(), as_json)


@models.command("show")
@guarded
def show_card(name: ModelName, as_json: JsonFlag = False) -> None:
    """Show a model's layers, parameters by component, and bytes."""
    from perfmodel.answers.models import answer_model

    give(answer_model(name), as_json)

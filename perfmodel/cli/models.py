"""`perfmodel models list|show`: the model cards that are known, and what one consists of."""

__all__ = ["models"]

from typing import Annotated, Any

import typer

from perfmodel.cli import completion
from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import answer, guarded

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
    from perfmodel import specs
    from perfmodel.report.views.catalog import model_facts, models_view

    facts = [model_facts(specs.load_model(name)) for name in specs.list_models()]
    answer(models_view(facts), facts, as_json)


@models.command("show")
@guarded
def show_card(name: ModelName, as_json: JsonFlag = False) -> None:
    """Show a model's layers, parameters by component, and bytes."""
    from dataclasses import asdict

    from perfmodel import specs
    from perfmodel.report.views.catalog import model_facts, model_view

    model = specs.load_model(name, ask_hub=True)
    layers = [{"count": count, **_layer(layer)} for layer, count in model.layers]
    quantization = asdict(model.quantization)
    facts = {**model_facts(model), "layers": layers, "quantization": quantization, "source": model.source}
    answer(model_view(model), facts, as_json)


def _layer(layer: Any) -> dict[str, Any]:
    from dataclasses import asdict

    parts: dict[str, Any] = {}
    for name, part in (("mixer", layer.mixer), ("ffn", layer.ffn)):
        parts[name] = None if part is None else {"kind": type(part).__name__, **asdict(part)}
        if hasattr(part, "rope"):
            parts[name]["use_rope"] = part.rope is not None
    return parts

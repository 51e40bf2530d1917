"""`perfmodel models list|show`: the model cards that are known, and what one consists of."""

__all__ = ["models_app"]

from typing import Annotated, Any

import typer

from perfmodel.cli.options import JsonFlag
from perfmodel.cli.terminal import guarded, print_json, stdout

models_app = typer.Typer(help="List the known models, or show one.", no_args_is_help=True)

ModelName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A model's name or alias, or a path to a config.json.", show_default=False),
]


@models_app.command("list")
@guarded
def list_cards(as_json: JsonFlag = False) -> None:
    """List the models with their sizes."""
    from perfmodel import specs

    facts = [_facts(specs.load_model(name)) for name in specs.list_models()]
    if as_json:
        print_json(facts)
        return
    from perfmodel.report.drawing.fields import format_number
    from perfmodel.report.runs.tables import rows_table

    rows = [
        (
            fact["name"],
            fact["model_type"],
            f"{fact['num_parameters'] / 1e9:,.2f} B",
            f"{fact['num_active_parameters'] / 1e9:,.2f} B",
            str(fact["num_layers"]),
            format_number(fact["hidden_size"], 0),
            fact["weights"],
        )
        for fact in facts
    ]
    columns = ("model", "type", "parameters", "active", "layers", "hidden", "weights")
    stdout().print(rows_table(columns, rows, left=2))


@models_app.command("show")
@guarded
def show_card(name: ModelName, as_json: JsonFlag = False) -> None:
    """Show a model's layers, parameters by component, and bytes."""
    from dataclasses import asdict

    from perfmodel import specs

    model = specs.load_model(name)
    facts = _facts(model)
    layers = [{"count": count, **_layer(layer)} for layer, count in model.layers]
    if as_json:
        quantization = asdict(model.quantization)
        print_json({**facts, "layers": layers, "quantization": quantization, "source": model.source})
        return
    _print_card(facts, layers, model.source)


def _facts(model: Any) -> dict[str, Any]:
    from perfmodel.models.params import count_parameters, weight_bytes

    counts = count_parameters(model)
    return {
        "name": model.name,
        "hf_id": model.hf_id,
        "model_type": model.model_type,
        "num_parameters": counts.total,
        "num_active_parameters": counts.active,
        "published_parameters": model.published_params,
        "parameters_by_component": dict(counts.stored),
        "weight_bytes": sum(weight_bytes(model).values()),
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "weights": model.quantization.weights or model.dtype,
    }


def _layer(layer: Any) -> dict[str, Any]:
    from dataclasses import asdict

    parts: dict[str, Any] = {}
    for name, part in (("mixer", layer.mixer), ("ffn", layer.ffn)):
        parts[name] = None if part is None else {"kind": type(part).__name__, **asdict(part)}
    return parts


def _print_card(facts: dict[str, Any], layers: list[dict[str, Any]], source: str) -> None:
    from rich.text import Text

    from perfmodel.report.drawing.fields import format_number, format_si
    from perfmodel.report.runs.tables import rows_table

    console = stdout()
    console.print(Text.assemble((facts["name"], "bold"), f", {facts['model_type']} {facts['hf_id'] or ''}"))
    console.print(
        f"{facts['num_layers']} layers, hidden {facts['hidden_size']:,}, vocabulary {facts['vocab_size']:,}, "
        f"up to {facts['max_position_embeddings']:,} positions",
        highlight=False,
    )
    rows = [(name, format_number(count, 0)) for name, count in facts["parameters_by_component"].items() if count]
    rows.append(("total", format_number(facts["num_parameters"], 0)))
    rows.append(("active per token", format_number(facts["num_active_parameters"], 0)))
    console.print(rows_table(("parameters", ""), rows))
    for layer in layers:
        console.print(Text(f"{layer['count']} x {_describe(layer['mixer'])} + {_describe(layer['ffn'])}"))
    console.print(Text(f"Weights: {format_si(facts['weight_bytes'], 'B')} as {facts['weights']}"))
    if source:
        console.print(Text(f"Source: {source}", style="dim"))


def _describe(part: dict[str, Any] | None) -> str:
    if part is None:
        return "nothing"
    shown = [f"{key} {value}" for key, value in part.items() if key != "kind" and _is_worth_showing(value)]
    return f"{part['kind']}({', '.join(shown)})"


def _is_worth_showing(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1

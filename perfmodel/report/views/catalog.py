"""What is known: scenarios and models, listed and one by one; techniques, and what was shown of each."""

__all__ = [
    "model_facts",
    "model_view",
    "models_view",
    "scenarios_view",
    "techniques_view",
]

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from perfmodel.models.executed import why_not_executed
from perfmodel.models.params import count_parameters, weight_bytes
from perfmodel.models.spec import ModelSpec
from perfmodel.report.document import Block, Document, Heading, Paragraph, Span, Table
from perfmodel.report.numbers import format_number, format_si
from perfmodel.validate.techniques.status import TechniqueStatus

_MODELS = ("model", "type", "parameters", "active", "layers", "hidden", "weights", "executed")
_TECHNIQUES = (
    *("technique", "simulated", "executed: composition of steps, simulated and executed speedup"),
    "validated: predicted / published",
)


def scenarios_view(scenarios: Sequence[Mapping[str, Any]], traffic: Sequence[Mapping[str, Any]]) -> Document:
    """A row for each scenario, and for each traffic file with its other names."""
    rows = [(each["name"], each["purpose"]) for each in scenarios]
    named = [(", ".join((*each["aliases"][:1], each["name"])), each["purpose"]) for each in traffic]
    tables = [Table(("scenario", "what it is"), rows, left=2), Table(("--traffic", "what it is"), named, left=2)]
    return Document("", tables)


def model_facts(model: ModelSpec) -> dict[str, Any]:
    """A model's sizes as data."""
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
        "not_executed": why_not_executed(model),
    }


def models_view(facts: Sequence[dict[str, Any]]) -> Document:
    """A row for each of `model_facts`."""
    rows = [
        (
            fact["name"],
            fact["model_type"],
            f"{fact['num_parameters'] / 1e9:,.2f} B",
            f"{fact['num_active_parameters'] / 1e9:,.2f} B",
            str(fact["num_layers"]),
            format_number(fact["hidden_size"], 0),
            fact["weights"],
            "no" if fact["not_executed"] else "yes",
        )
        for fact in facts
    ]
    return Document("", [Table(_MODELS, rows, left=2)])


def model_view(model: ModelSpec) -> Document:
    """A model's layers, parameters by component, and bytes."""
    facts = model_facts(model)
    rows = [(name, format_number(count, 0)) for name, count in facts["parameters_by_component"].items() if count]
    rows.append(("active per token", format_number(facts["num_active_parameters"], 0)))
    shape = (
        f"{model.num_layers} layers, hidden {model.hidden_size:,}, vocabulary {model.vocab_size:,}, "
        f"up to {model.max_position_embeddings:,} positions"
    )
    blocks: list[Block] = [
        Paragraph(shape),
        Table(("parameters", ""), rows, total=("total", format_number(facts["num_parameters"], 0))),
        *(Paragraph(f"{count} x {_part(layer.mixer)} + {_part(layer.ffn)}") for layer, count in model.layers),
        Paragraph(f"Weights: {format_si(facts['weight_bytes'], 'B')} as {facts['weights']}"),
    ]
    blocks += map(Paragraph, model.encoder_notes)
    if facts["not_executed"]:
        blocks.append(Paragraph(f"Simulated only: {facts['not_executed']} is not executed yet."))
    if model.source:
        blocks.append(Paragraph(Span(f"Source: {model.source}", "muted")))
    return Document(model.name, blocks, f"{model.model_type} {model.hf_id or ''}".rstrip())


def _part(part: Any) -> str:
    """A layer's mixer or feed-forward part with its sizes."""
    if part is None:
        return "nothing"
    sizes = {key: value for key, value in asdict(part).items() if isinstance(value, int) and value > 1}
    return f"{type(part).__name__}({', '.join(f'{key} {value}' for key, value in sizes.items())})"


def techniques_view(rows: Sequence[TechniqueStatus]) -> Document:
    """A table for each family, and how many techniques have got how far."""
    blocks: list[Block] = []
    for family in dict.fromkeys(row.family for row in rows):
        members = [row for row in rows if row.family == family]
        blocks += [Heading(family), Paragraph(Span(members[0].what_family, "muted"))]
        cells = [
            (row.entry.name, "yes" if row.is_simulated else "not yet", _executed(row), _validated(row))
            for row in members
        ]
        blocks.append(Table(_TECHNIQUES, cells, left=4))
        for reason in dict.fromkeys(row.entry.missing for row in members if row.entry.missing):
            names = ", ".join(row.entry.name for row in members if row.entry.missing == reason)
            blocks.append(Paragraph(Span(f"Not yet: {names}: {reason}", "muted")))
    counts = {
        "simulated": sum(row.is_simulated for row in rows),
        "executed as simulated": sum(row.is_executed for row in rows),
        "executed otherwise (missed)": sum(row.outcome == "missed" for row in rows),
        "executed to no purpose (proves nothing)": sum(row.outcome == "proves nothing" for row in rows),
        "validated by published figures": sum(row.validated == "yes" for row in rows),
        "missed by them": sum(row.validated == "missed" for row in rows),
    }
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    return Document("", [*blocks, Paragraph(f"{len(rows)} techniques: {text}")])


def _executed(row: TechniqueStatus) -> str:
    if row.outcome is None:
        return f"no: {row.why_not_executed}"
    shown = "; ".join(f"{pair.simulated:.2f}, {pair.executed:.2f}" for pair in row.pairs.values())
    return f"{'yes' if row.is_executed else row.outcome}: {shown}"


def _validated(row: TechniqueStatus) -> str:
    if row.ratio is None:
        return "no figure"
    count = f"{len(row.ratios)} figures" if len(row.ratios) > 1 else next(iter(row.ratios))
    return f"{'missed, ' if row.validated == 'missed' else ''}{row.ratio:.2f} ({count})"

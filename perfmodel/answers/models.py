"""The models that are known, and what one consists of: `perfmodel models list|show`."""

__all__ = ["answer_model", "answer_models"]

from typing import Any

from perfmodel.answers.answer import Answer


def answer_models() -> Answer:
    """All models with a card, and their sizes."""
    from perfmodel import specs
    from perfmodel.report.views.catalog import model_facts, models_view

    facts = [model_facts(specs.load_model(name)) for name in specs.list_models()]
    return Answer(lambda: facts, lambda: models_view(facts))


def answer_model(name: str) -> Answer:
    """A model's layers, parameters by component, and bytes; `result` is the ModelSpec.

    Raises SpecError for a model that no card lists and that cannot be read from a file or from the Hub.
    """
    from perfmodel import specs
    from perfmodel.report.views.catalog import model_facts, model_view

    model = specs.load_model(name, ask_hub=True)

    def data() -> dict[str, Any]:
        from dataclasses import asdict

        layers = [{"count": count, **_layer(layer)} for layer, count in model.layers]
        facts = {**model_facts(model), "layers": layers, "quantization": asdict(model.quantization)}
        return {**facts, "source": model.source}

    return Answer(data, lambda: model_view(model), model)


def _layer(layer: Any) -> dict[str, Any]:
    from dataclasses import asdict

    parts: dict[str, Any] = {}
    for name, part in (("mixer", layer.mixer), ("ffn", layer.ffn)):
        parts[name] = None if part is None else {"kind": type(part).__name__, **asdict(part)}
        if hasattr(part, "rope"):
            parts[name]["use_rope"] = part.rope is not None
    return parts

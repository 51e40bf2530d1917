"""What lies in device memory, and how much it can serve: `perfmodel memory`."""

__all__ = ["answer_memory"]

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from perfmodel.answers.answer import Answer
from perfmodel.answers.asked import Asked

if TYPE_CHECKING:
    from perfmodel.cost.memory.file_types import TypeFit
    from perfmodel.cost.memory.plan import MemoryPlan
    from perfmodel.report.document import Document
    from perfmodel.specs.scenario import Scenario


def answer_memory(asked: Asked, overrides: Sequence[str] | None = None) -> Answer:
    """Weights, KV cache and activations per device, the largest batch and context; `result` is the MemoryPlan.

    Raises SpecError for what cannot be read, DoesNotFitError for a model too large for the devices.
    """
    loaded = asked.load(overrides)
    from perfmodel.cost.memory.file_types import fits_of_types
    from perfmodel.specs.engine.formats import serving_notes
    from perfmodel.trust import trust_of

    types = fits_of_types(loaded.model, loaded.hardware, loaded.engine)
    plan = _planned(loaded, types)
    notes = [*asked.assumed(loaded, overrides), *serving_notes(loaded.model, loaded.engine, loaded.hardware)]

    def document() -> "Document":
        from perfmodel.report.views.catalog import memory_view

        return memory_view(plan, notes, types, trust_of(loaded))

    return Answer(lambda: _data(loaded, plan, types, notes), document, plan)


def _planned(scenario: "Scenario", types: "Sequence[TypeFit]") -> "MemoryPlan":
    """The plan. Raises DoesNotFitError that names the layers and the file type that fit, where there are any."""
    from perfmodel.cost import plan_memory
    from perfmodel.errors import DoesNotFitError

    try:
        return plan_memory(scenario.model, scenario.hardware, scenario.engine)
    except DoesNotFitError as error:
        text = str(error)
        part = next((fit for fit in types if fit.file_type == scenario.engine.quantization and fit.layers), None)
        if part is not None:
            text += f" {part.layers} of {part.num_layers} layers fit: engine.n_gpu_layers={part.layers} and engine.cpu."
        whole = next((fit for fit in types if fit.fits), None)
        if whole is not None:
            text += f" All layers fit with engine.quantization={whole.file_type}."
        raise DoesNotFitError(text) from None


def _data(scenario: "Scenario", plan: "MemoryPlan", types: "Sequence[TypeFit]", notes: list[str]) -> dict[str, Any]:
    from perfmodel.cost.calibrations.provenance import provenance_of, resolved
    from perfmodel.trust import trust_of

    planned = asdict(plan)
    groups = planned.pop("kv_groups")
    return {
        "scenario": scenario.name,
        **planned,
        **({"kv_groups": groups} if groups else {}),
        "weight_bytes": plan.weight_bytes,
        "kv_bytes": plan.kv_bytes,
        "max_tokens": plan.max_tokens,
        "max_batch_at_2048_tokens": plan.max_batch(2048),
        "max_context": plan.max_context(),
        **({"file_types": [_type_json(fit) for fit in types]} if types else {}),
        "notes": notes,
        "trust": trust_of(scenario).to_json(),
        "provenance": provenance_of([scenario]).to_json("memory", {"scenario": resolved(scenario)}),
    }


def _type_json(fit: "TypeFit") -> dict[str, Any]:
    fields = asdict(fit)
    return {**fields.pop("asked"), **fields, "fits": fit.fits}

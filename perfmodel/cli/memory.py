"""`perfmodel memory SCENARIO`: what lies in device memory, and how much it can serve."""

__all__ = ["memory"]

from perfmodel.cli.asked import Asked
from perfmodel.cli.flags import takes_flags
from perfmodel.cli.options import JsonFlag, Overrides
from perfmodel.cli.terminal import answer


@takes_flags("model", "hardware")
def memory(asked: Asked, overrides: Overrides = None, as_json: JsonFlag = False) -> None:
    """Show weights, KV cache and activations per device, and the largest batch and context that fit.

    Of an engine that keeps layers with the CPU (llama.cpp), also which GGUF types fit: how many layers on the device.
    """
    loaded = asked.load(overrides)
    from dataclasses import asdict

    from perfmodel.cost import plan_memory
    from perfmodel.cost.calibrations.provenance import provenance_of, resolved
    from perfmodel.cost.memory.file_types import fits_of_types
    from perfmodel.report.views.step import memory_view
    from perfmodel.specs.engine.formats import format_notes

    plan = plan_memory(loaded.model, loaded.hardware, loaded.engine)
    types = fits_of_types(loaded.model, loaded.hardware, loaded.engine)
    planned = asdict(plan)
    groups = planned.pop("kv_groups")
    data = {
        "scenario": loaded.name,
        **planned,
        **({"kv_groups": groups} if groups else {}),
        "weight_bytes": plan.weight_bytes,
        "kv_bytes": plan.kv_bytes,
        "max_tokens": plan.max_tokens,
        "max_batch_at_2048_tokens": plan.max_batch(2048),
        "max_context": plan.max_context(),
        **({"file_types": [{**asdict(each), "fits": each.fits} for each in types]} if types else {}),
        "notes": (notes := [*asked.assumed(loaded), *format_notes(loaded.model, loaded.engine, loaded.hardware)]),
        "provenance": provenance_of([loaded]).to_json("memory", {"scenario": resolved(loaded)}),
    }
    answer(memory_view(plan, notes, types), data, as_json)

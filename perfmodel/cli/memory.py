"""`perfmodel memory SCENARIO`: what lies in device memory, and how much it can serve."""

__all__ = ["memory"]

from perfmodel.cli.options import JsonFlag, Overrides, ScenarioName, load
from perfmodel.cli.terminal import answer


def memory(scenario: ScenarioName, overrides: Overrides = None, as_json: JsonFlag = False) -> None:
    """Show weights, KV cache and activations per device, and the largest batch and context that fit."""
    loaded = load(scenario, overrides)
    from dataclasses import asdict

    from perfmodel.cost import plan_memory
    from perfmodel.cost.calibrations.provenance import provenance_of, resolved
    from perfmodel.report.views.step import memory_view

    plan = plan_memory(loaded.model, loaded.hardware, loaded.engine)
    data = {
        "scenario": loaded.name,
        **asdict(plan),
        "weight_bytes": plan.weight_bytes,
        "kv_bytes": plan.kv_bytes,
        "max_tokens": plan.max_tokens,
        "max_batch_at_2048_tokens": plan.max_batch(2048),
        "max_context": plan.max_context(),
        "provenance": provenance_of([loaded]).to_json("memory", {"scenario": resolved(loaded)}),
    }
    answer(memory_view(plan), data, as_json)

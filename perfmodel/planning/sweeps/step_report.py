"""`StepReport`: a step operator by operator: the one asked for, a scenario's typical one, or the mean one of a run."""

__all__ = ["StepReport", "estimate_choice", "estimate_mean_step", "mean_step"]

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import StepEstimate, plan_memory, step_costs
from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.cost.calibrations.routing import balance_notes
from perfmodel.errors import DoesNotFitError
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.planning.sweeps.typical_step import StepChoice, choose_step, engine_of_step
from perfmodel.printable import Printable
from perfmodel.sim.records.result import RunResult
from perfmodel.specs.engine.formats import serving_notes
from perfmodel.specs.scenario import Scenario
from perfmodel.trust import trust_of


@dataclass(frozen=True, repr=False)
class StepReport(Printable):
    """A step's description, its shape, and its estimate operator by operator.

    assumed: sentences on what nobody said of the scenario
    """

    scenario: Scenario
    label: str
    shape: BatchShape
    estimate: StepEstimate
    assumed: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """Sentences on what was assumed, on what is modelled of the model, on number formats that are not multiplied as
        they are stored, and on balancing without effect."""
        engine = engine_of_step(self.scenario, is_prompt=not self.shape.num_decodes)
        served = serving_notes(engine.model, engine.engine, engine.hardware)
        return [*self.assumed, *served, *balance_notes(self.scenario, engine.engine)]

    def columns(self) -> dict[str, NDArray[Any]]:
        """The estimate's."""
        return self.estimate.columns()

    def to_json(self) -> dict[str, Any]:
        """Quantities are totals over an operator's `count` runs on one device."""
        estimate, shape = self.estimate, self.shape
        return {
            "scenario": self.scenario.name,
            "step": self.label,
            "num_tokens": shape.num_tokens,
            "num_decodes": shape.num_decodes,
            "decode_context": shape.decode_context,
            "duration_s": estimate.duration_s,
            "device_s": estimate.device_s,
            "flops": estimate.flops,
            "hbm_bytes": estimate.hbm_bytes,
            "mfu": estimate.mfu,
            "mbu": estimate.mbu,
            "bound_share": estimate.bound_share,
            "origin": estimate.origin,
            **({} if estimate.pipeline is None else {"pipeline": asdict(estimate.pipeline)}),
            "operators": [row.to_json() for row in estimate.rows],
            "notes": self.notes,
            "trust": trust_of(self.scenario).to_json(),
            "provenance": self.provenance("step"),
        }

    def provenance(self, kind: str) -> dict[str, Any]:
        """Versions, calibrations and inputs of an answer about this step, which is of this kind."""
        inputs = {"scenario": resolved(self.scenario), "step": self.shape._asdict()}
        return provenance_of([self.scenario]).to_json(kind, inputs)


def estimate_choice(
    scenario: Scenario, batch: int | None = None, context: int | None = None, prefill: int | None = None
) -> StepReport:
    """The step asked for, or the scenario's typical one, estimated as the simulator times it.

    batch:   sequences that decode; context: tokens of each; prefill: instead, tokens of one prompt

    Raises DoesNotFitError for a step that the devices have no KV blocks for.
    """
    engine = engine_of_step(scenario, is_prompt=prefill is not None)
    costs = step_costs(engine)
    choice = choose_step(
        scenario,
        lambda shape: costs.estimate(shape).duration_s / costs.tokens_per_decode(shape),
        batch,
        context,
        prefill,
    )
    _refuse_beyond_memory(engine, choice, batch is not None or context is not None or prefill is not None)
    depth, label = costs.draft_depth(choice.shape), choice.label
    if depth and costs.drafts is not None:
        label += f", each with {costs.drafts.config.nodes_by_depth[depth]} drafted tokens to verify"
        if costs.drafts.config.acceptance is not None:
            label += f" ({costs.tokens_per_decode(choice.shape):.2f} tokens a step expected)"
    return StepReport(scenario, label, choice.shape, costs.estimate(choice.shape))


def _refuse_beyond_memory(scenario: Scenario, choice: StepChoice, is_asked: bool) -> None:
    """Raises DoesNotFitError for a step asked for that no run has, since the KV cache of its sequences does not fit."""
    if not is_asked or scenario.engine.kv_cache == "off":
        return
    shape, plan = choice.shape, plan_memory(scenario.model, scenario.hardware, scenario.engine)
    sequences = shape.num_decodes or len(shape.prefills)
    tokens = shape.decode_context // sequences if shape.num_decodes else sum(shape.prefills[0])
    if sequences <= plan.max_batch(tokens):
        return
    most = plan.max_batch(tokens)
    way_out = f"{most:,} sequences of so many" if most else f"{plan.max_context():,} tokens of one sequence"
    raise DoesNotFitError(
        f"{choice.label}: the KV cache of {plan.num_devices} x {plan.hardware} holds {plan.max_tokens:,} tokens, "
        f"at most {way_out}; ask for fewer, or give it more devices."
    )


def estimate_mean_step(result: RunResult) -> StepReport:
    """The run's mean decode step; without step records, or where nothing decoded, the scenario's typical one."""
    choice = mean_step(result)
    if choice is None:
        return estimate_choice(result.scenario)
    return StepReport(result.scenario, choice.label, choice.shape, step_costs(result.scenario).estimate(choice.shape))


def mean_step(result: RunResult) -> StepChoice | None:
    """The decode step at a run's mean batch and context; None without step records, or if the run never decoded."""
    steps, mean_batch = result.steps, result.summary["mean_batch"]
    if steps is None or mean_batch is None:
        return None
    batch = max(1, round(mean_batch))
    tokens = float(np.dot(steps.num_steps, steps.decode_context)) / float(np.dot(steps.num_steps, steps.num_decodes))
    context = max(1, round(tokens))
    shape = decode_shape(batch, context, result.scenario.model.attention_spans)
    return StepChoice(shape, f"Decode of {batch:,} sequences with {context:,} tokens each (the run's mean batch)")

"""From a scenario to what the reports show of one step: an estimate, points on a roofline, a memory layout."""

__all__ = [
    "OperatorPoint",
    "StepReport",
    "StepView",
    "estimate_choice",
    "mean_step",
    "memory_parts",
    "operator_points",
    "ridge_points",
    "view_of_run",
]

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.cost import MemoryPlan, StepEstimate, plan_memory, step_costs
from perfmodel.errors import PerfmodelError
from perfmodel.ops import BatchShape
from perfmodel.plan.sweeps.typical_step import StepChoice, choose_step, engine_of_step
from perfmodel.sim.records.columns import StepColumns
from perfmodel.sim.records.result import RunResult
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario


@dataclass(frozen=True, slots=True)
class OperatorPoint:
    """One operator of a step on one device: totals over the layers that contain it."""

    name: str
    rate: str  # dtype whose peak does the FLOPs
    flops: float
    hbm_bytes: float
    time_s: float
    bound: str  # compute | memory | communication | overhead

    @property
    def intensity(self) -> float:
        """FLOP per byte of main memory."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else math.inf

    @property
    def is_drawable(self) -> bool:
        """A point on a log-log plot needs FLOPs, bytes and time above zero."""
        return self.flops > 0 and self.hbm_bytes > 0 and self.time_s > 0


@dataclass(frozen=True)
class StepView:
    """One typical step and the memory behind it, for the report; empty parts leave their sections out."""

    label: str = ""
    points: Sequence[OperatorPoint] = ()
    memory_parts: Sequence[tuple[str, float]] = ()
    memory_bytes: float = 0.0  # what a process sees of the device


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step in words, its shape, and its estimate operator by operator."""

    label: str
    shape: BatchShape
    estimate: StepEstimate

    def view(self, scenario: Scenario) -> StepView:
        """What the HTML page draws of it."""
        plan = plan_memory(scenario.model, scenario.hardware, scenario.engine)
        label = f"{self.label}, predicted ({self.estimate.origin})"
        return StepView(label, operator_points(self.estimate), memory_parts(plan), plan.visible_bytes)


def estimate_choice(
    scenario: Scenario, batch: int | None = None, context: int | None = None, prefill: int | None = None
) -> StepReport:
    """The step asked for, or the scenario's typical one, estimated as the simulator times it."""
    costs = step_costs(engine_of_step(scenario, is_prompt=prefill is not None))
    choice = choose_step(
        scenario,
        lambda shape: costs.estimate(shape).duration_s / costs.tokens_per_decode(shape),
        batch,
        context,
        prefill,
    )
    depth, label = costs.draft_depth(choice.shape), choice.label
    if depth and costs.drafts is not None:
        label += f", each with {costs.drafts.config.nodes_by_depth[depth]} drafted tokens to verify"
        if costs.drafts.config.acceptance is not None:
            label += f" ({costs.tokens_per_decode(choice.shape):.2f} tokens a step expected)"
    return StepReport(label, choice.shape, costs.estimate(choice.shape))


def mean_step(steps: StepColumns, spans: tuple[int, ...]) -> StepChoice | None:
    """The decode step at a run's mean batch and context, over time; None if the run never decoded."""
    weights = (steps.end_s - steps.start_s) * (steps.num_decodes > 0)
    total = float(weights.sum())
    if total <= 0:
        return None
    batch = max(1, round(float(np.dot(weights, steps.num_decodes)) / total * _num_under_way(steps)))
    tokens = float(np.dot(steps.num_steps, steps.decode_context)) / float(np.dot(steps.num_steps, steps.num_decodes))
    context = max(1, round(tokens))
    shape = BatchShape(batch, batch, (), batch, batch * context, tuple(batch * min(context, span) for span in spans))
    return StepChoice(shape, f"Decode of {batch:,} sequences with {context:,} tokens each (the run's mean batch)")


def _num_under_way(steps: StepColumns) -> float:
    """Plans of a replica that are under way at once, over the time in which any is; 1 without pipeline stages."""
    order = np.lexsort((steps.start_s, steps.replica))
    start, end, replica = steps.start_s[order], steps.end_s[order], steps.replica[order]
    shift = replica * float(end.max() + 1.0)  # so that one replica's time follows another's
    until = np.maximum.accumulate(end + shift)
    overlap = np.maximum(until[:-1] - (start + shift)[1:], 0.0).clip(max=(end - start)[1:])
    whole, twice = float((end - start).sum()), float(overlap.sum())
    return whole / (whole - twice) if twice > 1e-6 * whole else 1.0


def view_of_run(result: RunResult) -> StepView:
    """The run's mean decode step, and the memory layout; whatever cannot be had is left out."""
    scenario = result.scenario
    try:
        choice = mean_step(result.steps, scenario.model.attention_spans) if result.steps is not None else None
        if choice is None:
            return estimate_choice(scenario).view(scenario)
        return StepReport(choice.label, choice.shape, step_costs(scenario).estimate(choice.shape)).view(scenario)
    except PerfmodelError:  # the run itself succeeded: its report must not fail for an illustration
        return StepView()


def operator_points(estimate: StepEstimate) -> tuple[OperatorPoint, ...]:
    """The rows of an estimate, totals over all layers."""
    return tuple(
        OperatorPoint(row.name, row.work.rate, row.flops, row.hbm_bytes, row.duration_s, row.bound)
        for row in estimate.rows
    )


def memory_parts(plan: MemoryPlan) -> tuple[tuple[str, float], ...]:
    """What lies in one device's memory, in bytes; empty parts are left out."""
    parts = (
        ("weights", plan.weight_bytes),
        ("activations and reserve", plan.beside_bytes),
        ("recurrent states", plan.state_bytes),
        ("KV blocks", plan.kv_bytes),
    )
    return tuple((name, size) for name, size in parts if size > 0)


def ridge_points(hardware: HardwareSpec) -> dict[str, float]:
    """Intensity (FLOP/byte) where each dtype's peak meets the main memory's bandwidth."""
    return {rate: peak / hardware.memory_bandwidth for rate, peak in hardware.declared.peak_flops_per_s.items()}

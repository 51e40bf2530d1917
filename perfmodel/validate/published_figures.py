"""What perfmodel says of a published figure: the metric of a run, a step, an operator, a kernel or of memory."""

__all__ = ["Prediction", "predict"]

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel import sim
from perfmodel.cost import OperatorEstimate, StepEstimate, plan_memory, step_costs
from perfmodel.cost.footprint import kv_bytes_per_token, weights
from perfmodel.errors import SpecError, did_you_mean
from perfmodel.ops.formats import served_model
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import BatchShape
from perfmodel.sim.result import RunResult
from perfmodel.specs import load_scenario
from perfmodel.specs.published import Published, StepShape
from perfmodel.specs.scenario import Scenario
from perfmodel.validate.published_capacity import max_request_rate
from perfmodel.validate.published_kernels import kernel_time, kernel_work, roofline_s

_S = 1e6  # microseconds
_Value = tuple[float, str]  # in the metric's own unit, and what it is made of


@dataclass(frozen=True, slots=True)
class Prediction:
    """A figure's predicted value in its own unit, and what it is made of, in words."""

    value: float
    made_of: str


def predict(scenario: Scenario, file: Path) -> Prediction:
    """What `scenario.published` should read; `file` holds the scenario, which a baseline changes.

    Raises PerfmodelError where there is nothing to predict: a model that does not fit, an operator that is not there.
    """
    figure = scenario.published
    if figure is None:
        raise SpecError(f"{file}: found no `published` block; see docs/published.md.")
    value, made_of = _metric(scenario, figure)
    if figure.baseline:
        changed = load_scenario(file, figure.baseline)
        assert changed.published is not None
        base, of_base = _metric(changed, changed.published)
        value = _ratio(value, base, figure)
        made_of = f"{made_of}; baseline: {of_base}"
    return Prediction(value / figure.factor, made_of)


def _ratio(value: float, base: float, figure: Published) -> float:
    better = base / value if figure.found.is_better_low else value / base
    return {
        "speedup": better,
        "gain": better - 1,
        "saving": 1 - value / base,
        "scenario_over_baseline": value / base,
        "baseline_over_scenario": base / value,
    }[figure.ratio or "speedup"]


def _metric(scenario: Scenario, figure: Published) -> _Value:
    if figure.basis == "kernel":
        return _of_kernel(scenario, figure)
    if figure.basis == "memory":
        return _of_memory(scenario, figure)
    if figure.basis == "run":
        return _of_run(scenario, figure.metric)
    assert figure.step is not None
    shape = _batch_shape(figure.step, scenario)
    estimate = step_costs(scenario).estimate(shape)
    if figure.operator:
        return _of_operator(scenario, figure, estimate)
    return _of_step(scenario, figure, estimate, shape)


def _batch_shape(step: StepShape, scenario: Scenario) -> BatchShape:
    prompts = ((step.prefill, step.cached),) * step.prompts if step.prefill else ()
    spans, context = scenario.model.attention_spans, step.context or 0
    return BatchShape(
        num_tokens=step.batch + step.prefill * len(prompts),
        num_samples=step.batch + len(prompts),
        prefills=prompts,
        num_decodes=step.batch,
        decode_context=step.batch * context,
        decode_windowed=tuple(step.batch * min(context, span) for span in spans),
    )


# ------------------------------------------------------------------------- of one step


def _of_step(scenario: Scenario, figure: Published, estimate: StepEstimate, shape: BatchShape) -> _Value:
    seconds = estimate.duration_s
    values = {
        "step_ms": seconds * 1e3,
        "device_ms": estimate.device_s * 1e3,
        "roofline_ms": _ideal_s(scenario, estimate.rows) * 1e3,
        "tokens_per_s": shape.num_tokens / seconds,
        "tokens_per_s_per_user": 1 / seconds,
        "tflops": estimate.flops / seconds / 1e12,
        "gb_per_s": estimate.hbm_bytes / seconds / 1e9,
        "mfu": estimate.mfu,
        "mbu": estimate.mbu,
    }
    return values[figure.metric], f"a step of {seconds * 1e3:.3g} ms, {_shares(estimate.bound_share)}"


def _ideal_s(scenario: Scenario, rows: Sequence[OperatorEstimate]) -> float:
    return sum(row.count * roofline_s(row.work, scenario.hardware) for row in rows)


def _of_operator(scenario: Scenario, figure: Published, estimate: StepEstimate) -> _Value:
    rows = _rows_named(figure.operator, estimate)
    seconds = sum(row.duration_s for row in rows)
    values = {
        "time_us": seconds * _S,
        "layer_time_us": sum(row.time.duration_s for row in rows) * _S,
        "roofline_us": _ideal_s(scenario, rows) * _S,
        "tflops": sum(row.flops for row in rows) / seconds / 1e12,
        "gb_per_s": sum(row.hbm_bytes for row in rows) / seconds / 1e9,
        "share": seconds / estimate.duration_s,
    }
    largest = max(rows, key=lambda row: row.duration_s)
    made_of = f"{len(rows)} operators, of them {largest.name} {largest.duration_s / seconds:.0%} ({largest.bound})"
    return values[figure.metric], made_of


def _rows_named(names: Sequence[str], estimate: StepEstimate) -> list[OperatorEstimate]:
    """Operators by name, by name without the label of their layer, or by family. Raises SpecError for none."""
    found: dict[str, OperatorEstimate] = {}
    for name in names:
        rows = [row for row in estimate.rows if name in (row.name, row.name.split("@")[0], row.work.family)]
        if not rows:
            known = sorted({row.name for row in estimate.rows} | {row.work.family for row in estimate.rows})
            near = did_you_mean(name, known)
            raise SpecError(f"published.operator: found {name!r}, this step has {', '.join(known)}.{near}")
        found |= {row.name: row for row in rows}
    return list(found.values())


# ------------------------------------------------------------------------- of one kernel


def _of_kernel(scenario: Scenario, figure: Published) -> _Value:
    assert figure.kernel is not None
    work = kernel_work(scenario, figure.kernel)
    time = kernel_time(scenario, work)
    seconds = time.duration_s
    values = {
        "time_us": seconds * _S,
        "roofline_us": roofline_s(work, scenario.hardware) * _S,
        "tflops": work.flops / seconds / 1e12,
        "gb_per_s": (work.hbm_bytes or (work.message.bytes_ if work.message else 0.0)) / seconds / 1e9,
    }
    return values[figure.metric], f"{seconds * _S:.4g} us, bound by {time.bound}"


# ------------------------------------------------------------------------- of memory


def _of_memory(scenario: Scenario, figure: Published) -> _Value:
    context = figure.step.context or 0 if figure.step is not None else 0
    batch = figure.step.batch if figure.step is not None else 0
    model, undivided = served_model(scenario.model, scenario.engine), Sharding()
    layers = list(model.iter_layers())
    per_token = kv_bytes_per_token(model, undivided, layers)
    made_of = f"{per_token:,.0f} B of KV per token, one copy of it"
    whole = {
        "kv_bytes_per_token": per_token,
        "kv_gb": batch * context * per_token / 1e9,
        "weight_gb": sum(weights(model, undivided, layers, is_first=True, is_last=True).values()) / 1e9,
    }
    if figure.metric in whole:
        return whole[figure.metric], made_of
    plan = plan_memory(scenario.model, scenario.hardware, scenario.engine)
    left = {
        "kv_blocks": plan.num_kv_blocks,
        "max_tokens": plan.max_tokens,
        "max_batch": plan.max_batch(context) if context else 0,
        "max_context": plan.max_context(),
    }
    return float(left[figure.metric]), made_of


# ------------------------------------------------------------------------- of a whole run


def _of_run(scenario: Scenario, metric: str) -> _Value:
    if metric == "max_request_rate":
        rate = max_request_rate(scenario)
        return rate, f"{rate:.3g} requests per second meet the slo"
    result = sim.simulate(scenario, keep_steps=metric == "mean_batch")
    summary = result.summary
    values = {
        "output_throughput_per_gpu": _per_device(summary, "output_throughput", scenario),
        "total_token_throughput_per_gpu": _per_device(summary, "total_token_throughput", scenario),
        "mean_batch": _mean_batch(result) if metric == "mean_batch" else None,
    }
    value = values[metric] if metric in values else summary.get(metric)
    if value is None:
        raise SpecError(f"published.metric: this run has no {metric} (request_goodput needs an slo, USD a price).")
    return float(value), f"a run of {summary['duration']:.3g} s, {_shares(summary.get('bound_share') or {})}"


def _per_device(summary: dict[str, Any], name: str, scenario: Scenario) -> float | None:
    return summary[name] / scenario.num_devices if summary[name] is not None else None


def _mean_batch(result: RunResult) -> float | None:
    """Sequences in a step, over the time in which steps run."""
    steps = result.steps
    if steps is None or not len(steps.start_s):
        return None
    duration = steps.end_s - steps.start_s
    return float(np.dot(duration, steps.num_decodes + steps.num_chunks) / duration.sum())


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)

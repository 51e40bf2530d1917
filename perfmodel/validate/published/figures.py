"""What perfmodel says of a published figure: the metric of a run, a step, an operator, a kernel or of memory."""

__all__ = ["Prediction", "predict"]

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfmodel import sim
from perfmodel.cost import OperatorEstimate, StepEstimate, step_costs
from perfmodel.errors import SpecError, did_you_mean
from perfmodel.files.blocks import block_as
from perfmodel.planning.sweeps.capacity import max_request_rate
from perfmodel.planning.sweeps.metrics import (
    batch_shape,
    memory_metric,
    roofline_s,
    run_metric,
    shares_text,
    step_metrics,
)
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario import Scenario
from perfmodel.validate.published.kernels import kernel_time, kernel_work
from perfmodel.validate.published.spec import Published

_S = 1e6  # microseconds
_Value = tuple[float, str]  # in the metric's own unit, and what it is made of


@dataclass(frozen=True, slots=True)
class Prediction:
    """A figure's predicted value in its own unit, and what it is made of, as text."""

    value: float
    made_of: str


def predict(scenario: Scenario, file: Path) -> Prediction:
    """What `scenario.published` should read; `file` holds the scenario, which a baseline changes.

    Raises PerfmodelError where there is nothing to predict: a model that does not fit, an operator that is not there.
    """
    figure = block_as(scenario.published, Published)
    if figure is None:
        raise SpecError(f"{file}: found no `published` block; see docs/published.md.")
    value, made_of = _metric(scenario, figure)
    if figure.baseline:
        changed = load_scenario(file, figure.baseline)
        of_changed = block_as(changed.published, Published)
        assert of_changed is not None
        base, of_base = _metric(changed, of_changed)
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
        return memory_metric(scenario, figure.metric, figure.step)
    if figure.basis == "run":
        return _of_run(scenario, figure.metric)
    assert figure.step is not None
    shape = batch_shape(figure.step, scenario)
    costs = step_costs(scenario)
    estimate = costs.estimate(shape)
    if figure.operator:
        return _of_operator(scenario, figure, estimate)
    value = step_metrics(scenario, estimate, shape, costs.tokens_per_decode(shape))[figure.metric]
    return value, f"a step of {estimate.duration_s * 1e3:.3g} ms, {shares_text(estimate.bound_share)}"


# ------------------------------------------------------------------------- of one operator


def _of_operator(scenario: Scenario, figure: Published, estimate: StepEstimate) -> _Value:
    rows = _rows_named(figure.operator, estimate)
    seconds = sum(row.duration_s for row in rows)
    values = {
        "time_us": seconds * _S,
        "layer_time_us": sum(row.time.duration_s for row in rows) * _S,
        "roofline_us": sum(row.count * roofline_s(row.work, scenario.hardware) for row in rows) * _S,
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


# ------------------------------------------------------------------------- of a whole run


def _of_run(scenario: Scenario, metric: str) -> _Value:
    if metric == "max_request_rate":
        rate = max_request_rate(scenario)
        return rate, f"{rate:.3g} requests per second meet the slo"
    result = sim.simulate(scenario, keep_steps=metric == "mean_batch")
    value = run_metric(result, metric)
    if value is None:
        raise SpecError(f"published.metric: this run has no {metric} (request_goodput needs an slo, USD a price).")
    summary = result.summary
    return value, f"a run of {summary['duration']:.3g} s, {shares_text(summary.get('bound_share') or {})}"

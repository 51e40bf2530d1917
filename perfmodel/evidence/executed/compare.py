"""Simulated vs. executed: the same engine on two clocks. From most to least direct:

    step               every executed step against its prediction for exactly that plan (cost model alone)
    e2el, ttft, tpot   every request of two whole runs, one on each clock (cost model and its consequences)
    *_mean, duration   means over requests, and the length of the run

Plans may differ: a longer step gathers other arrivals. `plans_agree` in the notes counts equal steps.

For a run on another engine (`validate executor SCENARIO --measured FOLDER`) steps are predicted for what each computed,
requests by simulating the whole scenario, both with the calibration of `engine.profile` that `perfmodel calibrate --on`
wrote, or that ships."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf
from typing import Any, NamedTuple

import numpy as np

from perfmodel.cost import StepCosts, step_costs
from perfmodel.cost.calibrations.provenance import provenance_of
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.steps.tables import PS_PER_S
from perfmodel.engine import Backend, Outcome, StepPlan
from perfmodel.evidence.executed.bridge import Progress
from perfmodel.evidence.fit.whole_steps import Chunks, EngineSteps, shapes_of
from perfmodel.evidence.report import ErrorStats, Rows, ValidationReport, median_of_others
from perfmodel.ops.work import BatchShape
from perfmodel.sim import simulate
from perfmodel.sim.fleet.cluster import backend_of
from perfmodel.sim.records.columns import RequestColumns, StepColumns
from perfmodel.sim.records.result import RunResult
from perfmodel.sim.replica.backend import SimulatedBackend, shape_of
from perfmodel.sim.replica.serving import second_tier
from perfmodel.sim.replica.step_costs import shared_step_costs
from perfmodel.specs.scenario import Scenario

_REQUEST_METRICS = ("e2el", "ttft", "tpot")
_Row = tuple[float, float, str]  # predicted and measured seconds, and what they are of


class StepPair(NamedTuple):
    """One executed step, with predicted and measured duration."""

    step: int
    num_tokens: int
    num_decodes: int
    decode_context: int
    num_chunks: int
    predicted_s: float
    measured_s: float
    shape: BatchShape | None = None

    @property
    def kind(self) -> str:
        """decode | chunk | mixed"""
        return "decode" if not self.num_chunks else "mixed" if self.num_decodes else "chunk"

    @property
    def row(self) -> _Row:
        label = (
            f"step {self.step}: {self.num_decodes} decodes with {self.decode_context} tokens of context, "
            f"{self.num_chunks} chunks with {self.num_tokens - self.num_decodes} tokens"
        )
        return self.predicted_s, self.measured_s, label


class ShadowedBackend:
    """Executes with `real`, a Backend or a GroupBackend, and records a prediction of every plan in `pairs`."""

    def __init__(self, real: Any, predicted: Backend, pairs: list[StepPair]) -> None:
        self._pairs = pairs
        self._real = real
        self._predicted = predicted

    def execute(self, plan: StepPlan) -> Outcome:
        """The real outcome; the prediction is only recorded."""
        predicted = self._predicted.execute(plan).duration
        outcome: Outcome = self._real.execute(plan)
        self._note(plan, predicted, outcome)
        return outcome

    def execute_together(self, plans: Mapping[int, StepPlan]) -> Sequence[Outcome]:
        """The real outcomes of ranks that step together: each step is predicted to last as long as the slowest."""
        predicted = max(self._predicted.execute(plan).duration for plan in plans.values())
        outcomes: Sequence[Outcome] = self._real.execute_together(plans)
        for plan, outcome in zip(plans.values(), outcomes, strict=True):
            self._note(plan, predicted, outcome)
        return outcomes

    def _note(self, plan: StepPlan, predicted: int, outcome: Outcome) -> None:
        shape = (plan.index, plan.num_tokens, len(plan.decodes), plan.decode_context, len(plan.chunks))
        self._pairs.append(StepPair(*shape, predicted / PS_PER_S, outcome.duration / PS_PER_S, shape_of(plan)))


def predictor_of(scenario: Scenario, costs: StepCosts) -> SimulatedBackend:
    """Prices the plans of an executed run."""
    predictor, tier = backend_of(scenario, costs.cost_model(), is_executed=True), second_tier(scenario, costs)
    predictor.restore = None if tier is None else tier.cost
    return predictor


class RunPrediction:
    """What the model says of a run while it is executed: of each step as its plan is made, of the whole afterwards."""

    def __init__(self, scenario: Scenario) -> None:
        self._costs = step_costs(scenario)
        self._pairs: list[StepPair] = []

    def around(self, backend: Backend, pool: Scenario) -> ShadowedBackend:
        """`backend` of an engine of `pool`, with a prediction for every plan that it executes."""
        return ShadowedBackend(backend, predictor_of(pool, shared_step_costs(pool)), self._pairs)

    def compare(self, executed: RunResult) -> "RunComparison":
        """The executed run vs the simulation of its scenario, with the measured acceptance rate of drafts."""
        simulated = simulate(executed.scenario, keep_steps=True)
        metrics = _compare_runs(ExecutorComparison(simulated, executed, self._pairs))
        there = {key: name for key, name in _MEANS.items() if f"{key}_mean" in metrics}
        means = {f"mean {name.upper()}": metrics[f"{key}_mean"][0] for key, name in there.items()}
        moved = executed.summary.get("kv_transfer")
        if moved:
            predicted = simulated.summary["kv_transfer"]["mean_ms"] / 1e3
            means["mean KV transfer"] = predicted, moved["mean_ms"] / 1e3, f"{moved['transfers']:,} transfers"
        for kind in ("decode", "chunk", "mixed"):
            pairs = [pair for pair in self._pairs if pair.kind == kind]
            if pairs:
                predicted = sum(pair.predicted_s for pair in pairs) / len(pairs)
                measured = sum(pair.measured_s for pair in pairs) / len(pairs)
                means[f"mean {kind} step"] = predicted, measured, f"{len(pairs):,} steps"
        return RunComparison(simulated, means, self._worst())

    def _worst(self) -> str:
        """The step that was missed by most seconds, and what takes most of it as predicted."""
        pair = max(self._pairs, key=lambda pair: abs(pair.predicted_s - pair.measured_s), default=None)
        if pair is None or pair.shape is None:
            return ""
        predicted, measured, label = pair.row
        rows = self._costs.cost_model().explain(pair.shape).rows
        largest = max(rows, key=lambda row: row.duration_s)
        share = largest.duration_s / max(sum(row.duration_s for row in rows), 1e-12)
        return (
            f"Largest miss of a step: {1e3 * predicted:,.1f} ms predicted, {1e3 * measured:,.1f} measured, {label}; "
            f"{largest.name} takes {share:.0%} of it as predicted."
        )


_MEANS = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}


@dataclass(frozen=True)
class RunComparison:
    """The simulation of an executed run, means of both, (predicted seconds, measured seconds, of what) by name, and a
    sentence about the largest miss."""

    simulated: RunResult
    means: Mapping[str, _Row]
    worst: str

    def to_json(self) -> dict[str, Any]:
        """Milliseconds by name."""
        rows = {name: {"predicted_ms": 1e3 * row[0], "measured_ms": 1e3 * row[1]} for name, row in self.means.items()}
        return {**rows, "largest_miss": self.worst}


@dataclass(frozen=True)
class ExecutorComparison:
    """One workload on both clocks, with predictions of the executed steps."""

    simulated: RunResult
    executed: RunResult
    steps: Sequence[StepPair] = field(repr=False)


def report_executor(
    comparisons: Sequence[ExecutorComparison], residuals: Residuals, notes: Sequence[str] = ()
) -> ValidationReport:
    """The report over `comparisons`; several are also groups, with `notes`. residuals: of whole steps; their 80 % range
    is every prediction's interval"""
    interval = (exp(residuals.p10), exp(residuals.p90)) if residuals.num_rows else None
    runs = [_compare_runs(comparison) for comparison in comparisons]
    metrics = {name: _rows([row for run in runs for row in run.get(name, ())], interval) for name in runs[0]}
    by: dict[str, dict[str, ErrorStats]] = {}
    if len(runs) > 1:
        for number, run in enumerate(runs, start=1):
            of_run = {name: _rows(rows, interval) for name, rows in run.items()}
            by[f"run {number}"] = {name: rows.stats() for name, rows in of_run.items() if len(rows)}
    steps = [pair for comparison in comparisons for pair in comparison.steps]
    for group, (kind, low, high) in _STEP_GROUPS.items():
        rows = _rows([pair.row for pair in steps if pair.kind == kind and low <= pair.num_decodes <= high], interval)
        by |= {group: {"step": rows.stats()}} if len(rows) else {}
    return ValidationReport(
        kind="executor",
        rows=len(steps) + sum(len(_requests(comparison.executed)) for comparison in comparisons),
        covered=len(metrics["step"]) + len(metrics["e2el"]),
        metrics={name: rows.stats() for name, rows in metrics.items() if len(rows)},
        by=by,
        worst=[row for name in ("step", *_REQUEST_METRICS) for row in metrics[name].worst(name, 3)],
        notes=[*notes, *map(_agreement, comparisons)],
    )


def _compare_runs(comparison: ExecutorComparison) -> dict[str, list[_Row]]:
    """Rows per metric: `step`; `e2el, ttft, tpot` per request, their means; `duration`."""
    simulated, executed = _requests(comparison.simulated), _requests(comparison.executed)
    ids, in_sim, in_exec = np.intersect1d(simulated.request_id, executed.request_id, return_indices=True)
    labels = [
        f"request {i}: {executed.num_prompt_tokens[row]} + {executed.num_output_tokens[row]} tokens"
        for i, row in zip(ids, in_exec, strict=True)
    ]
    metrics = {"step": [pair.row for pair in comparison.steps]}
    for name in _REQUEST_METRICS:
        predicted, measured = (getattr(requests, f"{name}_s") for requests in (simulated, executed))
        metrics[name] = list(zip(predicted[in_sim].tolist(), measured[in_exec].tolist(), labels, strict=True))
    for name in _REQUEST_METRICS:
        rows = _rows(metrics[name])
        if len(rows):
            metrics[f"{name}_mean"] = [(float(rows.predicted.mean()), float(rows.measured.mean()), f"mean {name}")]
    ends = float(simulated.finished_s.max()), float(executed.finished_s.max())
    return metrics | {"duration": [(*ends, "duration of the run")]}


def _rows(rows: Sequence[_Row], interval: tuple[float, float] | None = None) -> Rows:
    predicted, measured, labels = zip(*rows, strict=True) if rows else ((), (), ())
    return Rows(predicted, measured, labels, interval, median_of_others(measured, [""] * len(measured)))


# Steps by kind, and those of decodes by batch: the kind, and the range of decodes.
_STEP_GROUPS: Mapping[str, tuple[str, int, float]] = {
    **{kind: (kind, 0, inf) for kind in ("decode", "chunk", "mixed")},
    "decode batch 1": ("decode", 1, 1),
    "decode batch 2-4": ("decode", 2, 4),
    "decode batch 5-8": ("decode", 5, 8),
    "decode batch 9-16": ("decode", 9, 16),
    "decode > 16": ("decode", 17, inf),
}


def _requests(result: RunResult) -> RequestColumns:
    if result.requests is None:
        raise ValueError("the run's request records were not saved")
    return result.requests


def _agreement(comparison: ExecutorComparison) -> str:
    """Number of steps with the same plan in both runs."""
    simulated, executed = comparison.simulated.steps, comparison.executed.steps
    if simulated is None or executed is None:
        return "Step records were not saved: plans are not compared."
    ours, theirs = _plans(simulated), _plans(executed)
    same = sum(ours.get(index) == shape for index, shape in theirs.items())
    return f"{same} of {len(theirs)} executed steps had the same plan in the simulation."


def _plans(steps: StepColumns) -> dict[int, tuple[int, ...]]:
    """Step index -> what ran, with leaps expanded: each of their steps adds a token to every decode's context."""
    names = ("index", "num_steps", "num_tokens", "num_decodes", "decode_context", "num_chunks")
    columns = (getattr(steps, name).tolist() for name in names)
    return {
        index + i: (tokens, decodes, context + i * decodes, chunks)
        for index, count, tokens, decodes, context, chunks in zip(*columns, strict=True)
        for i in range(count)
    }


def validate_recorded(
    scenario: Scenario, requests: RequestColumns, steps: StepColumns, chunks: Chunks, progress: Progress | None = None
) -> ValidationReport:
    """Simulate the scenario and compare it with the recorded run: requests, steps (none for a server) and chunks."""
    simulated = simulate(scenario, progress=progress, keep_steps=True)
    executed = RunResult(scenario, "executed", {}, requests, steps)
    costs = step_costs(scenario)
    cost_model = costs.cost_model()
    pairs = [
        StepPair(
            int(steps.index[number]),
            shape.num_tokens,
            shape.num_decodes,
            shape.decode_context,
            len(shape.prefills),
            cost_model.duration_ps(shape) / PS_PER_S,
            float(steps.end_s[number] - steps.start_s[number]),
        )
        for number, shape in enumerate(shapes_of(EngineSteps(scenario, steps, chunks)))
    ]
    report = report_executor([ExecutorComparison(simulated, executed, pairs)], costs.calibration.step_residuals)
    return replace(report, provenance=provenance_of([scenario]))

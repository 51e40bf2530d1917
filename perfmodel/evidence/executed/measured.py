"""`validate executor --measured FOLDER`: the simulator vs. a device that the executor's suite measured, offline.

Half of the measured kernels and steps calibrate the device; predicted are

    kernel            each problem of the other half
    step              whole steps of the other half
    serving_step      every step of the served scenarios, at its exact shape
    e2el_mean, ...    the scenarios, simulated whole
    speedup           scenarios with and without a technique: the gain on both clocks

A sentence per operator compares kernels with the device's limit and the best library call. A problem's limit is the
larger of bytes / measured copy bandwidth and FLOPs / measured rate of a library product in the same format and run."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import exp
from pathlib import Path, PurePosixPath
from statistics import median
from typing import TypeVar

import numpy as np

from perfmodel.cost import step_costs
from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.calibrations.engine_profile import EngineProfile
from perfmodel.cost.calibrations.provenance import FittedSource, Provenance
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.power import energy_j
from perfmodel.cost.steps.tables import PS_PER_S
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.executed.technique import Sides, Technique, TechniqueRun, TechniqueVerdict
from perfmodel.evidence.executed.techniques import speedups
from perfmodel.evidence.fit.device import costs_of, fit_measured, predict_kernels
from perfmodel.evidence.observation import NO_INTERVAL, Observation, Prediction, Progress, reported
from perfmodel.evidence.report import Comparison, Dimension, ValidationReport, by_dimension, comparison_of, pooled
from perfmodel.evidence.sources import measured as suites
from perfmodel.files.blocks import block_as
from perfmodel.ops.work import BatchShape
from perfmodel.planning.points import run_metric
from perfmodel.sim import simulate
from perfmodel.specs import load_hardware, load_scenario
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario

RecordT = TypeVar("RecordT", suites.KernelRecord, suites.MeasuredStep)
_MEANS = ("e2el", "tpot", "ttft")
_WORST = 5


def served_steps(run: suites.ServingRecord, scenario: Scenario, calibration: Calibration) -> list[Prediction]:
    """Each executed step as a `serving_step` in seconds, predicted at its exact shape."""
    cost_model = step_costs(scenario, calibration, EngineProfile(engine=calibration.engine)).cost_model()
    result = []
    for fields, seconds in zip(run.steps.shapes, run.steps.seconds, strict=True):
        batch = suites.shape_of(
            dict(zip(BatchShape._fields, fields, strict=False))
        )  # those at their defaults are left out
        drafts = f", {batch.num_draft_tokens} drafted" if batch.num_draft_tokens else ""
        label = f"{batch.num_decodes} decodes, {len(batch.prefills)} prompts, {batch.num_tokens} tokens{drafts}"
        name, labels = f"{run.scenario}: {label}", {"scenario": run.scenario}
        row = Observation(name, None, {"serving_step": seconds}, labels=labels)
        result.append(_predicted(row, cost_model.duration_ps(batch) / PS_PER_S, calibration.step_residuals))
    return result


def _predicted(row: Observation, seconds: float, residuals: Residuals) -> Prediction:
    """`row` of one metric predicted as `seconds`, with the 80 % interval of `residuals`."""
    interval = (exp(residuals.p10), exp(residuals.p90)) if residuals.num_rows else NO_INTERVAL
    return Prediction(row, dict.fromkeys(row.metrics, seconds), intervals=dict.fromkeys(row.metrics, interval))


def _compared(metric: str, pairs: Sequence[Prediction], *dimensions: str, unit: str = "s") -> Comparison:
    """`metric` of `pairs`, by the labels `dimensions` of their rows."""
    groups = {name: Dimension.of([pair.row.labels[name] for pair in pairs]) for name in dimensions}
    return comparison_of(metric, unit, pairs, {}, groups)


def validate_measured(folder: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Calibrate on half of `folder`, predict the rest. Raises SpecError for an invalid folder."""
    measured = suites.read_measurements(folder)
    info, hardware = measured.info, load_hardware(measured.info.device)
    fitted_kernels, kernels = halves(measured.kernels, lambda record: record.operator)
    fitted_steps, steps = halves(
        measured.steps, lambda step: f"{step.model} {step.overrides} {bool(step.shape.get('prefills'))}"
    )
    calibration = fit_measured(replace(measured, kernels=fitted_kernels, steps=fitted_steps))
    # A CPU is calibrated on whole steps: operators alone in a loop are another thing there.
    kernels = kernels if hardware.kind != "cpu" else ()
    unpredicted: list[str] = [f"{key}: {why}" for key, why in info.failures.items()]
    comparisons = [
        _kernels(kernels, calibration, hardware),
        _steps(steps, calibration, hardware),
        _energies(measured.steps, calibration, hardware),
        *_servings(measured, calibration, unpredicted, progress),
    ]
    verdicts = _verdicts(measured, calibration, unpredicted)
    sentences = []
    if verdicts:
        comparison, sentence = speedups(verdicts)
        comparisons.append(comparison)
        sentences.append(sentence)
    compared = [item for item in comparisons if len(item.rows)]
    about = (
        f"Measured on {info.device_name or info.device} with {info.kernels} kernels on {info.date}; calibrated on "
        f"{len(fitted_kernels)} of {len(measured.kernels)} kernels and {len(fitted_steps)} of {len(measured.steps)} "
        f"steps, every other one of each kind. The rest, and the {len(measured.serving)} served scenarios, are "
        f"predicted."
    )
    return ValidationReport(
        kind="executor",
        rows=len(kernels) + len(steps) + sum(len(run.steps.seconds) for run in measured.serving),
        covered=sum(len(item.rows) for item in compared if item.metric in ("kernel", "step", "serving_step")),
        metrics=pooled(compared),
        by=by_dimension(compared),
        worst=[row for item in compared for row in item.rows.worst(item.metric, _WORST)],
        notes=[*_smoke_notes(measured), *sentences, *_rate_notes(measured), *_state_notes(measured), *unpredicted],
        comparisons=compared,
        provenance=Provenance((FittedSource.of(calibration),)),
        about=about,
        techniques=[item.to_json() for item in verdicts],
    )


def halves(
    records: Sequence[RecordT], group: Callable[[RecordT], str]
) -> tuple[tuple[RecordT, ...], tuple[RecordT, ...]]:
    """Alternating records of each group: the odd ones and the even ones."""
    seen: Counter[str] = Counter()
    parts: tuple[list[RecordT], list[RecordT]] = ([], [])
    for record in records:
        name = group(record)
        parts[seen[name] % 2].append(record)
        seen[name] += 1
    return tuple(parts[0]), tuple(parts[1])


def _kernels(records: Sequence[suites.KernelRecord], calibration: Calibration, hardware: HardwareSpec) -> Comparison:
    pairs = []
    for record, seconds, residuals in predict_kernels(records, calibration, hardware):
        row = Observation(record.label, record, {"kernel": record.seconds}, labels={"operator": record.operator})
        pairs.append(_predicted(row, seconds, residuals))
    return _compared("kernel", pairs, "operator")


def _steps(records: Sequence[suites.MeasuredStep], calibration: Calibration, hardware: HardwareSpec) -> Comparison:
    pairs = []
    for step in records:
        kind = "prompts" if step.batch.prefills else f"batch {step.batch.num_decodes}"
        row = Observation(step.label, step, {"step": step.seconds}, labels={"model": step.model, "step": kind})
        seconds = costs_of(step, hardware, calibration).estimate(step.batch).duration_s
        pairs.append(_predicted(row, seconds, calibration.step_residuals))
    return _compared("step", pairs, "model", "step")


def _energies(records: Sequence[suites.MeasuredStep], calibration: Calibration, hardware: HardwareSpec) -> Comparison:
    """Joules of the device for a step, by the power that is fitted over all devices: nothing is fitted to these."""
    pairs = []
    for step in records:
        if step.joules is None:
            continue
        row = Observation(step.label, step, {"step_energy": step.joules}, labels={"model": step.model})
        cost_model = costs_of(step, hardware, calibration).cost_model()
        seconds = cost_model.duration_ps(step.batch) / PS_PER_S
        pairs.append(Prediction(row, {"step_energy": energy_j(hardware, cost_model.usage(), seconds)}))
    return _compared("step_energy", pairs, "model", unit="J")


def _servings(
    measured: suites.Measurements, calibration: Calibration, unpredicted: list[str], progress: Progress | None
) -> list[Comparison]:
    """Steps and means of all scenarios, simulated whole; failures go to `unpredicted`."""
    steps: list[Prediction] = []
    runs: list[Prediction] = []
    for run in reported(measured.serving, len(measured.serving), progress):
        try:
            scenario = load_scenario(run.scenario, run.overrides)
            is_own = scenario.engine.profile == calibration.engine
            steps += served_steps(run, scenario, calibration) if is_own else ()
            summary = simulate(scenario, calibration=calibration if is_own else None, intervals=True).summary
        except PerfmodelError as error:
            unpredicted.append(f"{run.scenario}: {error}")
        else:
            simulated, executed, intervals = {}, {}, {}
            for name in _MEANS:
                metric, key = f"{name}_mean", f"mean_{name}_ms"
                simulated[metric] = summary[key] * 1e-3
                executed[metric] = float(np.nanmean(np.asarray(run.requests[f"{name}_s"], dtype=float)))
                low, high = (summary.get("interval") or {}).get(key) or NO_INTERVAL
                intervals[metric] = low * 1e-3 / simulated[metric], high * 1e-3 / simulated[metric]
            name = run.scenario if is_own else f"{run.scenario} on {scenario.engine.profile}"
            row = Observation(name, scenario, executed, labels={"scenario": name})
            runs.append(Prediction(row, simulated, intervals=intervals))
    means = (_compared(f"{name}_mean", runs, "scenario") for name in _MEANS)
    return [_compared("serving_step", steps, "scenario"), *means]


def _verdicts(
    measured: suites.Measurements, calibration: Calibration, unpredicted: list[str]
) -> list[TechniqueVerdict]:
    """Verdict of each pair with both sides; failures go to `unpredicted`."""
    result = []
    for name in dict.fromkeys(key.rpartition(" ")[0] for key in measured.pairs):
        keys = [f"{name} {side}" for side in suites.SIDES]
        if all(key in measured.pairs for key in keys):
            try:
                result.append(_verdict([measured.pairs[key] for key in keys], calibration, measured.info.date))
            except PerfmodelError as error:
                unpredicted.append(f"{name}: {error}")
    return result


def _verdict(sides: list[suites.ServingRecord], calibration: Calibration, date: str) -> TechniqueVerdict:
    scenarios = [load_scenario(side.scenario, side.overrides) for side in sides]
    technique = block_as(scenarios[0].technique, Technique)
    if technique is None:
        raise SpecError(f"{sides[0].scenario}: has no `technique` block any more.")
    simulated = [run_metric(simulate(item, calibration=calibration), technique.metric) for item in scenarios]
    executed = [side.summary.get(technique.metric) for side in sides]
    if not all((*simulated, *executed)):
        raise SpecError(f"{sides[0].scenario}: these runs have no {technique.metric}.")
    biases = []  # how much longer the steps were predicted to take than they took, all together
    for side, item in zip(sides, scenarios, strict=True):
        steps = _compared("serving_step", served_steps(side, item, calibration)).rows
        biases.append(sum(steps.predicted.tolist()) / sum(steps.measured.tolist()) - 1)
    gained, took = (Sides(*(float(value or 0.0) for value in clock)) for clock in (simulated, executed))
    file = f"{PurePosixPath(sides[0].scenario).name}.yaml"
    return TechniqueVerdict.of(technique, file, [TechniqueRun(gained, took, Sides(*biases))], "", date)


def _rate_notes(measured: suites.Measurements) -> Iterator[str]:
    """One sentence per operator, wrong results first."""
    by_operator: dict[str, list[suites.KernelRecord]] = {}
    for record in measured.kernels:
        by_operator.setdefault(record.operator, []).append(record)
        if record.error is not None and record.tolerance is not None and not record.error <= record.tolerance:
            yield (
                f"WRONG RESULT: {record.label} differs from its reference by {record.error:.2g} of the largest "
                f"value; expected at most {record.tolerance:.2g}."
            )
    for operator, records in sorted(by_operator.items()):
        limits = [(*_limit(record, measured.info.ceilings), record) for record in records]
        shares = [(seconds / record.seconds, bound, record.label) for seconds, bound, record in limits if seconds > 0]
        if not shares:
            continue
        best, bound, label = max(shares, key=lambda item: item[0])
        sentence = (
            f"{operator}: {median(share for share, *_ in shares):.0%} of the limit (median of {len(shares)}), at best "
            f"{best:.0%} of {bound} at {label}"
        )
        faster = [record.baseline_s / record.seconds for record in records if record.baseline_s]
        num_eager = sum(
            any(call.is_eager for call in record.baselines.values() if call.seconds == record.baseline_s)
            for record in records
        )
        eager = f" ({num_eager} of {len(faster)} library calls timed eagerly)" if num_eager else ""
        yield sentence + (f"; {median(faster):.2f} times the library's speed{eager}." if faster else ".")
    if measured.info.left_out:
        yield f"{len(measured.info.left_out)} tasks did not fit the time budget."


def _limit(record: suites.KernelRecord, ceilings: suites.Ceilings) -> tuple[float, str]:
    """(minimal seconds of a problem or 0 if unknown, its bound)"""
    rate = ceilings.rate(record.rate)
    memory = record.bytes / ceilings.bandwidth if ceilings.bandwidth else 0.0
    compute = record.flops / rate if rate else 0.0
    return max(memory, compute), "memory" if memory >= compute else "compute"


def _smoke_notes(measured: suites.Measurements) -> Iterator[str]:
    checks = measured.smoke
    wrong = {key: check for key, check in checks.items() if not check.is_right}
    if checks:
        yield f"Smoke: {len(checks) - len(wrong)} of {len(checks)} checks are right."
    for key, check in wrong.items():
        yield f"WRONG RESULT: {key}: differs by {check.error:.2g}; expected at most {check.tolerance:.2g}."


def _state_notes(measured: suites.Measurements) -> Iterator[str]:
    """Clocks and power: a clock that drops at the power limit explains times."""
    readings = measured.info.readings
    units = {"sm_clock_mhz": "MHz", "memory_clock_mhz": "MHz", "power_w": "W", "temperature_c": "C"}
    columns = {name: values for name in units if (values := getattr(readings, name))}
    if columns:
        stated_as = (f"{name} {median(row):g} ({min(row):g} to {max(row):g})" for name, row in columns.items())
        yield f"While measuring, median and range: {'; '.join(stated_as)}."

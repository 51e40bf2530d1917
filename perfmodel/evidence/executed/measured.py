"""`validate executor --measured FOLDER`: the simulator beside a device that the executor's programme measured, offline.

Half of the measured kernels and steps calibrate the device, the other half is predicted:

    kernel            each problem of the other half
    step              whole steps of the other half
    serving_step      every step of the served scenarios, for exactly its shape
    e2el_mean, ...    the scenarios simulated whole, each beside its run
    speedup           scenarios with a technique and without, what it gains on both clocks

How near kernels come to what the device can do, and to the best library call, is a sentence per operator. The limit of
a problem is the larger of its bytes over the measured copy bandwidth and its FLOPs over the measured rate of a library
product in the same format: figures of the same device in the same run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path, PurePosixPath
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np

from perfmodel.cost import step_costs
from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.calibrations.engine_profile import EngineProfile
from perfmodel.cost.calibrations.provenance import FittedSource, Provenance
from perfmodel.cost.forms.fits import Residuals
from perfmodel.cost.steps.tables import PS_PER_S
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.executed.technique import Sides, Technique, TechniqueRun, TechniqueVerdict
from perfmodel.evidence.executed.techniques import speedups
from perfmodel.evidence.fit.device import KernelPrediction, costs_of, fit_measured, predict_kernels
from perfmodel.evidence.report import Comparison, Dimension, Rows, ValidationReport, by_dimension, pooled
from perfmodel.evidence.sources.measured import (
    SIDES,
    Ceilings,
    KernelRecord,
    MeasuredStep,
    Measurements,
    ServingRecord,
    read_measurements,
    shape_of,
)
from perfmodel.files.blocks import block_as
from perfmodel.ops.work import BatchShape
from perfmodel.planning.points import run_metric
from perfmodel.sim import simulate
from perfmodel.specs import load_hardware, load_scenario
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario


class ServedStep(NamedTuple):
    """One executed step of a scenario, seconds."""

    scenario: str
    label: str
    predicted: float
    executed: float


def served_steps(run: ServingRecord, scenario: Scenario, calibration: Calibration) -> list[ServedStep]:
    """Each step that was executed, predicted for exactly its shape."""
    pricer = step_costs(scenario, calibration, EngineProfile(engine=calibration.engine)).pricer()
    result = []
    for fields, seconds in zip(run.steps.shapes, run.steps.seconds, strict=True):
        batch = shape_of(dict(zip(BatchShape._fields, fields, strict=False)))  # those at their defaults are left out
        ticks = pricer.price(batch)
        drafts = f", {batch.num_draft_tokens} drafted" if batch.num_draft_tokens else ""
        label = f"{batch.num_decodes} decodes, {len(batch.prefills)} prompts, {batch.num_tokens} tokens{drafts}"
        result.append(ServedStep(run.scenario, f"{run.scenario}: {label}", ticks / PS_PER_S, seconds))
    return result


def pair_verdicts(
    pairs: Mapping[str, ServingRecord], calibration: Calibration, date: str, unpredicted: list[str]
) -> list[TechniqueVerdict]:
    """What each pair with both sides has shown; what cannot be simulated is said in `unpredicted`.

    pairs: by file and side; calibration: what simulates them; date: of the runs, ISO
    """
    result = []
    for name in dict.fromkeys(key.rpartition(" ")[0] for key in pairs):
        sides = [pairs.get(f"{name} {side}") for side in SIDES]
        if None in sides:
            continue
        try:
            result.append(_verdict([side for side in sides if side is not None], calibration, date))
        except PerfmodelError as error:
            unpredicted.append(f"{name}: {error}")
    return result


def _verdict(sides: list[ServingRecord], calibration: Calibration, date: str) -> TechniqueVerdict:
    scenarios = [load_scenario(side.scenario, side.overrides) for side in sides]
    technique = block_as(scenarios[0].technique, Technique)
    if technique is None:
        raise SpecError(f"{sides[0].scenario}: has no `technique` block any more.")
    simulated = [run_metric(simulate(item, calibration=calibration), technique.metric) for item in scenarios]
    executed = [side.summary.get(technique.metric) for side in sides]
    if not all((*simulated, *executed)):
        raise SpecError(f"{sides[0].scenario}: these runs have no {technique.metric}.")
    biases = [_bias(served_steps(side, item, calibration)) for side, item in zip(sides, scenarios, strict=True)]
    gained, measured = (Sides(*(float(value or 0.0) for value in clock)) for clock in (simulated, executed))
    file = f"{PurePosixPath(sides[0].scenario).name}.yaml"
    return TechniqueVerdict.of(technique, file, [TechniqueRun(gained, measured, Sides(*biases))], "", date)


def _bias(steps: list[ServedStep]) -> float:
    """How much longer the steps were predicted to take than they took, all together."""
    return sum(step.predicted for step in steps) / sum(step.executed for step in steps) - 1


Progress = Callable[[int, int], None]
RecordT = TypeVar("RecordT", KernelRecord, MeasuredStep)


class _Mean(NamedTuple):
    """A mean of one scenario, seconds; `low` and `high`: its 80 % interval as factors."""

    scenario: str
    simulated: float
    executed: float
    low: float
    high: float


_MEANS = ("e2el", "tpot", "ttft")
_WORST = 5


def validate_measured(folder: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Calibrate on half of what `folder` has, predict the rest. Raises SpecError for a folder that is no such thing."""
    measured = read_measurements(folder)
    hardware = load_hardware(measured.info.device)
    (told_kernels, kernels), (told_steps, steps) = (
        halves(measured.kernels, _kernel_group),
        halves(measured.steps, _step_group),
    )
    calibration = fit_measured(replace(measured, kernels=told_kernels, steps=told_steps))
    # A CPU is calibrated on whole steps: operators alone in a loop are another thing there.
    kernels = kernels if hardware.kind != "cpu" else ()
    unpredicted: list[str] = [f"{key}: {why}" for key, why in measured.info.failures.items()]
    comparisons = [
        _kernels(kernels, calibration, hardware),
        _steps(steps, calibration, hardware),
        *_servings(measured, calibration, unpredicted, progress),
    ]
    verdicts = pair_verdicts(measured.pairs, calibration, measured.info.date, unpredicted)
    sentences = []
    if verdicts:
        comparison, sentence = speedups(verdicts)
        comparisons.append(comparison)
        sentences.append(sentence)
    compared = [item for item in comparisons if len(item.rows)]
    rows = len(kernels) + len(steps) + sum(len(run.steps.seconds) for run in measured.serving)
    covered = sum(len(item.rows) for item in compared if item.metric in ("kernel", "step", "serving_step"))
    return ValidationReport(
        kind="executor",
        rows=rows,
        covered=covered,
        metrics=pooled(compared),
        by=by_dimension(compared),
        worst=[row for item in compared for row in item.rows.worst(item.metric, _WORST)],
        notes=[*_smoke_notes(measured), *sentences, *_rate_notes(measured), *_state_notes(measured), *unpredicted],
        comparisons=compared,
        provenance=Provenance((FittedSource.of(calibration),)),
        about=_about(measured, len(told_kernels), len(told_steps)),
        techniques=[item.to_json() for item in verdicts],
    )


def halves(
    records: Sequence[RecordT], group: Callable[[RecordT], str]
) -> tuple[tuple[RecordT, ...], tuple[RecordT, ...]]:
    """Every other record of each group: the first, third, ... and the second, fourth, ..."""
    seen: dict[str, int] = {}
    parts: tuple[list[RecordT], list[RecordT]] = ([], [])
    for record in records:
        name = group(record)
        parts[seen.get(name, 0) % 2].append(record)
        seen[name] = seen.get(name, 0) + 1
    return tuple(parts[0]), tuple(parts[1])


def _kernel_group(record: KernelRecord) -> str:
    return record.operator


def _step_group(record: MeasuredStep) -> str:
    kind = "prompt" if record.shape.get("prefills") else "decode"
    return f"{record.model} {record.overrides} {kind}"


def _kernels(records: Sequence[KernelRecord], calibration: Calibration, hardware: HardwareSpec) -> Comparison:
    result: list[KernelPrediction] = predict_kernels(records, calibration, hardware)
    residuals = [getattr(calibration.families[item.family], "residuals", Residuals()) for item in result]
    rows = Rows(
        [item.predicted_s for item in result],
        [item.record.seconds for item in result],
        [item.record.label for item in result],
        _interval(residuals),
    )
    return Comparison.of("kernel", rows, "s", {"operator": Dimension.of([item.record.operator for item in result])})


def _steps(records: Sequence[MeasuredStep], calibration: Calibration, hardware: HardwareSpec) -> Comparison:
    predicted = [costs_of(step, hardware, calibration).estimate(step.batch).duration_s for step in records]
    interval = _interval([calibration.step_residuals] * len(records))
    rows = Rows(predicted, [step.seconds for step in records], [step.label for step in records], interval)
    names = ["prompts" if step.batch.prefills else f"batch {step.batch.num_decodes}" for step in records]
    groups = {"model": Dimension.of([step.model for step in records]), "step": Dimension.of(names)}
    return Comparison.of("step", rows, "s", groups)


def _servings(
    measured: Measurements, calibration: Calibration, unpredicted: list[str], progress: Progress | None
) -> list[Comparison]:
    """Steps and means of all scenarios; what cannot be simulated is said in `unpredicted`."""
    steps: list[ServedStep] = []
    means: dict[str, list[_Mean]] = {name: [] for name in _MEANS}
    for done, run in enumerate(measured.serving, 1):
        try:
            scenario = load_scenario(run.scenario, run.overrides)
            steps += served_steps(run, scenario, calibration)
            for name, mean in _simulated_means(run, scenario, calibration).items():
                means[name].append(mean)
        except PerfmodelError as error:
            unpredicted.append(f"{run.scenario}: {error}")
        if progress is not None:
            progress(done, len(measured.serving))
    interval = _interval([calibration.step_residuals] * len(steps))
    rows = Rows([s.predicted for s in steps], [s.executed for s in steps], [s.label for s in steps], interval)
    result = [Comparison.of("serving_step", rows, "s", {"scenario": Dimension.of([s.scenario for s in steps])})]
    for name, item in means.items():
        names = [mean.scenario for mean in item]
        ends = ([mean.low for mean in item], [mean.high for mean in item])
        compared = Rows([mean.simulated for mean in item], [mean.executed for mean in item], names, ends)
        result.append(Comparison.of(f"{name}_mean", compared, "s", {"scenario": Dimension.of(names)}))
    return result


def _simulated_means(run: ServingRecord, scenario: Scenario, calibration: Calibration) -> dict[str, _Mean]:
    """The scenario simulated whole, each mean beside the executed one."""
    result = simulate(scenario, calibration=calibration, intervals=True)
    values = {}
    for name in _MEANS:
        key = f"mean_{name}_ms"
        simulated = result.summary[key] * 1e-3
        executed = float(np.nanmean(np.asarray(run.requests[f"{name}_s"], dtype=float)))
        low, high = (result.summary.get("interval") or {}).get(key) or (np.nan, np.nan)
        values[name] = _Mean(run.scenario, simulated, executed, low * 1e-3 / simulated, high * 1e-3 / simulated)
    return values


def _interval(residuals: Sequence[Residuals]) -> tuple[list[float], list[float]] | None:
    if not residuals:
        return None
    known = [item.num_rows > 0 for item in residuals]
    low = [exp(item.p10) if is_known else np.nan for item, is_known in zip(residuals, known, strict=True)]
    high = [exp(item.p90) if is_known else np.nan for item, is_known in zip(residuals, known, strict=True)]
    return low, high


def _about(measured: Measurements, num_kernels: int, num_steps: int) -> str:
    info: Any = measured.info
    return (
        f"Measured on {info.device_name or info.device} with {info.kernels} kernels on {info.date}; calibrated on "
        f"{num_kernels} of {len(measured.kernels)} kernels and {num_steps} of {len(measured.steps)} steps, every other "
        f"one of each kind. The rest, and the {len(measured.serving)} served scenarios, are predicted."
    )


@dataclass(frozen=True)
class _KernelRates:
    """Rates of one problem: share of the limit that is reached, its bound, and its speedup over the baseline."""

    record: KernelRecord
    limit_share: float | None
    bound: str  # memory | compute
    speedup: float | None

    @property
    def has_eager_baseline(self) -> bool:
        """Whether the call that it is compared with shows the host's launches."""
        times = [item for item in self.record.baselines.values() if item.seconds == self.record.baseline_s]
        return any(item.is_eager for item in times)


def _kernel_rates(record: KernelRecord, ceilings: Ceilings) -> _KernelRates:
    """The rates of one measured problem."""
    memory = record.bytes / ceilings.bandwidth if ceilings.bandwidth else 0.0
    rate = ceilings.rate(record.rate)
    compute = record.flops / rate if rate else 0.0
    limit = max(memory, compute)
    return _KernelRates(
        record,
        limit / record.seconds if limit > 0 else None,
        "memory" if memory >= compute else "compute",
        record.baseline_s / record.seconds if record.baseline_s else None,
    )


def _rate_notes(measured: Measurements) -> Iterator[str]:
    """One sentence per operator, wrong results first."""
    yield from _wrong(measured)
    by_operator: dict[str, list[_KernelRates]] = {}
    for record in measured.kernels:
        by_operator.setdefault(record.operator, []).append(_kernel_rates(record, measured.info.ceilings))
    for operator, rates in sorted(by_operator.items()):
        shares = [item for item in rates if item.limit_share is not None]
        if not shares:
            continue
        best = max(shares, key=lambda item: item.limit_share or 0.0)
        sentence = (
            f"{operator}: {median(item.limit_share or 0.0 for item in shares):.0%} of the limit (median of "
            f"{len(shares)}), at best {best.limit_share:.0%} of {best.bound} at {best.record.label}"
        )
        speedups = [item.speedup for item in rates if item.speedup is not None]
        num_eager = sum(item.has_eager_baseline for item in rates)
        eager = f" ({num_eager} of {len(speedups)} library calls timed eagerly)" if num_eager else ""
        yield sentence + (f"; {median(speedups):.2f} times the library's speed{eager}." if speedups else ".")
    if measured.info.left_out:
        yield f"{len(measured.info.left_out)} tasks did not fit the time budget."


def _smoke_notes(measured: Measurements) -> Iterator[str]:
    """How many checks came out right, and the others one by one."""
    checks = measured.smoke
    wrong = {key: check for key, check in checks.items() if not check.is_right}
    if checks:
        yield f"Smoke: {len(checks) - len(wrong)} of {len(checks)} checks are right."
    for key, check in wrong.items():
        yield f"WRONG RESULT: {key}: differs by {check.error:.2g}, allowed {check.tolerance:.2g}."


def _state_notes(measured: Measurements) -> Iterator[str]:
    """What the device did meanwhile: a clock that sinks under its power limit explains times."""
    readings = measured.info.readings
    units = {"sm_clock_mhz": "MHz", "memory_clock_mhz": "MHz", "power_w": "W", "temperature_c": "C"}
    columns = {name: values for name in units if (values := getattr(readings, name))}
    if columns:
        stated_as = (
            f"{name} {median(values):g} ({min(values):g} to {max(values):g})" for name, values in columns.items()
        )
        yield f"While measuring, median and range: {'; '.join(stated_as)}."


def _wrong(measured: Measurements) -> Iterator[str]:
    for record in measured.kernels:
        if record.error is not None and record.tolerance is not None and not record.error <= record.tolerance:
            yield (
                f"WRONG RESULT: {record.label} differs from its reference by {record.error:.2g} of the largest "
                f"value, allowed {record.tolerance:.2g}."
            )

"""`validate KIND --leave-out GROUP`: rows predicted by fits that have seen no row of their group.

Each fold leaves out one group: a model, a device, an engine, a number format, or a cell (a model under an engine's
version on a device in a number format). The engine's parameters are fitted to the rest, and what was left out is
simulated with them; without any rest it is simulated with the plausible values that fits start from. Derivatives are
taken once for all folds (means are all but linear in the parameters). 80 % intervals come from what fits leave
unexplained of the rest. Not refitted are parameters of kernels, which come from kernel tables, those of all engines
(routing.yaml), and those of the engine that the other kind of rows is fitted to (steady states, stages).

Accepted lengths of drafts have a law per series, refitted to the rest of the rows.
Published results have parameters by architecture: those of the one left out are the mean of the others. Single machines
have parameters by backend, fitted without the group. The intervals of both are the committed ones."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import Calibration, EngineProfile, Residuals, load_calibration, load_engine_profile
from perfmodel.cost.calibrations.whole_runs import load_whole_runs
from perfmodel.errors import SpecError
from perfmodel.evidence.fit import profiles
from perfmodel.evidence.fit.acceptance import FOLDS
from perfmodel.evidence.fit.backends import held_out, merged_setup
from perfmodel.evidence.fit.few import choose, fit_few, kernels_of, without_architecture
from perfmodel.evidence.fit.kernels import refitted
from perfmodel.evidence.fit.parameters import LinearErrors, with_facts
from perfmodel.evidence.fit.power import fit_power, predict_all
from perfmodel.evidence.fit.systems import MODULES, groups_of, key_of
from perfmodel.evidence.fit.whole_runs import without_own
from perfmodel.evidence.kinds.operators import PredictedKernel, own_calibration, report_kernels
from perfmodel.evidence.kinds.pooled import report_pooled, validate_mlperf, validate_served
from perfmodel.evidence.kinds.runs import report_energy, report_serving, report_steady_state, validate_acceptance
from perfmodel.evidence.observation import Floats, Observation, Prediction, Progress, reported
from perfmodel.evidence.predict.recorded import shortened_stages, simulate_runs, simulate_steady_states
from perfmodel.evidence.predict.results import predict_rows
from perfmodel.evidence.report import ValidationReport
from perfmodel.evidence.sources.kernels import Group, KernelTable, read_table, table_files
from perfmodel.evidence.sources.local import read_local_rows
from perfmodel.evidence.sources.recorded import read_serving_runs
from perfmodel.evidence.sources.steady import read_energy_rows, read_steady_states
from perfmodel.specs import load_hardware
from perfmodel.specs.scenario import Scenario

GroupOf = Callable[[Scenario], str]
GROUPS: Mapping[str, GroupOf] = {
    "cell": profiles.config_key,
    "model": lambda scenario: scenario.model.name,
    "device": lambda scenario: scenario.hardware.name,
    "engine": lambda scenario: scenario.engine.profile,
    "format": lambda scenario: scenario.model.quantization.weights or scenario.model.dtype,
}
_FEWEST_ROWS = 30  # that a kernel is fitted to
_SERVING_SHARE = 0.1  # of each stage's duration, for fits


class _Fold(NamedTuple):
    """Rows left out, the fit to the rest, the rows that it was fitted to, and their places in the linear model."""

    left_out: list[Observation]
    profile: EngineProfile
    rest: list[Observation]
    kept: NDArray[np.bool_]


def validate_left_out(kind: str, path: str | Path, group: str, progress: Progress | None = None) -> ValidationReport:
    """The report of `validate KIND`, each row predicted without its group. kind: operators, energy, serving,
    steady-state, local, mlperf, served or acceptance; group: a key of GROUPS; of published results "architecture"
    alone, of single machines "device" or "model", of kernels "shape", "device", "version", "engine" or "format", of
    accepted lengths a key of FOLDS. Raises SpecError for another group, and where the data cannot be read."""
    groups, report_by = _KINDS[kind]
    if group not in groups:
        raise SpecError(f"--leave-out: got {group}; expected {', '.join(groups)} with `validate {kind}`.")
    report = report_by(Path(path), group, progress)
    return replace(report, about=f"Each {group} was left out of the fit that predicts it. {report.about}")


def _folds(
    rows: Sequence[Observation],
    fitted: Sequence[Observation],
    per_row: NDArray[np.int64],
    model: LinearErrors[EngineProfile],
    group_of: GroupOf,
) -> Iterator[_Fold]:
    """A fold for each group. rows: to predict; fitted: to fit; per_row: errors in `model` of each fitted row"""
    of_fitted = np.array([group_of(row.scenario) for row in fitted])
    for group in sorted({group_of(row.scenario) for row in rows}):
        kept = np.repeat(of_fitted != group, per_row)
        logs = model.optimum(kept) if kept.any() else model.start
        rest = [row for row, name in zip(fitted, of_fitted, strict=True) if name != group]
        yield _Fold([row for row in rows if group_of(row.scenario) == group], model.profile(logs), rest, kept)


def _by_engine(rows: Sequence[Observation]) -> Iterator[tuple[str, list[Observation]]]:
    for engine in sorted({row.scenario.engine.profile for row in rows}):
        yield engine, [row for row in rows if row.scenario.engine.profile == engine]


def _serving(path: Path, group: str, progress: Progress | None) -> ValidationReport:
    rows, unread = read_serving_runs(path)
    pairs: list[Prediction] = []
    for engine, members in _by_engine(rows):
        short = shortened_stages(members, _SERVING_SHARE)
        begin = profiles.starting_profile(with_facts(load_engine_profile(engine)))

        def errors(profile: EngineProfile, rows: Sequence[Observation] = short) -> Floats:
            return profiles.stage_log_errors(simulate_runs(rows, profile=profile))

        model = LinearErrors.around(begin, profiles.PARAMETERS, errors)  # the committed values, near every fold's
        per_row = np.array([len(profiles.stage_log_errors([Prediction(row, row.metrics)])) for row in short])
        for fold in _folds(members, short, per_row, model, GROUPS[group]):
            residuals = profiles.step_residuals(fold.rest, fold.profile) if fold.kept.any() else Residuals()
            profile = fold.profile.model_copy(update={"latency_residuals": residuals})
            pairs += simulate_runs(fold.left_out, progress, profile=profile, intervals=True)
    return report_serving([pair for pair in pairs if not pair.row.is_overloaded], unread)


def _steady_state(path: Path, group: str, progress: Progress | None) -> ValidationReport:
    rows, unread = read_steady_states(path)
    pairs: list[Prediction] = []
    for engine, members in _by_engine([row for row in rows if row.is_reliable]):
        fitted = profiles.fitting_rows(rows, engine)
        if not fitted:
            unread += [(row.name, f"no row of {engine} is small enough to fit to") for row in members]
            continue
        begin = with_facts(load_engine_profile(engine))
        parameters = profiles.parameters_of(begin, fitted)

        def errors(profile: EngineProfile, rows: Sequence[Observation] = fitted) -> Floats:
            return profiles.steady_log_errors(simulate_steady_states(rows, profile=profile))

        model = LinearErrors.around(begin, parameters, errors)
        per_row = np.full(len(fitted), len(model.at_here) // len(fitted))  # errors of TPOT and of TTFT
        for fold in _folds(members, fitted, per_row, model, GROUPS[group]):
            profile = _with_residuals(fold, model)
            pairs += simulate_steady_states(fold.left_out, progress, profile=profile, intervals=True)
    return report_steady_state(pairs, unread)


def _with_residuals(fold: _Fold, model: LinearErrors[EngineProfile]) -> EngineProfile:
    """The fold's profile with what fits without each cell, or device, of the rest leave unexplained of it."""
    if fold.rest:
        part = replace(model, at_here=model.at_here[fold.kept], slopes=model.slopes[fold.kept])
        return profiles.with_steady_residuals(fold.profile, fold.rest, part)
    nothing = EngineProfile(engine=fold.profile.engine)
    names = ("devices", "tpot_residuals", "ttft_residuals", "tpot_residuals_elsewhere", "ttft_residuals_elsewhere")
    return fold.profile.model_copy(update={name: getattr(nothing, name) for name in names})


def _local(path: Path, group: str, progress: Progress | None) -> ValidationReport:
    rows, unread = read_local_rows(path)
    settings, predicted = held_out(rows, path.parent, group)
    rates = {setting.row: rate for setting, rate in zip(settings, predicted.tolist(), strict=True)}
    pairs: list[Prediction] = []
    for pair in predict_rows(rows, path.parent, progress):
        rate = rates.get(merged_setup(pair.row))
        if pair.reason or rate is not None:
            pairs.append(pair if rate is None else replace(pair, metrics={pair.row.setup.metric: rate}))
    return report_pooled("local", pairs, unread)


_KERNEL_ROWS = 100  # of each kernel, version and format of a table
# Columns that a run varies; the others make a shape.
_VARIED = ("batch_size", "isl", "step", "m", "num_tokens", "message_size", "seq_len", "latency_ms", "power")


class _Rows(NamedTuple):
    """One kernel's rows on one device, with the number of each row's shape: what a model and its shards fix."""

    table: KernelTable
    group: Group
    shapes: NDArray[np.int64]


def _operators(path: Path, group: str, progress: Progress | None) -> ValidationReport:
    if group == "all-but-50":
        return _all_but_chosen(path, progress)
    kernels: defaultdict[tuple[str | None, str, str, str], list[_Rows]] = defaultdict(list)
    notes, num_rows = list[str](), 0
    for file in table_files(path):
        try:
            table = read_table(file).sampled(_KERNEL_ROWS)
        except SpecError as error:
            notes.append(f"not covered: {error}")
            continue
        num_rows += len(table)
        shapes = table.numbered(tuple(name for name in table.columns if name not in _VARIED))
        for rows in groups_of(table, file) if table.op in MODULES else ():
            architecture = rows.device.hardware.declared.architecture
            kernels[architecture, rows.engine, table.op, rows.key].append(_Rows(table, rows, shapes[rows.rows]))
    predicted: list[PredictedKernel] = []
    for members in reported(kernels.values(), len(kernels), progress):
        predicted += (kernel for kernel in _without_group(members, group) if kernel is not None)
    about = "Rows of kernels with no other rows to fit to are predicted by a related kernel's fit."
    return report_kernels(predicted, num_rows, notes, about)


def _without_group(members: Sequence[_Rows], group: str) -> Iterator[PredictedKernel | None]:
    """Each row of a kernel, predicted without its shape, device, version, engine or format."""
    if group == "shape":
        for odd in (0, 1):
            aside = [rows._replace(group=rows.group.take(rows.shapes % 2 == odd)) for rows in members]
            rest = [rows.group.take(rows.shapes % 2 != odd) for rows in members]
            yield from _predicted_by_rest([rows for rows in aside if len(rows.group.rows)], rest, group)
    elif group in ("device", "version"):
        name_of = attrgetter("group.device.hardware.name" if group == "device" else "group.version")
        for name in sorted({name_of(rows) for rows in members}):
            rest = [rows.group for rows in members if name_of(rows) != name]
            yield from _predicted_by_rest([rows for rows in members if name_of(rows) == name], rest, group)
    else:
        yield from _predicted_by_rest(members, [], group)


def _predicted_by_rest(
    aside: Sequence[_Rows], rest: Sequence[Group], left_out: str
) -> Iterator[PredictedKernel | None]:
    rest = [group for group in rest if len(group.rows)]
    is_fitted = sum(len(group.rows) for group in rest) >= _FEWEST_ROWS
    fits: dict[str, Any] = {}  # by key, of the rest
    for table, group, _ in aside:
        own = own_calibration(table.system, group.engine)
        key = key_of(group, own)
        committed: Any = None if key is None else (own.others | own.families)[key]
        if key is not None and is_fitted:
            if key not in fits:
                fits[key] = refitted(committed, rest)
            yield PredictedKernel.of(table, group, fits[key], own)
            continue
        other = _related(group, own, left_out)
        alike = {key: fit for key, fit in other.families.items() if committed is None or fit.form == committed.form}
        key = key_of(group, other.model_copy(update={"families": alike}))
        yield None if key is None else PredictedKernel.of(table, group, other.families[key], other)


_CHOSEN = 50  # rows of a device that are left in by "all-but-50"


def _all_but_chosen(path: Path, progress: Progress | None) -> ValidationReport:
    """Each device of the tables as one of an architecture that nobody has measured, with as many rows as are chosen;
    the others are predicted."""
    systems = sorted({file.parent for file in table_files(path)})
    cases = [(folder, engine) for folder in systems for engine in ("vllm", "sglang", "trtllm")]
    predicted: list[PredictedKernel] = []
    notes = list[str]()
    for folder, engine in reported(cases, len(cases), progress):
        hardware = load_hardware(folder.name)
        try:
            kernels = kernels_of(folder.parent, engine, hardware, without_architecture(hardware, engine), folder.name)
        except SpecError as error:
            notes.append(f"not covered: {error}")
            continue
        chosen = choose(kernels, _CHOSEN)
        calibration = fit_few(kernels, chosen, hardware, engine)
        for op, some in kernels.items():
            for number, kernel in enumerate(some):
                aside = np.setdiff1d(np.arange(len(kernel.group.rows)), [row for of, row in chosen[op] if of == number])
                fit = calibration.families[key_of(kernel.group, calibration) or ""]
                predicted.append(PredictedKernel.of(kernel.table, kernel.group.take(aside), fit, calibration))
    about = f"Each device's own {_CHOSEN} rows were chosen, which `calibrate --rows {_CHOSEN}` does."
    return report_kernels(predicted, sum(len(kernel.group.rows) for kernel in predicted), notes, about)


def _related(rows: Group, own: Calibration, left_out: str) -> Calibration:
    """The calibration that stands in for one without the group."""
    hardware = rows.device.hardware
    if left_out == "device":
        return without_architecture(hardware, own.engine)
    if left_out == "engine":
        return load_calibration(hardware, own.engine, without=lambda _, engine: engine == own.engine)
    hidden = rows.key.split("/")[1:2] if left_out == "format" else rows.key.split("/")[1:]
    families = {key: fit for key, fit in own.families.items() if key.split("/")[1 : 1 + len(hidden)] != hidden}
    return own.model_copy(update={"families": families, "others": {}})


def _published(
    validate: Callable[..., ValidationReport], path: Path, _: str, progress: Progress | None
) -> ValidationReport:
    return validate(path, progress, without_own(load_whole_runs()))


def _energy(path: Path, group: str, progress: Progress | None) -> ValidationReport:
    rows, unread = read_energy_rows(path)
    names = [GROUPS[group](row.scenario) for row in rows]
    pairs: list[Prediction] = []
    for name in sorted(set(names)):
        aside, rest = (
            [row for row, its in zip(rows, names, strict=True) if (its == name) is is_out] for is_out in (True, False)
        )
        pairs += predict_all(aside, progress, fit_power(rest, is_crossed=False))
    return report_energy(pairs, unread)


_Report = Callable[[Path, str, Progress | None], ValidationReport]
_ALL = tuple(GROUPS)
# By kind: what can be left out, and the report without it.
_KINDS: Mapping[str, tuple[tuple[str, ...], _Report]] = {
    "operators": (("shape", "device", "version", "engine", "format", "all-but-50"), _operators),
    "energy": (("model", "device", "format"), _energy),
    "serving": (_ALL, _serving),
    "steady-state": (_ALL, _steady_state),
    "local": (("device", "model"), _local),
    "mlperf": (("architecture",), partial(_published, validate_mlperf)),
    "served": (("architecture",), partial(_published, validate_served)),
    "acceptance": (tuple(FOLDS), lambda path, group, progress: validate_acceptance(path, progress, group)),
}

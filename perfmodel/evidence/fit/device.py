"""Calibrates the executor's engine from its suite's measurements, without the device.

GPU: kernel models from kernels, then, with these fixed, the host from whole steps:

    graphed step   t = serial_step + serial_per_sequence S + kernels
    eager step     t = the same + prompt_step, at least serial + max(launches, kernels)

fitted to log(measured / predicted) with few non-negative parameters. CPU: operators timed in a loop are too fast (29 %
on average), so whole steps are fitted and kernels only shown.

Kernels become tables with the usual column names. Operators without a kernel model are small kernels: bytes and a
launch. Matrix products without a kernel model (standard attention, a baseline) are in neither."""

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from perfmodel.cost import StepCosts, step_costs
from perfmodel.cost.calibrations.calibration import Calibration, HostFit
from perfmodel.cost.calibrations.engine_profile import EngineProfile
from perfmodel.cost.calibrations.files import EXECUTOR
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.roofline import FamilyFit, roofline_time
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.kernels import Floats, KernelModule, predict, residuals_of
from perfmodel.evidence.fit.layer_profile import fit_small_kernels
from perfmodel.evidence.fit.systems import GENERIC_SMALL, MODULES, bare_key, key_of
from perfmodel.evidence.fit.whole_steps import features, fit_steps
from perfmodel.evidence.sources.kernels import Group, KernelTable
from perfmodel.evidence.sources.measured import KernelRecord, MeasuredStep, Measurements, Size
from perfmodel.files.base import Spec
from perfmodel.files.tables import load_table
from perfmodel.ops.work import Work
from perfmodel.specs import HardwareSpec, load_hardware
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import load_scenario

ENGINE = EXECUTOR
FitT = TypeVar("FitT", bound=Spec)

_PRIORS: Mapping[str, float] = load_table("fit_parameters")["executor_host"]  # where the search begins
_MOST = 100.0  # times the prior
_STARTS = (1.0, 3.0, 10.0)  # times the priors of launches: what is shorter than the kernels does not show, and stays
_PULL = 0.02  # of the logarithm of a parameter, beside relative errors of steps


def fit_host(
    hardware: HardwareSpec, calibration: Calibration, steps: Sequence[MeasuredStep]
) -> tuple[HostFit, Residuals]:
    """The host of `steps` given the kernels of `calibration`, and residuals of whole steps."""
    from scipy.optimize import least_squares

    measured = np.array([step.seconds for step in steps])
    unhosted = calibration.model_copy(update={"host": HostFit(replays_graphs=True)})
    costs = [costs_of(step, hardware, unhosted) for step in steps]
    device = np.array([item.estimate(step.batch).device_s for item, step in zip(costs, steps, strict=True)])
    sequences = np.array([step.batch.num_decodes + len(step.batch.prefills) for step in steps], dtype=float)
    has_prompts = np.array([bool(step.batch.prefills) for step in steps])
    layers, expert_layers, _ = np.array([item.graph.launched_layers for item in costs], dtype=float).T
    prior = np.array(list(_PRIORS.values()))

    def predicted(logs: Floats) -> Floats:
        step_s, per_sequence, prompt, of_layer, of_experts = prior * np.exp(logs)
        serial = step_s + per_sequence * sequences + has_prompts * prompt
        launches = has_prompts * (of_layer * layers + of_experts * expert_layers)
        total: Floats = serial + np.maximum(device, launches)
        return total

    def errors(logs: Floats) -> Floats:
        return np.concatenate([np.log(predicted(logs) / measured), _PULL * logs])

    most, is_launch = np.log(_MOST), np.array([name.startswith("hidden") for name in _PRIORS])
    fits = [
        least_squares(errors, start * is_launch, bounds=(-most, most), loss="soft_l1", f_scale=0.1)
        for start in np.log(_STARTS)
    ]
    best = min(fits, key=lambda fit: float(fit.cost)).x
    host = HostFit(replays_graphs=True, **dict(zip(_PRIORS, map(float, prior * np.exp(best)), strict=True)))
    return host, residuals_of(predicted(best), measured)


STEPS_SCENARIO = "executor/steps"  # workloads/scenarios: what all measured steps have in common


@lru_cache(maxsize=64)
def steps_scenario(model: str, overrides: tuple[str, ...], hardware: str) -> Scenario:
    """The scenario whose steps were measured."""
    return load_scenario(STEPS_SCENARIO, [f"model={model}", f"hardware={hardware}", *overrides])


def costs_of(step: MeasuredStep, hardware: HardwareSpec, calibration: Calibration) -> StepCosts:
    """The step's graph and timer under `calibration`, with its host times."""
    scenario = steps_scenario(step.model, step.overrides, hardware.name)
    return step_costs(scenario, calibration, EngineProfile(engine=calibration.engine))


# Operator -> the table that its sizes fit into, and the columns that are the same in all its rows.
TABLES: Mapping[str, tuple[str, dict[str, Size]]] = {
    "attention_decode": ("generation_attention", {"attn_dtype": "bfloat16", "window_size": 0, "beam_width": 1}),
    "attention_prefill": ("context_attention", {"attn_dtype": "bfloat16", "window_size": 0, "step": 0}),
    "grouped_experts": ("moe", {"moe_tp_size": 1, "moe_ep_size": 1, "distribution": "balanced"}),
    "linear": ("gemm", {"gemm_dtype": "bfloat16"}),
    "linear_fp8": ("gemm", {"gemm_dtype": "fp8"}),
    "linear_fp8_block": ("gemm", {"gemm_dtype": "fp8_block"}),
    "linear_w4a16": ("gemm", {"gemm_dtype": "int4_wo"}),
    "linear_w8a8": ("gemm", {"gemm_dtype": "int8"}),
    "linear_w8a16": ("gemm", {"gemm_dtype": "int8_wo"}),
}
_OF_ALL = {"engine_version": "perfmodel", "kernel_source": "triton"}
_SMALL_RATES = ("vector", "")
_MIN_BYTES = 1.0  # of a small kernel: what moves nothing says nothing about the bandwidth
_MIN_ROWS = 5  # of a kernel: bounds and priors determine the rest
_MIN_SMALL = 4
_IDLE = 1e-3  # of a default, within which a parameter did not move


def kernel_tables(records: Sequence[KernelRecord], system: str) -> list[tuple[KernelTable, list[int]]]:
    """(table, record indices) for each measured kind of kernel; missing columns are 0."""
    rows: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, record in enumerate(records):
        if record.operator in TABLES:
            table, defaults = TABLES[record.operator]
            row = {**_OF_ALL, **defaults, **record.sizes, "latency_ms": record.seconds * 1e3}
            rows.setdefault(table, []).append((number, row))
    result = []
    for table, members in rows.items():
        names = sorted({name for _, row in members for name in row})
        columns = {name: np.array([row.get(name, 0) for _, row in members]) for name in names}
        result.append((KernelTable(system, table, columns), [number for number, _ in members]))
    return result


def small_kernels(records: Sequence[KernelRecord]) -> list[tuple[Work, float, int]]:
    """(work, seconds, record index) of operators without a kernel model."""
    return [
        (
            Work(record.operator, "elementwise", record.flops, rate="vector", activation_bytes=record.bytes),
            record.seconds,
            number,
        )
        for number, record in enumerate(records)
        if record.operator not in TABLES and record.rate in _SMALL_RATES and record.bytes >= _MIN_BYTES
    ]


def predict_kernels(
    records: Sequence[KernelRecord], calibration: Calibration, hardware: HardwareSpec
) -> list[tuple[KernelRecord, float, Residuals]]:
    """(kernel, predicted seconds, residuals of its fit) of the kernels that `calibration` has a fit for."""
    device = DeviceFacts.of(hardware)
    result: list[tuple[KernelRecord, float, Residuals]] = []
    for _, group, numbers in _groups(records, hardware):
        key = key_of(group, calibration)
        fit = calibration.families[key] if key in (group.key, bare_key(group.key)) else None
        if fit is not None:
            rows = zip(group.rows.tolist(), predict(group, fit).tolist(), strict=True)
            result += ((records[numbers[row]], seconds, fit.residuals) for row, seconds in rows)
    small = calibration.families.get("elementwise")
    if isinstance(small, FamilyFit):
        for work, _, number in small_kernels(records):
            result.append((records[number], roofline_time(work, small, device).duration_s, small.residuals))
    return result


def _groups(records: Sequence[KernelRecord], hardware: HardwareSpec) -> Iterator[tuple[KernelModule, Group, list[int]]]:
    """(kind, group, record indices of its table) of every kernel with a model."""
    device = DeviceFacts.of(hardware)
    for table, numbers in kernel_tables(records, hardware.name):
        for group in MODULES[table.op].groups(table, device):
            yield MODULES[table.op], group, numbers


def fit_measured(measured: Measurements) -> Calibration:
    """The calibration for `engine.profile: perfmodel` on the measured device. Raises SpecError for a device without a
    hardware file, or too little data."""
    info, hardware = measured.info, load_hardware(measured.info.device)
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    fitted = _from_steps(hardware, measured.steps) if hardware.kind == "cpu" else _from_kernels(hardware, measured)
    return fitted.model_copy(
        update={
            "source": f"{len(measured.kernels)} kernels and {len(measured.steps)} steps of the executor, measured on "
            f"{info.device_name or info.device} ({versions})",
            "date": datetime.date.fromisoformat(info.date) if info.date else None,
            "command": f"perfmodel calibrate --from reports/measured/{measured.folder.name} --engine {ENGINE}",
        }
    )


def _from_steps(hardware: HardwareSpec, steps: Sequence[MeasuredStep]) -> Calibration:
    if len(steps) < _MIN_ROWS:
        raise SpecError(f"{len(steps)} steps were measured; fitting a CPU takes at least {_MIN_ROWS}.")
    nothing = Calibration(device=hardware.name, engine="none")
    rows = [features(costs_of(step, hardware, nothing).graph, hardware, step.batch) for step in steps]
    return fit_steps(hardware, rows, [(step.p10_s, step.seconds, step.p90_s) for step in steps], ENGINE).calibration


def _from_kernels(hardware: HardwareSpec, measured: Measurements) -> Calibration:
    families: dict[str, Any] = {
        group.key: _without_the_idle(module.fit([group]))
        for module, group, _ in _groups(measured.kernels, hardware)
        if len(group.seconds) >= _MIN_ROWS
    }
    timed = [(work, seconds) for work, seconds, _ in small_kernels(measured.kernels)]
    small = fit_small_kernels(hardware, timed) if len(timed) >= _MIN_SMALL else GENERIC_SMALL
    if not families:
        raise SpecError(
            f"{measured.folder}: has no kernel with {_MIN_ROWS} problems or more; run the measuring programme longer."
        )
    calibration = Calibration(
        device=hardware.name,
        engine=ENGINE,
        families=dict(sorted({**families, "elementwise": small}.items())),
        default=small,
        contained=("kv_write",),  # one kernel rotates queries and keys and writes the cache
    )
    if not measured.steps:
        return calibration
    host, residuals = fit_host(hardware, calibration, measured.steps)
    return calibration.model_copy(update={"host": host, "step_residuals": residuals})


def _without_the_idle(fit: FitT) -> FitT:
    """`fit` without parameters left at their defaults, which no row determines."""
    fields = type(fit).model_fields
    values = {name: getattr(fit, name) for name in fit.model_fields_set}
    moved = {
        name: value
        for name, value in values.items()
        if not (isinstance(value, float) and math.isclose(value, fields[name].default, rel_tol=_IDLE))
    }
    return type(fit)(**moved)

"""Fits an engine's host, front end and graphs, and a GPU generation, to recorded servers. Kernels stay fixed.

Open-loop stages determine host time per step and the front end. Fixed concurrency determines prompt steps, synchronous
hosts, graphs: at low concurrency TTFT is the front end plus one prompt step, TPOT a step's fixed costs, which tables
timed launch by launch overstate. Residuals are cross-validated: leave one cell out (model x engine version x device x
format); for devices without rows, one device.

For all engines: TTFT of long prompts is compute, so residuals on a generation's rows, given engine profiles fitted on
all devices, are its kernels'. Dense 4-bit products, which lack kernel tables, get their own bandwidth and launch. Skew
of expert popularity shows in how step time grows with batch; errors are relative to each cell, which cancels other
biases."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from perfmodel.cost import EngineProfile, Residuals, ServerFit
from perfmodel.cost.calibrations.for_all import RoutingFit
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.kernels import residuals_of, widen_for_new_group
from perfmodel.evidence.fit.parameters import (
    LinearErrors,
    Parameter,
    fit_parameters,
    known_parameters,
    masks,
    values_of,
    with_values,
)
from perfmodel.evidence.observation import Floats, Observation, Prediction, Progress, described, grouped
from perfmodel.evidence.predict import recorded
from perfmodel.evidence.predict.results import has_kernel_tables
from perfmodel.evidence.sources.local import DeviceTable
from perfmodel.evidence.sources.setups import Setup, scenario_of
from perfmodel.evidence.sources.steady import UNKNOWN_LENGTHS, with_dispersion
from perfmodel.models.architecture import LatentAttention, MoEFFN
from perfmodel.sim import simulate
from perfmodel.specs import Scenario
from perfmodel.specs.engine.versions import parse_version

# ---------------------------------------------------------------- open-loop stages

PARAMETERS = known_parameters("steps", "stages")
_OUT_S = 1e-3  # detokenisation and hand-over of a token: these runs do not separate it from `in_s`
_WEIGHTS_OF_STAGES = {"e2el_mean": 1.0, "itl_mean": 1.0, "ttft_mean": 0.5}
_RATE_FACTOR = 1.05
_SHARE = 0.1  # of each stage's duration: means settle long before


def fit_engine_profile(
    begin: EngineProfile, rows: Sequence[Observation], *, share: float = _SHARE, progress: Progress | None = None
) -> EngineProfile:
    """Fit an engine's profile to mean latencies of stages, starting from `begin`; undetermined parameters stay.
    Overloaded stages are left out: a backlog multiplies small errors of capacity."""
    members = recorded.shortened_stages([row for row in rows if row.scenario.engine.profile == begin.engine], share)

    def errors(profile: EngineProfile) -> Floats:
        return stage_log_errors(recorded.simulate_runs(members, profile=profile))

    profile = fit_parameters(starting_profile(begin), PARAMETERS, errors, progress=progress)
    return profile.model_copy(update={"latency_residuals": step_residuals(members, profile)})


def step_residuals(rows: Sequence[Observation], profile: EngineProfile) -> Residuals:
    """Residuals of steady stages, as factors on step time. In open loop, longer steps raise the batch, which lengthens
    steps further: latency errors exceed step errors by g = 1 + d log(latency) / d log(rate) (see `accelerated`)."""
    usual, faster = (
        [pair for pair in recorded.simulate_runs(item, profile=profile) if not pair.row.is_overloaded]
        for item in (rows, recorded.accelerated(rows, _RATE_FACTOR))
    )
    predicted, at_more_load = (np.array([pair.metrics["e2el_mean"] for pair in item]) for item in (usual, faster))
    measured = np.array([pair.row.metrics["e2el_mean"] for pair in usual])
    gain = np.maximum(1 + np.log(at_more_load / predicted) / np.log(_RATE_FACTOR), 1.0)
    return residuals_of(predicted, measured, gain * np.array([recorded.spread_of(pair.row.scenario) for pair in usual]))


def starting_profile(profile: EngineProfile) -> EngineProfile:
    """`profile` with the values that no run separates."""
    return with_values(profile, {"server.out_s": _OUT_S})


def stage_log_errors(pairs: Sequence[Prediction]) -> Floats:
    """Weighted log(predicted / measured) of means of steady stages."""
    steady = [pair for pair in pairs if not pair.row.is_overloaded]
    return np.array(
        [
            weight * np.log(pair.metrics[metric] / pair.row.metrics[metric])
            for pair in steady
            for metric, weight in _WEIGHTS_OF_STAGES.items()
        ]
    )


# ---------------------------------------------------------------- steady states

HIDDEN_PARAMETERS = known_parameters("hidden")  # where an engine plans synchronously
_OF_PROMPTS = known_parameters("prompts")
_OF_STEPS = known_parameters("steps", "front_end")  # known where an engine has serving runs
_WEIGHTS = {"tpot": 1.0, "ttft": 0.4}
_MAX_ROWS = 60
_MAX_CONCURRENCY = 32  # larger batches take long to simulate and depend on kernels


def fit_steady_profile(
    begin: EngineProfile, rows: Sequence[Observation], *, progress: Progress | None = None
) -> EngineProfile:
    """Fit an engine's profile to mean TTFT and TPOT of its rows, starting from `begin`. Parameters that reliable rows
    leave open are then fitted to TTFT of rows with suspected speculation."""

    def errors_on(members: Sequence[Observation]) -> Callable[[EngineProfile], Floats]:
        return lambda profile: steady_log_errors(recorded.simulate_steady_states(members, profile=profile))

    members = fitting_rows(rows, begin.engine)
    parameters = parameters_of(begin, members)
    best = fit_parameters(begin, parameters, errors_on(members), progress=progress)
    suspected = [row for row in rows if not row.is_reliable and UNKNOWN_LENGTHS not in row.flags]
    suspected = _of_engine(suspected, begin.engine)
    lacking = [item for item in _of_layers(suspected) if item not in parameters]
    if lacking:
        best = fit_parameters(best, lacking, errors_on(suspected))
    here = np.log(values_of(best, parameters))
    return with_steady_residuals(best, members, LinearErrors.around(begin, parameters, errors_on(members), here))


def with_steady_residuals(
    profile: EngineProfile, rows: Sequence[Observation], model: LinearErrors[EngineProfile]
) -> EngineProfile:
    """`profile` with residuals of left-out cells and devices. rows, model: fitted rows, and the linear error model"""
    cells, devices = ([name(row.scenario) for row in rows] for name in (config_key, lambda item: item.hardware.name))
    spread = np.array([recorded.spread_of(row.scenario) for row in rows])
    update: dict[str, object] = {"devices": tuple(sorted(set(devices)))}
    for groups, suffix in ((cells, ""), (devices, "_elsewhere")):
        if suffix and len(set(groups)) == 1:
            continue
        errors = model.held_out(np.repeat(groups, len(_WEIGHTS)))
        for place, (metric, weight) in enumerate(_WEIGHTS.items()):
            factors = np.exp(errors[place :: len(_WEIGHTS)] / weight)
            units = spread if metric == "tpot" else 1.0  # steps are kernels mostly: in units of how far fits come
            residuals = residuals_of(factors, np.ones(len(rows)), units)
            update[f"{metric}_residuals{suffix}"] = widen_for_new_group(residuals, len(set(cells)))
    return profile.model_copy(update=update)


def config_key(scenario: Scenario) -> str:
    """Key of model, engine version, device and number format."""
    engine, quantization = scenario.engine, scenario.model.quantization
    return " ".join((scenario.model.name, engine.described.label, scenario.hardware.name, str(quantization.weights)))


def parameters_of(begin: EngineProfile, rows: Sequence[Observation]) -> list[Parameter]:
    """The engine's parameters that `rows` determine."""
    parameters = [*_OF_PROMPTS, *_of_layers(rows)]
    if not all(row.scenario.engine.async_scheduling for row in rows):
        parameters += HIDDEN_PARAMETERS
    if not begin.latency_residuals.num_rows:
        parameters += _OF_STEPS
    return parameters


def _of_layers(rows: Sequence[Observation]) -> tuple[Parameter, ...]:
    """Parameters of layer kinds that only some models have, if `rows` have them."""
    mixers = (layer.mixer for row in rows for layer, _ in row.scenario.model.layers)
    return known_parameters("latents") if any(isinstance(mixer, LatentAttention) for mixer in mixers) else ()


def fitting_rows(rows: Sequence[Observation], engine: str) -> list[Observation]:
    """Reliable rows of `engine` that simulate quickly, equally many per cell."""
    return _of_engine([row for row in rows if row.is_reliable], engine)


def _of_engine(rows: Sequence[Observation], engine: str) -> list[Observation]:
    members = [row for row in rows if row.scenario.engine.profile == engine]
    return _of_each_cell(members, _MAX_ROWS, _MAX_CONCURRENCY)


def _of_each_cell(rows: Sequence[Observation], most: int, most_concurrency: int) -> list[Observation]:
    """About `most` rows up to a concurrency, balanced over cells."""
    members = [row for row in rows if (row.scenario.traffic.arrivals.concurrency or 0) <= most_concurrency]
    cells = grouped((config_key(row.scenario), row) for row in members)
    return [row for cell in cells.values() for row in cell[:: max(1, len(cell) * len(cells) // most)]]


def steady_log_errors(pairs: Sequence[Prediction]) -> Floats:
    """Weighted log(predicted / measured), TPOT and TTFT in turn; 0 where unpredicted, and for TPOT if speculated."""
    errors = []
    for pair in pairs:
        for metric, weight in _WEIGHTS.items():
            is_known = not pair.reason and (pair.row.is_reliable or metric == "ttft")
            name = f"{metric}_mean"
            errors.append(weight * np.log(pair.metrics[name] / pair.row.metrics[name]) if is_known else 0.0)
    return np.array(errors)


# ---------------------------------------------------------------- hosts of older versions

# Before these versions the engine was another program: vLLM's V0, whose Python planned, prepared inputs and handled
# tokens sequence by sequence.
_OTHER_PROGRAM = {"vllm": "0.8"}
_MAX_BATCHES = 72


def fit_older_host(begin: EngineProfile, rows: Sequence[Observation], folder: Path) -> tuple[EngineProfile, int]:
    """`begin` with the host of versions before its present program, and the number of batches that it was fitted to:
    the engine's own on devices with kernel tables. folder: of `devices.csv`. Raises SpecError without any."""
    version, table = _OTHER_PROGRAM.get(begin.engine, "0"), DeviceTable(folder)

    def is_older(setup: Setup) -> bool:
        return setup.engine == begin.engine and parse_version(setup.version) < parse_version(version)

    own = [row for row in rows if "batch_latency" in row.metrics and begin.engine in row.labels["framework"].lower()]
    older = [(row.name, row) for row in own if is_older(row.setup)]
    members, _ = described(older, lambda name, row: row.under(scenario_of(name, row.setup, table, row.setup.tp)[0]))
    members = [row for row in members if has_kernel_tables(row.scenario.hardware, begin.engine)]
    members = members[:: max(1, len(members) // _MAX_BATCHES)]
    if not members:
        raise SpecError(f"no static batches of {begin.engine} before {version} on devices with kernel tables to fit")

    def errors(profile: EngineProfile) -> Floats:
        spans = [simulate(row.scenario, profile=profile, keep_steps=False).summary["duration"] for row in members]
        return np.log(spans) - np.log([row.metrics["batch_latency"] / 1e3 for row in members])

    hidden = {"hidden_step_s": 0.0, "hidden_per_sequence_s": 0.0}
    alone = begin.model_copy(update={"server": ServerFit(), "host": begin.host.model_copy(update=hidden)})
    return begin.model_copy(
        update={"older": {version: fit_parameters(alone, known_parameters("older"), errors).host}}
    ), len(members)


# ---------------------------------------------------------------- generations and routers

_DISPERSION = Parameter("dispersion", 0.5, 0.01, 5.0)
_ROUNDS = 2
_MAX_SLOTS = 128  # of the fit of routers, which is about how steps grow
_MAX_ROWS_OF_ALL = 48


def _num_experts(row: Observation) -> int:
    """Experts of the largest block; 0 if dense."""
    blocks = [layer.ffn for layer, _ in row.scenario.model.layers]
    return max((block.num_experts for block in blocks if isinstance(block, MoEFFN)), default=0)


def fit_popularity(rows: Sequence[Observation], *, progress: Progress | None = None) -> RoutingFit:
    """Dispersion of expert popularity, from reliable rows of mixtures of experts. Each parallel degree is a cell of its
    own, since other parts bias its steps. Raises SpecError without such rows."""
    members = [row for row in rows if _num_experts(row) and row.is_reliable]
    members = _of_each_cell(members, _MAX_ROWS_OF_ALL, _MAX_SLOTS)
    if not members:
        raise SpecError("no rows of mixtures of experts to fit")
    engines = [row.scenario.engine for row in members]
    degrees = [f"{e.tensor_parallel_size} {e.data_parallel_size} {e.enable_expert_parallel}" for e in engines]
    cells = np.array([f"{config_key(row.scenario)} {degree}" for row, degree in zip(members, degrees, strict=True)])

    def errors(fit: RoutingFit) -> Floats:
        pairs = recorded.simulate_steady_states([with_dispersion(row, fit.among(_num_experts(row))) for row in members])
        of_steps = steady_log_errors(pairs)[::2]
        for cell in masks(cells):
            of_steps[cell] -= np.median(of_steps[cell])
        return of_steps

    best = fit_parameters(RoutingFit(), [_DISPERSION], errors, rounds=_ROUNDS, progress=progress)
    return best.model_copy(update={"dispersion": float(f"{best.dispersion:.3g}")})

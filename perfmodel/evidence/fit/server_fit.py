"""Fits an engine's host and front end, and one factor of all kernels, to load tests of the user's own server.

Priors: the scenario's own profile, or else the shipped one, as wide as shipped engines differ; for kernels, as wide as
predictions of published runs are off. Figures weigh by the shipped profile's errors on
published runs, and by the runs' agreement. Robust least squares of both, in logarithms. So undetermined parameters stay
as shipped, and a single run, whose own errors cannot be told from the server's, moves little. The held-out error is
that of each run (a file, or a rate of a sweep) under a fit to the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import EngineProfile, Residuals, ServerFit, load_engine_profile
from perfmodel.cost.calibrations.draws import Z_P90
from perfmodel.cost.calibrations.engine_profile import profile_of
from perfmodel.cost.steps.step_costs import scenario_fits
from perfmodel.dates import today
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.fit.kernels import Floats
from perfmodel.evidence.fit.parameters import Parameter, masks, values_of, with_facts, with_values
from perfmodel.evidence.fit.profiles import HIDDEN_PARAMETERS, PARAMETERS, parameters_of
from perfmodel.evidence.observation import Observation, Progress, RequestTimes
from perfmodel.evidence.predict.bench import GivenSetup, bench_scenario
from perfmodel.evidence.predict.recorded import spread_of
from perfmodel.evidence.sources.bench_run import figures_of
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import save_fitted
from perfmodel.sim import simulate
from perfmodel.specs.engine.reading import device_file, refuse_shipped_name
from perfmodel.specs.scenario import Scenario

METRICS = ("mean_tpot_ms", "mean_ttft_ms")
_RESIDUALS = dict(zip(METRICS, ("tpot_residuals", "ttft_residuals"), strict=True))
_MAX_REQUESTS = 300  # of a run that is simulated for the fit: its means have settled
PER_SLOT = 5  # requests of a closed loop, likewise
OVERLOADED = 0.5  # share of the latency before the first token from which on a backlog must have grown
_FIELDS = (
    *("host.serial_step_s", "host.serial_per_sequence_s", "host.hidden_step_s", "host.prompt_step_s"),
    *("server.in_s", "server.in_per_prompt_token_s", "server.out_per_sequence_s"),
    "kernel_factor",
)
_KERNELS = Parameter("kernel_factor", 1.0, 0.4, 2.5)
_MIN_SPREAD, _MAX_SPREAD = 0.5, 1.5  # of a number's logarithm among engines: three engines say little of either end
_UNKNOWN = {"mean_tpot_ms": 0.1, "mean_ttft_ms": 0.4}  # log errors of an engine without residuals
_ROUNDS = 2
_STEP = 0.3  # of a parameter, for its derivative: well above the noise of changed schedules
_MIN_OF = 0.2  # of a figure: floor where the linear model is no longer valid
_LOSS_SCALE = 2.0  # standard deviations from which on an error counts by its size, not its square
# Ranges are those of hosts of GPU servers, which steps are fitted to. Somebody's own may be a laptop, a shared virtual
# machine or the CPU that computes: 8 and 13 ms a step of a model of 27 million parameters on one core of a server.
_SLOW_HOST = 20.0
# Beside a quicker device a host shows in no derivative: where steps took so many times as long, begin as if it was the
# host that took them.
_MAX_HIDDEN = 1.3
ENOUGH_REQUESTS = 100  # reports/own_servers_202611.md: errors at other rates are a fifth smaller than with 30
FEWEST_FOR_INTERVALS = 2  # runs, each of which is then predicted from the others


@dataclass(frozen=True)
class UserServerFit:
    """A fitted server profile, and its errors.

    profile, shipped: fitted, and the engine's default
    runs:             names of the runs used; left_out: (run, reason) of others
    kernels:          file of the device's own fits, which go with the profile; None: the shipped ones
    certainty:        figure -> half of the 80 % interval of its mean at the scenario's own traffic, as a share, before
                      and after; empty without a scenario
    errors:           metric -> kind -> median |predicted / measured - 1|: "shipped", "fitted", and "held out" (each run
                      under a fit to the others; not with one run)
    fewest_requests:  smallest number of requests of a run used"""

    profile: EngineProfile
    shipped: EngineProfile
    runs: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    errors: Mapping[str, Mapping[str, float]]
    fewest_requests: int
    kernels: Path | None = None
    certainty: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def moved(self) -> dict[str, tuple[float, float]]:
        """Field -> (shipped, fitted), in seconds but for `kernel_factor`."""
        names = [name for name in _FIELDS if _number(self.shipped, name)]
        return {name: (_number(self.shipped, name), _number(self.profile, name)) for name in names}

    @property
    def notes(self) -> list[str]:
        """Caveats beside the figures, in sentences."""
        notes = [f"left out: {name}: {reason}" for name, reason in self.left_out]
        if len(self.runs) == 1:
            notes.append(
                "One run changes little: its own errors cannot be told from the server's, and nothing is left to check "
                "the fit with. Runs at three or more rates, or lengths, say more."
            )
        if self.fewest_requests < ENOUGH_REQUESTS:
            notes.append(
                f"A run has {self.fewest_requests:,} requests: the mean of so few hangs on which steps they happened "
                f"to meet. With {ENOUGH_REQUESTS:,} or more at each rate the server's numbers come out nearer."
            )
        for metric, errors in self.errors.items():
            if errors.get("held out", 0.0) >= errors["shipped"]:
                notes.append(
                    f"{metric}: of runs left out {errors['held out']:.1%} off, {errors['shipped']:.1%} as shipped: "
                    f"these runs do not say that your server differs in this; the engine's own profile does as well."
                )
        return notes

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.profile.name,
            "engine": self.profile.engine,
            "source": self.profile.source,
            "runs": list(self.runs),
            "left_out": [list(item) for item in self.left_out],
            "errors": {metric: dict(result) for metric, result in self.errors.items()},
            "certainty": {name: {"before": old, "after": new} for name, (old, new) in self.certainty.items()},
            "moved": {name: {"shipped": old, "fitted": new} for name, (old, new) in self.moved.items()},
            "notes": self.notes,
        }


def fit_server(
    name: str,
    runs: Sequence[Observation],
    given: GivenSetup,
    engine: str,
    progress: Progress | None = None,
    unread: Sequence[tuple[str, str]] = (),
) -> UserServerFit:
    """Fit the profile `name` to load tests of one's own server.

    runs, given: measurements, and the user's setup
    engine:      whose shipped profile it starts from; runs of other engines are left out
    progress:    called with (simulations done, of how many)
    unread:      (run, reason) of unreadable runs

    Raises SpecError for the name of a shipped engine, and without a usable run."""
    refuse_shipped_name(name)
    members: list[_Run] = []
    left_out: list[tuple[str, str]] = []
    with TemporaryDirectory() as folder:  # for traces of requests
        for run in runs:
            try:
                members.append(_prepare(run, given, engine, Path(folder)))
            except PerfmodelError as error:
                left_out.append((run.name, str(error)))
        if not members:
            raise SpecError(left_out[0][1])
        shipped = _begin(members[0].scenario)
        profile, logs, spreads = _fitted(shipped, members, progress)
    metrics = np.array([metric for run in members for metric in run.measured])
    errors = {
        metric: {what: float(np.median(np.abs(np.exp(values[metrics == metric]) - 1))) for what, values in logs.items()}
        for metric in METRICS
        if metric in metrics
    }
    profile = profile.model_copy(update=_description(name, members, errors, shipped))
    if len(members) >= FEWEST_FOR_INTERVALS:
        profile = profile.model_copy(update=_residuals(shipped, members, metrics, spreads))
    fewest = min(run.num_requests for run in members)
    names = tuple(run.name for run in members)
    return UserServerFit(
        profile, shipped, names, (*unread, *left_out), errors, fewest, _own_kernels(members[0].scenario)
    )


def save_server_fit(fit: UserServerFit, folder: Path, is_forced: bool = False) -> Path:
    """Write the profile to `folder`, where its name finds it, and beside it the fits of the device that it goes with.
    Raises SpecError if it exists, unless `is_forced`."""
    file = save_fitted(fit.profile, refuse_written(fit.profile.name, folder, is_forced))
    if fit.kernels is not None:
        copy = device_file(file, fit.kernels.name.partition("@")[0])
        if not copy.exists() or not copy.samefile(fit.kernels):
            copyfile(fit.kernels, copy)
    return file


def refuse_written(name: str, folder: Path, is_forced: bool = False) -> Path:
    """The file in `folder` that `name` finds. Raises SpecError if it exists, unless `is_forced`."""
    refuse_shipped_name(name)
    file = folder / f"engine@{name}.yaml"
    if file.exists() and not is_forced:
        raise SpecError(f"{file}: is there already; give another --name, or --force to write over it.")
    return file


class _Run(NamedTuple):
    """A run as simulated for the fit. measured: those of `METRICS` it has, over the same `num_requests`"""

    name: str
    tool: str
    scenario: Scenario
    measured: Mapping[str, float]
    num_requests: int


def _prepare(run: Observation, given: GivenSetup, engine: str, folder: Path) -> _Run:
    """Raises SpecError for a run that does not constrain the engine's parameters."""
    if run.setup.local is not None or run.load.process == "burst":
        what = "is a test of llama-bench" if run.setup.local is not None else "sent all its requests at once"
        raise SpecError(f"{run.name}: {what}: its times say nothing of host and front end; measure at rates below.")
    run = _shortened(run)
    measured = {metric: run.metrics[metric] for metric in METRICS if metric in run.metrics}
    if not measured:
        raise SpecError(f"{run.name}: has no mean TTFT and no mean TPOT, which tell host and front end.")
    ttft, e2el = (run.metrics.get(f"mean_{metric}_ms") for metric in ("ttft", "e2el"))
    if run.load.process == "open" and ttft is not None and e2el is not None and ttft > OVERLOADED * e2el:
        raise SpecError(
            f"{run.name}: waited for its first tokens longer than for all others: a backlog had grown, which "
            f"multiplies small errors; measure below capacity."
        )
    scenario, _ = bench_scenario(run, given, folder)
    of_engine = scenario.engine.described.description.name
    if of_engine != engine:
        raise SpecError(
            f"{run.name}: is of engine {of_engine}, and --engine is {engine}; set engine.profile, or --engine."
        )
    num_requests = run.load.num_requests if run.requests is None else len(run.requests)
    return _Run(run.name, run.source, scenario, measured, num_requests)


def _shortened(run: Observation) -> Observation:
    """`run` with fewer requests if it has many, and its figures over these."""
    load, times = run.load, run.requests
    most = max(_MAX_REQUESTS, PER_SLOT * (load.concurrency or 0))
    if load.num_requests <= most:
        return run
    run = replace(run, load=replace(load, num_requests=most))
    if times is None or len(times) <= most:
        return run
    starts = None if times.start_s is None else times.start_s[:most]
    tokens = times.num_prompt_tokens[:most], times.num_output_tokens[:most]
    first = RequestTimes(starts, *tokens, times.ttft_s[:most], times.e2el_s[:most])
    return replace(run, requests=first, metrics={**run.metrics, **figures_of(first)})


def _begin(scenario: Scenario) -> EngineProfile:
    """What the fit starts from: the engine's profile, or the user's own that the scenario names, whose whole steps hold
    the host's time and were taken without a front end."""
    engine = scenario.engine
    shipped = load_engine_profile(engine.profile)
    if engine.calibration is None:
        return with_facts(shipped)
    own = profile_of(engine)
    return own if own.server != ServerFit() else own.model_copy(update={"server": shipped.server})


def _own_kernels(scenario: Scenario) -> Path | None:
    if scenario.engine.calibration is None:
        return None
    file = device_file(scenario.engine.calibration, scenario.hardware.name)
    return file if file.is_file() else None


def _priors(shipped: EngineProfile, spread: float) -> list[tuple[Parameter, float]]:
    """The engine's parameters, and each prior's width: the standard deviation of its logarithm among engines; `spread`
    is the kernels'."""
    known = {item.field: item for item in (*PARAMETERS, *HIDDEN_PARAMETERS, *parameters_of(shipped, ()))}
    engines = [load_engine_profile(file.stem.partition("@")[2]) for file in data_dir("calibrations").glob("engine@*")]
    result = []
    for name in _FIELDS:
        if name == _KERNELS.field:
            result.append((_KERNELS._replace(start=shipped.kernel_factor), spread))
        if name not in known or not _number(shipped, name):
            continue
        values = [value for item in engines if (value := _number(item, name)) > 0]
        spread = float(np.std(np.log(values), ddof=1)) if len(values) > 1 else _MAX_SPREAD
        (start,) = values_of(shipped, [known[name]])
        widest = known[name].most * (_SLOW_HOST if name.startswith("host.") else 1.0)
        parameter = known[name]._replace(start=start, most=widest)
        result.append((parameter, min(max(spread, _MIN_SPREAD), _MAX_SPREAD)))
    return result


def _number(profile: EngineProfile, name: str) -> float:
    return float(attrgetter(name)(profile) or 0.0)


class _Figures(NamedTuple):
    """Figures (by metric, then run), linear in the parameters, not their logarithms: seconds add up."""

    priors: Sequence[tuple[Parameter, float]]
    measured: Floats
    here: Floats
    at_here: Floats
    slopes: Floats

    def errors(self, values: Floats) -> Floats:
        """log(predicted / measured)"""
        predicted = self.at_here + self.slopes @ (values - self.here)
        return np.log(np.maximum(predicted, _MIN_OF * self.at_here) / self.measured)

    def optimum(self, spreads: Floats, keep: NDArray[np.bool_] | slice = slice(None)) -> Floats:
        """Parameters that minimize the (kept) errors in units of `spreads` plus the priors."""
        from scipy.optimize import least_squares

        rows = [(item.start, item.least, item.most, spread) for item, spread in self.priors]
        start, least, most, spread = np.array(rows).T
        ends = np.log(least), np.log(most)

        def misses(logs: Floats) -> Floats:
            return np.append(self.errors(np.exp(logs))[keep] / spreads[keep], (logs - np.log(start)) / spread)

        begin = np.clip(np.log(self.here), ends[0] + 1e-6, ends[1] - 1e-6)
        result: Floats = least_squares(misses, begin, bounds=ends, loss="soft_l1", f_scale=_LOSS_SCALE).x
        return np.exp(result)

    def predictive(self, spreads: Floats, values: Floats) -> Floats:
        """Standard deviations of the logarithms in a further run: its own error, `spreads`, and what the parameters, at
        `values`, are still uncertain by (Gauss-Newton covariance of errors and priors)."""
        slopes = self.slopes * values / np.exp(self.errors(values))[:, None] / self.measured[:, None]
        weighted = slopes / spreads[:, None]
        precision = weighted.T @ weighted + np.diag([1 / spread**2 for _, spread in self.priors])
        result: Floats = np.sqrt(spreads**2 + np.sum(slopes @ np.linalg.inv(precision) * slopes, axis=1))
        return result


def _fitted(
    shipped: EngineProfile, runs: Sequence[_Run], progress: Progress | None
) -> tuple[EngineProfile, dict[str, Floats], Floats]:
    """The profile, log errors of each figure: "shipped", "fitted" and, with several runs, "held out"; and each figure's
    standard deviation in a further run."""
    priors = _priors(shipped, max(_spread_of("mean_tpot_ms", run.scenario, shipped) for run in runs))
    measured = np.array([value for run in runs for value in run.measured.values()])
    done, total = 0, (_ROUNDS * (len(priors) + 1) + 2) * len(runs)

    def profile_at(values: Floats) -> EngineProfile:
        return with_values(shipped, dict(zip((item.field for item, _ in priors), values.tolist(), strict=True)))

    def predicted(values: Floats) -> Floats:
        nonlocal done
        result, profile = [], profile_at(values)
        one_token = "its answers are of one token, which have no time per token; leave it out."
        for run in runs:
            summary = simulate(run.scenario, profile=profile, keep_steps=False).summary
            if any(not summary.get(metric) for metric in run.measured):
                raise SpecError(f"{run.name}: {one_token}")
            result += [float(summary[metric]) for metric in run.measured]
            done += 1
            if progress is not None:
                progress(done, total)
        return np.array(result)

    values = np.array([item.start for item, _ in priors])
    at_here = at_start = predicted(values)
    is_tpot = np.array([metric == "mean_tpot_ms" for run in runs for metric in run.measured])
    if is_tpot.any() and np.median(measured[is_tpot] / at_start[is_tpot]) > _MAX_HIDDEN:
        values[[item.field == "host.hidden_step_s" for item, _ in priors]] = np.median(measured[is_tpot]) / 1e3
        at_here = predicted(values)
    for _ in range(_ROUNDS):
        columns = [(predicted(values + step) - at_here) / step.max() for step in np.diag(_STEP * values)]
        figures = _Figures(priors, measured, values, at_here, np.stack(columns, axis=1))
        spreads = _spreads(figures, runs, shipped)
        values = figures.optimum(spreads)
        at_here = predicted(values)
    logs = {"shipped": np.log(at_start / measured), "fitted": np.log(at_here / measured)}
    if len(runs) > 1:
        logs["held out"] = np.empty(len(measured))
        for members in masks(np.array([run.name for run in runs for _ in run.measured])):
            logs["held out"][members] = figures.errors(figures.optimum(spreads, ~members))[members]
    return profile_at(values), logs, figures.predictive(spreads, values)


def _spreads(figures: _Figures, runs: Sequence[_Run], shipped: EngineProfile) -> Floats:
    """Standard deviation of each figure's error: as of a new run, and as these runs scatter around their optimum."""
    metrics = np.array([metric for run in runs for metric in run.measured])
    others = spreads = np.array([_spread_of(metric, run.scenario, shipped) for run in runs for metric in run.measured])
    for _ in range(4):  # settles to a per mille
        left = figures.errors(figures.optimum(spreads))
        squares = {metric: float(np.sum(left[metrics == metric] ** 2)) for metric in set(metrics)}
        count = {metric: int(np.sum(metrics == metric)) for metric in set(metrics)}
        spreads = np.sqrt(
            [(other**2 + squares[metric]) / (1 + count[metric]) for metric, other in zip(metrics, others, strict=True)]
        )
    return spreads


def _half(residuals: Residuals) -> float:
    """Half of their 80 % interval; infinite without any."""
    return (residuals.p90 - residuals.p10) / 2 if residuals.num_rows else inf


def _spread_of(metric: str, scenario: Scenario, shipped: EngineProfile) -> float:
    """Standard deviation of the profile's log residuals on published runs, or of whole steps of the device."""
    known = getattr(shipped, _RESIDUALS[metric])
    if not known.num_rows and metric == METRICS[0]:
        known = scenario_fits(scenario)[0].step_residuals
    if not known.num_rows:
        return _UNKNOWN[metric]
    return _half(known) / Z_P90 * (spread_of(scenario) if metric == METRICS[0] else 1.0)


def _description(
    name: str, runs: Sequence[_Run], errors: Mapping[str, Mapping[str, float]], shipped: EngineProfile
) -> dict[str, Any]:
    tools = ", ".join(dict.fromkeys(run.tool for run in runs))
    devices = ", ".join(dict.fromkeys(run.scenario.hardware.name for run in runs))
    held_out = [
        f"{metric.removeprefix('mean_').removesuffix('_ms').upper()} {result['held out']:.1%}"
        for metric, result in errors.items()
        if "held out" in result
    ]
    checked = f"each left out in turn: {', '.join(held_out)} off in the median" if held_out else "one run: not checked"
    source = (
        f"{len(runs)} run{'s' * (len(runs) > 1)} of {tools} on {devices} ({checked}); what they say nothing of as "
        f"engine@{shipped.name or shipped.engine} of {shipped.date or 'no date'}: {shipped.source or 'not fitted'}"
    )
    command = f"perfmodel calibrate --from <load tests> --engine {shipped.engine} --name {name}"
    return {"name": name, "source": source, "date": today(), "command": command}


def _residuals(
    shipped: EngineProfile, runs: Sequence[_Run], metrics: NDArray[np.str_], spreads: Floats
) -> dict[str, Any]:
    """Residuals of a further run of this server from each figure's metric and standard deviation. Under open-loop load
    a slower step lengthens latencies by more than itself, so there they are rather too wide."""
    devices = dict.fromkeys((*shipped.devices, *(run.scenario.hardware.name for run in runs)))
    update: dict[str, Any] = {"devices": tuple(devices)}
    for metric, name in _RESIDUALS.items():
        own = spreads[metrics == metric]
        if len(own) >= FEWEST_FOR_INTERVALS:
            unit = max(spread_of(run.scenario) for run in runs) if metric == METRICS[0] else 1.0
            end = Z_P90 * float(np.sqrt(np.mean(own**2))) / unit
            update[name] = Residuals(num_rows=len(own), p10=-end, p90=end)
    if (own_steps := update.get("tpot_residuals")) is not None and own_steps.p90 < _half(shipped.latency_residuals):
        update["latency_residuals"] = own_steps
    return update

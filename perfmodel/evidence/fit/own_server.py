"""The few numbers of an engine's host and front end, fitted to load tests of somebody's own server.

Kernels are not touched. Each number begins where the engine's shipped profile has it, as likely to be elsewhere as
the shipped engines differ in it; each figure is believed as far as predictions of the shipped profile are off for
others, and further the better the runs agree with one another: least squares of both, in logarithms, less strict with
what is far off. So what the runs say nothing of stays as shipped, and one run, which cannot tell its own errors from
the server's, moves little.

The held-out error is that of each run under what all others say, runs being files or rates of a sweep.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import EngineProfile, Residuals, load_engine_profile, save_engine_profile
from perfmodel.dates import today
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.fit.forms import of_one_more, residuals_of, with_facts, with_values
from perfmodel.evidence.fit.profiles import HIDDEN_PARAMETERS, PARAMETERS, parameters_of
from perfmodel.evidence.observation import Observation, RequestTimes
from perfmodel.evidence.predict.bench import GivenSetup, bench_scenario
from perfmodel.evidence.predict.recorded import spread_of
from perfmodel.evidence.sources.bench_run import figures_of
from perfmodel.files.catalog import data_dir
from perfmodel.sim import simulate
from perfmodel.specs.engine.reading import refuse_shipped_name
from perfmodel.specs.scenario import Scenario

Floats = NDArray[np.float64]

_LEAST_OF = 0.2  # of a figure, where a linear function of the numbers has run out of sense
_LOSS_SCALE = 2.0  # standard deviations from which on an error counts by its size, not its square


@dataclass(frozen=True)
class Prior:
    """A number of the profile: where it begins, how far it may well be from there (the standard deviation of its
    logarithm), and its plausible range; seconds."""

    field: str  # "host.serial_step_s"
    start: float
    least: float
    most: float
    spread: float


@dataclass(frozen=True)
class Figures:
    """Figures (metric by metric, run by run) as a linear function of the numbers around `here`: what is spent in
    another place adds up in seconds, which a function of logarithms would overshoot."""

    priors: Sequence[Prior]
    measured: Floats
    here: Floats
    at_here: Floats
    slopes: Floats

    def errors(self, values: Floats) -> Floats:
        """log(predicted / measured)"""
        predicted = self.at_here + self.slopes @ (values - self.here)
        return np.log(np.maximum(predicted, _LEAST_OF * self.at_here) / self.measured)

    def optimum(self, spreads: Floats, keep: NDArray[np.bool_] | None = None) -> Floats:
        """The numbers at which the (kept) errors, in units of their `spreads`, and how far each number has moved, in
        units of its own, are least together."""
        from scipy.optimize import least_squares

        chosen = np.ones(len(spreads), dtype=bool) if keep is None else keep
        start, spread = (np.array([getattr(item, name) for item in self.priors]) for name in ("start", "spread"))
        ends = [np.log([getattr(item, name) for item in self.priors]) for name in ("least", "most")]

        def misses(logs: Floats) -> Floats:
            return np.append(self.errors(np.exp(logs))[chosen] / spreads[chosen], (logs - np.log(start)) / spread)

        begin = np.clip(np.log(self.here), ends[0] + 1e-6, ends[1] - 1e-6)
        result: Floats = least_squares(misses, begin, bounds=ends, loss="soft_l1", f_scale=_LOSS_SCALE).x
        return np.exp(result)


METRICS = ("mean_tpot_ms", "mean_ttft_ms")
_MOST_REQUESTS = 300  # of a run that is simulated for the fit: its means have settled
_PER_SLOT = 5  # requests of a closed loop, likewise
_OVERLOADED = 0.5  # share of the latency before the first token from which on a backlog must have grown


@dataclass(frozen=True)
class FittedRun:
    """A run as it is simulated for the fit; measured: figures of the same `num_requests`, those of `METRICS` that it
    has."""

    name: str
    tool: str
    scenario: Scenario
    measured: Mapping[str, float]
    num_requests: int


def prepared_runs(
    runs: Sequence[Observation], given: GivenSetup, engine: str, folder: Path
) -> tuple[list[FittedRun], list[tuple[str, str]]]:
    """(runs that say something of the engine's numbers, (run, reason) of the others).

    runs, given: what was measured, and what the user says of the setup
    engine:      that the runs should be of; folder: for traces of their requests
    """
    members: list[FittedRun] = []
    left_out: list[tuple[str, str]] = []
    for run in runs:
        try:
            members.append(_prepare(run, given, engine, folder))
        except PerfmodelError as error:
            left_out.append((run.name, str(error)))
    return members, left_out


def _prepare(run: Observation, given: GivenSetup, engine: str, folder: Path) -> FittedRun:
    if run.setup.local is not None or run.load.process == "burst":
        what = "is a test of llama-bench" if run.setup.local is not None else "sent all its requests at once"
        raise SpecError(f"{run.name}: {what}: its times say nothing of host and front end; measure at rates below.")
    run = _shortened(run)
    measured = {metric: run.metrics[metric] for metric in METRICS if metric in run.metrics}
    if not measured:
        raise SpecError(f"{run.name}: has no mean TTFT and no mean TPOT, which tell host and front end.")
    if _is_overloaded(run):
        raise SpecError(
            f"{run.name}: waited for its first tokens longer than for all others: a backlog had grown, which "
            f"multiplies small errors; measure below capacity."
        )
    scenario, _ = bench_scenario(run, given, folder)
    result = scenario.engine.described.description.name
    if result != engine:
        raise SpecError(
            f"{run.name}: is of engine {result}, and --engine is {engine}; set engine.profile, or --engine."
        )
    num_requests = run.load.num_requests if run.requests is None else len(run.requests)
    return FittedRun(run.name, run.source, scenario, measured, num_requests)


def _shortened(run: Observation) -> Observation:
    """`run` with fewer requests, where it has many; of the same requests its figures."""
    load, times = run.load, run.requests
    most = max(_MOST_REQUESTS, _PER_SLOT * (load.concurrency or 0))
    if load.num_requests <= most:
        return run
    run = replace(run, load=replace(load, num_requests=most))
    if times is None or len(times) <= most:
        return run
    starts = None if times.start_s is None else times.start_s[:most]
    tokens = times.num_prompt_tokens[:most], times.num_output_tokens[:most]
    first = RequestTimes(starts, *tokens, times.ttft_s[:most], times.e2el_s[:most])
    return replace(run, requests=first, metrics={**run.metrics, **figures_of(first)})


def _is_overloaded(run: Observation) -> bool:
    ttft, e2el = (run.metrics.get(f"mean_{metric}_ms") for metric in ("ttft", "e2el"))
    return run.load.process == "open" and ttft is not None and e2el is not None and ttft > _OVERLOADED * e2el


Progress = Callable[[int, int | None], None]

_FIELDS = (
    *("host.serial_step_s", "host.serial_per_sequence_s", "host.hidden_step_s", "host.prompt_step_s"),
    *("server.in_s", "server.in_per_prompt_token_s", "server.out_per_sequence_s"),
)
_LEAST_SPREAD, _MOST_SPREAD = 0.5, 1.5  # of a number's logarithm among engines: three engines say little of either end
_UNKNOWN = {"mean_tpot_ms": 0.1, "mean_ttft_ms": 0.4}  # log errors of an engine without residuals
_Q80 = 2 * 1.2816  # standard deviations between the 10th and the 90th percentile
_ROUNDS = 2
_STEP = 0.3  # of a number, to see what it does: well above the noise of changed schedules
# Ranges are those of hosts of GPU servers, which steps are fitted to. Somebody's own may be a laptop, a shared virtual
# machine or the CPU that computes: 8 and 13 ms a step of a model of 27 million parameters on one core of a server.
_SLOW_HOST = 20.0
_ENOUGH_REQUESTS = 100  # reports/own_servers_202611.md: errors at other rates are a fifth smaller than with 30
_FEWEST_FOR_INTERVALS = 5  # runs from which on what is left of them says more than what ships


@dataclass(frozen=True)
class OwnServerFit:
    """A server's profile, and how far it may be believed.

    profile, shipped: as fitted, and the engine's
    runs:             names of the runs that it was fitted to; left_out: (run, reason) of others
    errors:           metric -> what is said of it -> median |predicted / measured - 1| of the runs: "shipped" of the
                      shipped profile, "fitted", "held out" of each run under what the others say (not with one run)
    fewest_requests:  of a run that it was fitted to
    """

    profile: EngineProfile
    shipped: EngineProfile
    runs: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    errors: Mapping[str, Mapping[str, float]]
    fewest_requests: int

    @property
    def moved(self) -> dict[str, tuple[float, float]]:
        """Field -> (shipped, fitted) seconds."""
        names = [name for name in _FIELDS if _number(self.shipped, name)]
        return {name: (_number(self.shipped, name), _number(self.profile, name)) for name in names}

    @property
    def notes(self) -> list[str]:
        """Sentences that a reader needs beside the figures."""
        notes = [f"left out: {name}: {reason}" for name, reason in self.left_out]
        if len(self.runs) == 1:
            notes.append(
                "One run changes little: its own errors cannot be told from the server's, and nothing is left to check "
                "the fit with. Runs at three or more rates, or lengths, say more."
            )
        if self.fewest_requests < _ENOUGH_REQUESTS:
            notes.append(
                f"A run has {self.fewest_requests:,} requests: the mean of so few hangs on which steps they happened "
                f"to meet. With {_ENOUGH_REQUESTS:,} or more at each rate the server's numbers come out nearer."
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
            "moved": {name: {"shipped": old, "fitted": new} for name, (old, new) in self.moved.items()},
            "notes": self.notes,
        }


@dataclass(frozen=True)
class _Fit:
    """Where a fit has ended: the figures around its last point but one, what each error is believed to vary by, the
    optimum, and the errors at its beginning and its end."""

    figures: Figures
    spreads: Floats
    values: Floats
    at_start: Floats
    at_end: Floats

    def held_out(self, runs: NDArray[np.str_]) -> Floats:
        """The errors of each run at the optimum of the others; runs: the run of each error."""
        result = np.empty(len(self.at_end))
        for run in np.unique(runs):
            members = runs == run
            result[members] = self.figures.errors(self.figures.optimum(self.spreads, ~members))[members]
        return result


def fit_own_server(
    name: str,
    runs: Sequence[Observation],
    given: GivenSetup,
    engine: str,
    progress: Progress | None = None,
    unread: Sequence[tuple[str, str]] = (),
) -> OwnServerFit:
    """Fit the profile called `name` to load tests of one's own server.

    runs, given: what was measured, and what the user says of the setup
    engine:      whose shipped profile it begins from; runs of another are left out
    progress:    called with (simulations done, of how many)
    unread:      (run, reason) of those that could not even be read

    Raises SpecError for the name of a shipped engine, and where no run can be fitted to.
    """
    refuse_shipped_name(name)
    shipped = with_facts(load_engine_profile(engine))
    with TemporaryDirectory() as folder:
        members, left_out = prepared_runs(runs, given, engine, Path(folder))
        if not members:
            raise SpecError(left_out[0][1])
        fit = _fitted(shipped, members, progress)
    metrics = np.array([metric for run in members for metric in run.measured])
    stated_as = {"shipped": fit.at_start, "fitted": fit.at_end}
    if len(members) > 1:
        stated_as["held out"] = fit.held_out(np.array([run.name for run in members for _ in run.measured]))
    errors = {
        metric: {name: _median_error(result[metrics == metric]) for name, result in stated_as.items()}
        for metric in METRICS
        if metric in metrics
    }
    left_out = [*unread, *left_out]
    profile = _described(_at(shipped, fit.figures.priors, fit.values), name, members, errors, shipped)
    if len(members) >= _FEWEST_FOR_INTERVALS:
        profile = _with_residuals(profile, members, metrics, stated_as["held out"])
    fewest = min(run.num_requests for run in members)
    return OwnServerFit(profile, shipped, tuple(run.name for run in members), tuple(left_out), errors, fewest)


def save_own_server(fit: OwnServerFit, folder: Path, is_forced: bool = False) -> Path:
    """Write the profile into `folder`, where its name finds it. Raises SpecError for one that is there already.

    is_forced: write over it
    """
    return save_engine_profile(fit.profile, refuse_written(fit.profile.name, folder, is_forced))


def refuse_written(name: str, folder: Path, is_forced: bool = False) -> Path:
    """The file in `folder` that `name` finds. Raises SpecError where it is there already, unless `is_forced`."""
    refuse_shipped_name(name)
    file = folder / f"engine@{name}.yaml"
    if file.exists() and not is_forced:
        raise SpecError(f"{file}: is there already; give another --name, or --force to write over it.")
    return file


def _priors(shipped: EngineProfile) -> list[Prior]:
    """The numbers that the engine has, from where it has them; how far engines differ in each is how far it may go."""
    known = {item.field: item for item in (*PARAMETERS, *HIDDEN_PARAMETERS, *parameters_of(shipped, ()))}
    engines = [load_engine_profile(file.stem.partition("@")[2]) for file in data_dir("calibrations").glob("engine@*")]
    result = []
    for name in _FIELDS:
        if not _number(shipped, name):
            continue
        values = [value for item in engines if (value := _number(item, name)) > 0]
        spread = float(np.std(np.log(values), ddof=1)) if len(values) > 1 else _MOST_SPREAD
        range_ = known[name]
        start = min(max(_number(shipped, name), range_.least), range_.most)
        most = range_.most * (_SLOW_HOST if name.startswith("host.") else 1.0)
        result.append(Prior(name, start, range_.least, most, min(max(spread, _LEAST_SPREAD), _MOST_SPREAD)))
    return result


def _number(profile: EngineProfile, name: str) -> float:
    value: Any = profile
    for part in name.split("."):
        value = getattr(value, part)
    return float(value or 0.0)


def _at(shipped: EngineProfile, priors: Sequence[Prior], values: Floats) -> EngineProfile:
    """`shipped` with the numbers at `values`."""
    return with_values(shipped, dict(zip((item.field for item in priors), values.tolist(), strict=True)))


def _fitted(shipped: EngineProfile, runs: Sequence[FittedRun], progress: Progress | None) -> _Fit:
    priors = _priors(shipped)
    measured = np.array([value for run in runs for value in run.measured.values()])
    done, total = 0, (_ROUNDS * (len(priors) + 1) + 1) * len(runs)

    def predicted(values: Floats) -> Floats:
        nonlocal done
        result, profile = [], _at(shipped, priors, values)
        for run in runs:
            result += _predicted(run, profile)
            done += 1
            if progress is not None:
                progress(done, total)
        return np.array(result)

    values = np.array([item.start for item in priors])
    at_here = at_start = predicted(values)
    for _ in range(_ROUNDS):
        steps = _STEP * values
        columns = [(predicted(values + step) - at_here) / step.max() for step in np.diag(steps)]
        figures = Figures(priors, measured, values, at_here, np.stack(columns, axis=1))
        spreads = _spreads(figures, runs, shipped)
        values = figures.optimum(spreads)
        at_here = predicted(values)
    return _Fit(figures, spreads, values, np.log(at_start / measured), np.log(at_here / measured))


def _predicted(run: FittedRun, profile: EngineProfile) -> list[float]:
    """The run's figures. Raises SpecError for one that the simulation does not have."""
    summary = simulate(run.scenario, profile=profile, keep_steps=False).summary
    if any(not summary.get(metric) for metric in run.measured):
        raise SpecError(f"{run.name}: its answers are of one token, which have no time per token; leave it out.")
    return [float(summary[metric]) for metric in run.measured]


def _spreads(figures: Figures, runs: Sequence[FittedRun], shipped: EngineProfile) -> Floats:
    """What the error of each figure is believed to vary by: as for others, as if that were one more run, and as these
    runs do around their own optimum."""
    metrics = np.array([metric for run in runs for metric in run.measured])
    others = np.array([_spread_of(metric, run.scenario, shipped) for run in runs for metric in run.measured])
    spreads = others
    for _ in range(4):  # settles to a per mille
        left = figures.errors(figures.optimum(spreads))
        squares = {metric: float(np.sum(left[metrics == metric] ** 2)) for metric in set(metrics)}
        count = {metric: int(np.sum(metrics == metric)) for metric in set(metrics)}
        spreads = np.sqrt(
            [(other**2 + squares[metric]) / (1 + count[metric]) for metric, other in zip(metrics, others, strict=True)]
        )
    return spreads


def _spread_of(metric: str, scenario: Scenario, shipped: EngineProfile) -> float:
    """Standard deviation of what the shipped profile leaves unexplained of others' runs, in logarithms."""
    residuals = shipped.tpot_residuals if metric == "mean_tpot_ms" else shipped.ttft_residuals
    if not residuals.num_rows:
        return _UNKNOWN[metric]
    units = spread_of(scenario) if metric == "mean_tpot_ms" else 1.0
    return (residuals.p90 - residuals.p10) / _Q80 * units


def _median_error(logs: Floats) -> float:
    return float(np.median(np.abs(np.exp(logs) - 1)))


def _described(
    fitted: EngineProfile,
    name: str,
    runs: Sequence[FittedRun],
    errors: Mapping[str, Mapping[str, float]],
    shipped: EngineProfile,
) -> EngineProfile:
    """`fitted` with its name and where it comes from.

    fitted, name: what it is; runs, errors: what it was fitted to, and how well
    shipped:      what it began from
    """
    tools = ", ".join(dict.fromkeys(run.tool for run in runs))
    devices = ", ".join(dict.fromkeys(run.scenario.hardware.name for run in runs))
    plural = "s" * (len(runs) > 1)
    held_out = [
        f"{metric.removeprefix('mean_').removesuffix('_ms').upper()} {result['held out']:.1%}"
        for metric, result in errors.items()
        if "held out" in result
    ]
    checked = f"each left out in turn: {', '.join(held_out)} off in the median" if held_out else "one run: not checked"
    source = (
        f"{len(runs)} run{plural} of {tools} on {devices} ({checked}); what they say nothing of as engine@"
        f"{shipped.engine} of {shipped.date or 'no date'}: {shipped.source or 'not fitted'}"
    )
    command = f"perfmodel calibrate --from <load tests> --engine {shipped.engine} --name {name}"
    return fitted.model_copy(update={"name": name, "source": source, "date": today(), "command": command})


def _with_residuals(
    profile: EngineProfile, runs: Sequence[FittedRun], metrics: NDArray[np.str_], held_out: Floats
) -> EngineProfile:
    """`profile` with what is left of runs at a fixed concurrency under the fits of the others, as of one more run.

    runs, metrics, held_out: the runs; of each error its metric, and the error of its run left out
    """
    units = np.array([spread_of(run.scenario) for run in runs for _ in run.measured])
    update: dict[str, Any] = {}
    for metric, name in (("mean_tpot_ms", "tpot_residuals"), ("mean_ttft_ms", "ttft_residuals")):
        members = metrics == metric
        if members.sum() >= _FEWEST_FOR_INTERVALS:
            spread: Floats | float = units[members] if metric == "mean_tpot_ms" else 1.0
            residuals: Residuals = residuals_of(np.exp(held_out[members]), np.ones(int(members.sum())), spread)
            update[name] = of_one_more(residuals, len(runs))
    devices = dict.fromkeys((*profile.devices, *(run.scenario.hardware.name for run in runs)))
    return profile.model_copy(update={**update, "devices": tuple(devices)})

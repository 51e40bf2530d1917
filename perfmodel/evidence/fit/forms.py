"""Robust fits: of physical forms to kernels, and of an engine's profile, or another small spec, to whole runs.

A form: least squares on log(predicted / measured), bounded, from several starts. Its parameters are the bounded
positive float fields of its `...Fit`; their `ge` and `le` are the plausible range, and the fit works on their
logarithms. A soft L1 loss keeps rows that no physics explains from bending the rest. Each parameter has a prior about
the form's own value, with the weight of a single row: a parameter that no row has anything to say on stays there,
instead of anywhere or at an end of its range, and one that rows determine does not notice.

A profile: few positive, bounded numbers, so that simulated means meet measured ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import EngineProfile
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.fits import Residuals, take
from perfmodel.evidence.sources.kernels import Group
from perfmodel.files.base import Spec
from perfmodel.specs.engine.description import describe_engine

Floats = NDArray[np.float64]
FitT = TypeVar("FitT", bound=Spec)

_LOSS_SCALE = 0.1  # log residuals well below this count squared, well above it by their size
_MOST_ROWS = 4000
_PRIOR = 3.0  # standard deviation of a parameter's logarithm: a factor of twenty


def fit_form(
    predict: Callable[[FitT, NDArray[np.int64]], Floats],
    start: FitT,
    seconds: Floats,
    *,
    free: Sequence[str],
    starts: Sequence[Mapping[str, float]] = ({},),
    most_rows: int = _MOST_ROWS,
) -> FitT:
    """Fit the fields `free` of `start` so that `predict(fit, rows)` gives `seconds[rows]`.

    predict: seconds of the given rows (numbers into `seconds`) under a fit
    start:   its values are the middles of the priors
    starts:  changes of `start` to begin from; the best end wins
    most_rows: above so many rows a sample is fitted, always the same
    """
    from scipy.optimize import least_squares

    rows = _sample(len(seconds), most_rows)
    target = np.log(seconds[rows])
    low, high = (np.log(np.array(ends)) for ends in zip(*(_range(start, name) for name in free), strict=True))

    def build(logs: Floats) -> FitT:
        values = np.clip(np.exp(logs), np.exp(low), np.exp(high))
        return start.model_copy(update=dict(zip(free, map(float, values), strict=True)))

    middle = np.clip(np.log([getattr(start, name) for name in free]), low, high)

    def error(logs: Floats) -> Floats:
        of_rows = np.log(np.maximum(predict(build(logs), rows), 1e-12)) - target
        return np.append(of_rows, _LOSS_SCALE * (logs - middle) / _PRIOR)

    best: Any = None
    for changes in starts:
        begin = np.log([changes.get(name, getattr(start, name)) for name in free])
        begin = np.clip(begin, low + 1e-3, high - 1e-3)
        result = least_squares(
            error,
            begin,
            bounds=(low, high),
            loss="soft_l1",
            f_scale=_LOSS_SCALE,
            diff_step=1e-2,
            max_nfev=40,
            x_scale=0.3,
        )
        if best is None or result.cost < best.cost:
            best = result
    return build(best.x)


def predictor(
    group: Group, seconds: Callable[[Any, FitT, DeviceFacts], Any], device: DeviceFacts
) -> Callable[[FitT, NDArray[np.int64]], Floats]:
    """Seconds of some of the group's rows under a fit, as `fit_form` takes it."""
    return lambda fit, rows: np.asarray(seconds(take(group.sizes, rows), fit, device))


def fit_group(
    group: Group,
    seconds: Callable[[Any, FitT, DeviceFacts], Any],
    start: FitT,
    device: DeviceFacts,
    *,
    free: Sequence[str],
    starts: Sequence[Mapping[str, float]] = ({},),
    most_rows: int = _MOST_ROWS,
) -> FitT:
    """The parameters of a kernel, with residuals.

    group, seconds: its rows, and what its form says of sizes; device: that they were measured on
    start, free, starts, most_rows: as of `fit_form`
    """
    predict = predictor(group, seconds, device)
    result = fit_form(predict, start, group.seconds, free=free, starts=starts, most_rows=most_rows)
    left = residuals_of(np.asarray(seconds(group.sizes, result, device)), group.seconds)
    return result.model_copy(update={"residuals": left})


def residuals_of(predicted: Floats, seconds: Floats, spread: Floats | float = 1.0) -> Residuals:
    """Quantiles of log(measured / predicted), in units of `spread`: how much more is to be expected of a row."""
    logs = np.log(seconds / predicted) / spread
    p10, p50, p90 = np.quantile(logs, [0.1, 0.5, 0.9])
    return Residuals(num_rows=len(logs), p10=round(p10, 5), p50=round(p50, 5), p90=round(p90, 5))


def of_one_more(residuals: Residuals, num_groups: int) -> Residuals:
    """`residuals` as they are to be expected of one more group than the `num_groups` that they are of.

    Rows of a group err alike, so few groups say little however many rows they have: a deviation from the middle is
    widened as that of one more draw from a normal distribution of unknown variance (Student's t; Hahn and Meeker,
    Statistical Intervals, 1991, section 4.7).
    """
    from scipy.stats import norm, t

    degrees = max(1, num_groups - 1)
    factor = float(t.ppf(0.9, degrees) / norm.ppf(0.9)) * (1 + 1 / num_groups) ** 0.5
    wide = residuals.widened(factor)
    return wide.model_copy(update={"p10": round(wide.p10, 5), "p90": round(wide.p90, 5)})


def _sample(count: int, most: int) -> NDArray[np.int64]:
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def _range(spec: Spec, name: str) -> tuple[float, float]:
    """The plausible range of a parameter: the `ge` and `le` of its field."""
    ends = {}
    for constraint in type(spec).model_fields[name].metadata:
        for end in ("ge", "le"):
            if hasattr(constraint, end):
                ends[end] = float(getattr(constraint, end))
    if set(ends) != {"ge", "le"} or ends["ge"] <= 0:
        raise TypeError(f"{type(spec).__name__}.{name} has no positive plausible range (ge, le)")
    return ends["ge"], ends["le"]


Fitted = TypeVar("Fitted", bound=Spec)
_LOSS_SCALE_OF_RUNS = 0.05  # log errors well below this count squared, well above it by their size
_PRIOR_OF_RUNS = 0.05  # error that counts as much as a factor e between a parameter and where it began
_STEP = 0.25  # of a logarithm, to see what a parameter does: well above the noise of changed schedules
_REACH = 1.6  # of a round, in logarithms: a factor of five
_MOST_ROUNDS = 5
_WORTH_IT = 0.01  # of the loss: a round that gains less is the last one


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field of the profile, or of its `host` or `server`, with where to begin and its plausible range."""

    field: str  # "host.serial_step_s"
    start: float
    least: float
    most: float


# A step's host work that shows: launch gaps, copies, the sampler's synchronisation; and a sequence's: its row of inputs
# and outputs. Whole runs of any kind determine them.
STEP_PARAMETERS = (
    Parameter("host.serial_step_s", 3e-4, 2e-5, 3e-3),
    Parameter("host.serial_per_sequence_s", 6e-6, 2e-7, 6e-5),
)


def with_facts(profile: EngineProfile) -> EngineProfile:
    """`profile` with what the engine's code says, which is not fitted."""
    graphs = describe_engine(profile.engine).facts.graphs
    captured = graphs.most_tokens if graphs.with_prompts else 0
    facts = {"replays_graphs": graphs.most_tokens > 0, "captured_tokens": captured}
    return profile.model_copy(update={"host": profile.host.model_copy(update=facts)})


def with_values(profile: Fitted, values: Mapping[str, float]) -> Fitted:
    """`profile` with fields changed, which are named as in `Parameter.field`."""
    parts: dict[str, dict[str, float]] = {}
    for field, value in values.items():
        part, _, name = field.rpartition(".")
        parts.setdefault(part, {})[name] = value
    update: dict[str, Any] = dict(parts.pop("", {}))
    for part, changes in parts.items():
        update[part] = getattr(profile, part).model_copy(update=changes)
    return profile.model_copy(update=update)


def values_of(profile: Spec, parameters: Sequence[Parameter]) -> list[float]:
    """What `parameters` are in `profile`, within their plausible ranges."""
    result = []
    for parameter in parameters:
        value: Any = profile
        for name in parameter.field.split("."):
            value = getattr(value, name)
        result.append(min(max(value, parameter.least), parameter.most))
    return result


@dataclass(frozen=True)
class LinearErrors(Generic[Fitted]):
    """Errors as a linear function of the parameters' logarithms, around `here`; `keep` picks some of the errors."""

    begin: Fitted
    parameters: tuple[Parameter, ...]
    here: Floats
    at_here: Floats
    slopes: Floats

    @classmethod
    def around(
        cls,
        begin: Fitted,
        parameters: Sequence[Parameter],
        errors: Callable[[Fitted], Floats],
        here: Floats | None = None,
        at_here: Floats | None = None,
    ) -> "LinearErrors[Fitted]":
        """Take the derivatives, one evaluation of `errors` for each parameter and one for the point itself.

        begin:         the profile whose `parameters` are varied
        here, at_here: the point, as logarithms of the parameters, and the errors there; the starts unless given
        """
        if here is None:
            here = np.log([p.start for p in parameters])
        if at_here is None:
            at_here = errors(_profile_at(begin, parameters, here))
        steps = [_STEP if x + _STEP <= np.log(p.most) else -_STEP for x, p in zip(here, parameters, strict=True)]
        slopes = [
            (errors(_profile_at(begin, parameters, here + shift)) - at_here) / step
            for shift, step in zip(np.diag(steps), steps, strict=True)
        ]
        return cls(begin, tuple(parameters), here, at_here, np.stack(slopes, axis=1))

    def optimum(self, keep: NDArray[np.bool_] | None = None) -> Floats:
        """Where the soft L1 loss of the (kept) errors is least, within the plausible ranges and not too far.

        What the errors do not determine stays near where it began.
        """
        from scipy.optimize import least_squares

        chosen = slice(None) if keep is None else keep
        at_here, slopes = self.at_here[chosen], self.slopes[chosen]
        low, high = (np.log([getattr(p, end) for p in self.parameters]) for end in ("least", "most"))
        low, high = np.maximum(low, self.here - _REACH), np.minimum(high, self.here + _REACH)
        start = np.log([p.start for p in self.parameters])
        result = least_squares(
            lambda logs: np.append(at_here + slopes @ (logs - self.here), _PRIOR_OF_RUNS * (logs - start)),
            np.clip(self.here, low + 1e-6, high - 1e-6),
            bounds=(low, high),
            loss="soft_l1",
            f_scale=_LOSS_SCALE_OF_RUNS,
        )
        optimum: Floats = result.x
        return optimum

    def profile(self, logs: Floats) -> Fitted:
        """The profile at some logarithms of the parameters."""
        return _profile_at(self.begin, self.parameters, logs)

    def held_out(self, groups: NDArray[np.str_]) -> Floats:
        """The errors of each group (one name for each error) at the optimum of the others, as the model has it."""
        result = np.empty(len(self.at_here))
        for group in np.unique(groups):
            members = groups == group
            there = self.optimum(~members) if not members.all() else np.log([p.start for p in self.parameters])
            result[members] = self.at_here[members] + self.slopes[members] @ (there - self.here)
        return result

    def loss(self, logs: Floats, errors: Floats) -> float:
        """What `optimum` makes small, of the errors that were found at `logs`."""
        start = np.log([p.start for p in self.parameters])
        scaled = np.append(errors, _PRIOR_OF_RUNS * (logs - start)) / _LOSS_SCALE_OF_RUNS
        return float(np.sum(np.sqrt(1 + scaled**2) - 1))


def _profile_at(begin: Fitted, parameters: Sequence[Parameter], logs: Floats) -> Fitted:
    """`begin` with the parameters at `logs`."""
    values = zip((p.field for p in parameters), map(float, np.exp(logs)), strict=True)
    return with_values(begin, dict(values))


def fit_parameters(
    begin: Fitted,
    parameters: Sequence[Parameter],
    errors: Callable[[Fitted], Floats],
    *,
    rounds: int = _MOST_ROUNDS,
    progress: Callable[[int, int], None] | None = None,
) -> Fitted:
    """The profile with the parameters that make `errors` (weighted log(predicted / measured)) small.

    begin: the profile to start from; rounds: at most

    Gauss-Newton with a soft L1 loss: simulations are expensive and their means nearly linear in such parameters, so the
    derivatives are taken once a round, and each round goes to the optimum of its linear model, until one gains little
    (of two parameters that do nearly the same, the linear model far from it says little).
    """
    calls = 0

    def counted(profile: Fitted) -> Floats:
        nonlocal calls
        calls += 1
        if progress is not None:
            progress(calls, rounds * (len(parameters) + 1) + 1)
        return errors(profile)

    best, at_best = None, None
    for _ in range(rounds):
        model = LinearErrors.around(begin, parameters, counted, best, at_best)
        best, at_best = model.here, model.at_here
        before = least = model.loss(best, at_best)
        there = model.optimum()
        for _ in range(2):
            at_there = counted(model.profile(there))
            if model.loss(there, at_there) < before:
                best, at_best, least = there, at_there, model.loss(there, at_there)
                break
            there = (model.here + there) / 2  # the linear model reached too far
        if least > (1 - _WORTH_IT) * before:
            break
    assert best is not None
    return _profile_at(begin, parameters, best)

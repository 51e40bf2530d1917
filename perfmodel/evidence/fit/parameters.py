"""Fits few positive, bounded parameters so that simulated means meet measured ones. Simulations are expensive and their
means nearly linear in the parameters, so derivatives are taken once (`LinearErrors`); cross-validation uses optima of
the linear model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import EngineProfile
from perfmodel.evidence.observation import Floats
from perfmodel.files.base import Spec
from perfmodel.files.tables import load_table
from perfmodel.specs.engine.description import describe_engine

Fitted = TypeVar("Fitted", bound=Spec)
_LOSS_SCALE = 0.05  # log errors well below this count squared, well above it by their size
_PRIOR = 0.05  # error that counts as much as a factor e between a parameter and where it began
_STEP = 0.25  # of a logarithm, for derivatives: well above the noise of changed schedules
_REACH = 1.6  # of a round, in logarithms: a factor of five
_MAX_ROUNDS = 5
_WORTH_IT = 0.01  # of the loss: a round that gains less is the last one


class Parameter(NamedTuple):
    """A field of the profile, its `host` or `server`, with start and plausible range."""

    field: str  # "host.serial_step_s"
    start: float
    least: float
    most: float


def known_parameters(*groups: str) -> tuple[Parameter, ...]:
    """The parameters of `groups` of `workloads/tables/fit_parameters.yaml`."""
    table = load_table("fit_parameters")["profiles"]
    return tuple(Parameter(*row) for group in groups for row in table[group])


def with_facts(profile: EngineProfile) -> EngineProfile:
    """`profile` with the facts of the engine's code, which are not fitted."""
    graphs = describe_engine(profile.engine).facts.graphs
    captured = graphs.most_tokens if graphs.with_prompts else 0
    facts = {"replays_graphs": graphs.most_tokens > 0, "captured_tokens": captured}
    return profile.model_copy(update={"host": profile.host.model_copy(update=facts)})


def with_values(profile: Fitted, values: Mapping[str, float]) -> Fitted:
    """`profile` with changed fields, named as `Parameter.field`."""
    update: dict[str, Any] = {}
    for field, value in values.items():
        part, _, name = field.rpartition(".")
        if part:
            update[part] = update.get(part, getattr(profile, part)).model_copy(update={name: value})
        else:
            update[name] = value
    return profile.model_copy(update=update)


def values_of(profile: Spec, parameters: Sequence[Parameter]) -> list[float]:
    """Values of `parameters` in `profile`, clipped to their ranges."""
    return [min(max(attrgetter(item.field)(profile), item.least), item.most) for item in parameters]


@dataclass(frozen=True)
class LinearErrors(Generic[Fitted]):
    """Errors linear in the parameters' logarithms around `here`."""

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
        """Linearize `errors` with one evaluation per parameter and, without `at_here`, one at the point. begin: the
        profile whose `parameters` vary; here, at_here: the point in logarithms (default: of `begin`), and its errors"""
        here = np.log(values_of(begin, parameters)) if here is None else here
        if at_here is None:
            at_here = errors(_profile_at(begin, parameters, here))
        steps = [_STEP if x + _STEP <= np.log(p.most) else -_STEP for x, p in zip(here, parameters, strict=True)]
        slopes = [
            (errors(_profile_at(begin, parameters, here + shift)) - at_here) / step
            for shift, step in zip(np.diag(steps), steps, strict=True)
        ]
        return cls(begin, tuple(parameters), here, at_here, np.stack(slopes, axis=1))

    @property
    def start(self) -> Floats:
        """Logarithms of the starts."""
        return np.log([p.start for p in self.parameters])

    def optimum(self, keep: NDArray[np.bool_] | None = None) -> Floats:
        """Minimum of the soft L1 loss of the (kept) errors within the ranges; undetermined parameters stay."""
        from scipy.optimize import least_squares

        chosen = slice(None) if keep is None else keep
        at_here, slopes, start = self.at_here[chosen], self.slopes[chosen], self.start
        low, high = (np.log([getattr(p, end) for p in self.parameters]) for end in ("least", "most"))
        low, high = np.maximum(low, self.here - _REACH), np.minimum(high, self.here + _REACH)
        result = least_squares(
            lambda logs: np.append(at_here + slopes @ (logs - self.here), _PRIOR * (logs - start)),
            np.clip(self.here, low + 1e-6, high - 1e-6),
            bounds=(low, high),
            loss="soft_l1",
            f_scale=_LOSS_SCALE,
        )
        optimum: Floats = result.x
        return optimum

    def profile(self, logs: Floats) -> Fitted:
        """The profile at some logarithms of the parameters."""
        return _profile_at(self.begin, self.parameters, logs)

    def held_out(self, groups: NDArray[np.str_]) -> Floats:
        """Errors of each group (a name per error) at the optimum of the others, in the linear model."""
        result = np.empty(len(self.at_here))
        for members in masks(groups):
            there = self.optimum(~members) if not members.all() else self.start
            result[members] = self.at_here[members] + self.slopes[members] @ (there - self.here)
        return result

    def loss(self, logs: Floats, errors: Floats) -> float:
        """The objective of `optimum`, for `errors` at `logs`."""
        scaled = np.append(errors, _PRIOR * (logs - self.start)) / _LOSS_SCALE
        return float(np.sum(np.sqrt(1 + scaled**2) - 1))


def masks(groups: NDArray[np.str_]) -> Iterator[NDArray[np.bool_]]:
    """A mask per group."""
    return (groups == group for group in np.unique(groups))


def _profile_at(begin: Fitted, parameters: Sequence[Parameter], logs: Floats) -> Fitted:
    return with_values(begin, dict(zip((p.field for p in parameters), map(float, np.exp(logs)), strict=True)))


def fit_parameters(
    begin: Fitted,
    parameters: Sequence[Parameter],
    errors: Callable[[Fitted], Floats],
    *,
    rounds: int = _MAX_ROUNDS,
    progress: Callable[[int, int], None] | None = None,
) -> Fitted:
    """Fit `parameters` to make `errors` (weighted log(predicted / measured)) small. Gauss-Newton with a soft L1 loss,
    from `begin`: up to `rounds` steps to the optimum of the linear model, until one gains little (with two nearly
    equivalent parameters the linear model is unreliable far away)."""
    calls = 0

    def counted(profile: Fitted) -> Floats:
        nonlocal calls
        calls += 1
        if progress is not None:
            progress(calls, rounds * (len(parameters) + 1) + 1)
        return errors(profile)

    best: Floats = np.log([item.start for item in parameters])
    at_best: Floats | None = None
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
    return _profile_at(begin, parameters, best)

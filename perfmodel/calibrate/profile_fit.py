"""Fitting numbers of an engine's profile so that simulated means meet measured ones: few, positive, bounded."""

__all__ = ["Parameter", "fit_parameters", "with_values"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import EngineProfile

Floats = NDArray[np.float64]
_LOSS_SCALE = 0.05  # log errors well below this count squared, well above it by their size
_STEP = 0.08  # of a logarithm, to see what a parameter does: well above the noise of changed schedules


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field of the profile, or of its `host` or `server`, with where to begin and its plausible range."""

    field: str  # "host.serial_step_s"
    start: float
    least: float
    most: float


def with_values(profile: EngineProfile, values: Mapping[str, float]) -> EngineProfile:
    """`profile` with fields changed, which are named as in `Parameter.field`."""
    parts: dict[str, dict[str, float]] = {}
    for field, value in values.items():
        part, _, name = field.rpartition(".")
        parts.setdefault(part, {})[name] = value
    update: dict[str, object] = dict(parts.pop("", {}))
    for part, changes in parts.items():
        update[part] = getattr(profile, part).model_copy(update=changes)
    return profile.model_copy(update=update)


def fit_parameters(
    begin: EngineProfile,
    parameters: Sequence[Parameter],
    errors: Callable[[EngineProfile], Floats],
    *,
    max_evaluations: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> EngineProfile:
    """The profile with the parameters that make `errors` (weighted log(predicted / measured)) small.

    max_evaluations: of the whole set of parameters; each takes as many simulations again for the derivatives
    """
    from scipy.optimize import least_squares

    low, high, start = (np.log([getattr(p, end) for p in parameters]) for end in ("least", "most", "start"))
    calls = 0

    def profile_of(logs: Floats) -> EngineProfile:
        values = zip((p.field for p in parameters), map(float, np.exp(logs)), strict=True)
        return with_values(begin, dict(values))

    def counted(logs: Floats) -> Floats:
        nonlocal calls
        calls += 1
        if progress is not None:
            progress(calls, max_evaluations * (len(parameters) + 1))
        return errors(profile_of(logs))

    found = least_squares(
        counted,
        start,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_LOSS_SCALE,
        diff_step=_STEP,
        max_nfev=max_evaluations,
        x_scale=0.5,
    )
    return profile_of(found.x)

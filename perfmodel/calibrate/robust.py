"""Robust fits of physical forms: least squares on log(predicted / measured), bounded, from several starts.

The parameters of a form are the bounded positive float fields of its `...Fit`; their `ge` and `le` are the plausible
range, and the fit works on their logarithms. A soft L1 loss keeps rows that no physics explains from bending the rest.
Each parameter has a prior about the form's own value, with the weight of a single row: a parameter that no row has
anything to say on stays there, instead of anywhere or at an end of its range, and one that rows determine does not
notice.
"""

__all__ = ["fit_form", "of_one_more", "residuals_of"]

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.forms.fits import Residuals
from perfmodel.files.base import Spec

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
    seed: int = 0,
) -> FitT:
    """Fit the fields `free` of `start` so that `predict(fit, rows)` gives `seconds[rows]`.

    predict: seconds of the given rows (numbers into `seconds`) under a fit
    start:   its values are the middles of the priors
    starts:  changes of `start` to begin from; the best end wins
    most_rows, seed: above so many rows a sample is fitted, drawn by `seed`
    """
    from scipy.optimize import least_squares

    rows = _sample(len(seconds), most_rows, seed)
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
        found = least_squares(
            error,
            begin,
            bounds=(low, high),
            loss="soft_l1",
            f_scale=_LOSS_SCALE,
            diff_step=1e-2,
            max_nfev=40,
            x_scale=0.3,
        )
        if best is None or found.cost < best.cost:
            best = found
    return build(best.x)


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


def _sample(count: int, most: int, seed: int) -> NDArray[np.int64]:
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, most, replace=False))


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

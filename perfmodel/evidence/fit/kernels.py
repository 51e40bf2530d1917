"""Fits kernel models to kernel tables: bounded robust least squares of log(predicted / measured), several starts.

A model's parameters are the bounded positive float fields of its `...Fit`, fitted as logarithms within `ge` and `le`.
Each has a prior at its default with the weight of one row, for undetermined ones. A soft L1 loss limits outliers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.kernel_models import experts, gemm, module
from perfmodel.cost.kernel_models.attention import decode, latent, mixed, prefill
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.messages import collective
from perfmodel.cost.kernel_models.messages.links import link_for
from perfmodel.evidence.sources.kernels import Group, KernelTable
from perfmodel.files.base import Spec
from perfmodel.files.tables import load_table

Floats = NDArray[np.float64]
FitT = TypeVar("FitT", bound=Spec)

_LOSS_SCALE = 0.1  # log residuals well below this count squared, well above it by their size
_MAX_ROWS = 4000
_FIRST_ROWS = 600  # of a search among kernels' rules
_PRIOR = 3.0  # standard deviation of a parameter's logarithm: a factor of twenty

_SECONDS: Mapping[type[Any], Callable[[Any, Any, DeviceFacts], Any]] = {
    gemm.GemmSizes: partial(gemm.gemm_seconds, as_timed=True),
    experts.ExpertSizes: partial(experts.expert_seconds, is_warm=True),
    decode.DecodeSizes: partial(decode.decode_seconds, is_warm=True),
    prefill.PrefillSizes: prefill.prefill_seconds,
    module.ModuleSizes: module.module_seconds,
    mixed.MixedSizes: mixed.mixed_seconds,
}


def timed(sizes: Any, fit: Any, device: DeviceFacts) -> Any:
    """Seconds of `sizes` as tables time them: eager launches count, what fits L2 stays there."""
    if isinstance(sizes, latent.LatentSizes):
        is_decode = isinstance(sizes.attention, decode.DecodeSizes)
        return (latent.latent_decode_seconds if is_decode else latent.latent_prefill_seconds)(sizes, fit, device)
    if isinstance(sizes, collective.CollectiveSizes):
        is_custom = isinstance(fit, collective.CustomAllReduceFit)
        seconds = collective.custom_seconds if is_custom else collective.collective_seconds
        return seconds(sizes, fit, device, link_for(device.hardware, 2))  # all measured groups: one scale-up domain
    if isinstance(sizes, collective.ExchangeSizes):
        return collective.exchange_seconds(sizes, fit, device)
    return _SECONDS[type(sizes)](sizes, fit, device)


def predict(group: Group, fit: Any) -> Floats:
    """Seconds of each row under a fit, timed as the table was."""
    parts = timed(group.sizes, fit, group.device)
    return np.asarray(getattr(parts, "duration", parts))


# One kernel's rows on the devices of one architecture.
Groups = Sequence[Group]


class KernelModule(NamedTuple):
    """A kind of kernel: how rows group into kernels, and how one is fitted to its rows on all devices of an
    architecture, which differ by what they declare."""

    groups: Callable[[KernelTable, DeviceFacts], list[Group]]
    fit: Callable[[Groups], Any]


def search_of(kind: str) -> tuple[tuple[str, ...], tuple[dict[str, float], ...]]:
    """(fitted parameters, where searches begin) of a kind of kernel, by `workloads/tables/fit_parameters.yaml`."""
    row = load_table("fit_parameters")["kernels"][kind]
    return tuple(row["free"]), tuple(row.get("starts", ({},)))


def fit_groups(
    groups: Groups,
    start: FitT,
    *,
    free: Sequence[str],
    starts: Sequence[Mapping[str, float]] = ({},),
    most_rows: int = _MAX_ROWS,
) -> FitT:
    """Fit one kernel, with residuals. groups: its rows; start, free, starts, most_rows: see `fit_form`"""
    ends = np.cumsum([0, *(len(group.seconds) for group in groups)])

    def seconds(fit: FitT, rows: NDArray[np.int64]) -> Floats:
        inside = np.split(rows, np.searchsorted(rows, ends[1:-1]))
        parts = zip(groups, inside, ends[:-1], strict=True)
        return np.concatenate([predict(group.take(some - first), fit) for group, some, first in parts if len(some)])

    result = fit_form(seconds, start, seconds_of(groups), free=free, starts=starts, most_rows=most_rows)
    return with_residuals(result, groups)


def best_of(
    groups: Groups, kernels: Sequence[FitT], free: Sequence[str], starts: Sequence[Mapping[str, float]], most_rows: int
) -> FitT:
    """Fit one kernel whose rules the tables do not name: of `kernels`, prior means with different rules, the one that a
    first search on few rows fits best. groups: rows; free, starts, most_rows: see `fit_form`"""
    measured = np.log(seconds_of(groups))

    def loss(fit: FitT) -> float:
        errors = np.log(np.concatenate([predict(group, fit) for group in groups])) - measured
        return float(np.mean(softened(errors, _LOSS_SCALE) ** 2))

    def first(kernel: FitT) -> float:
        return loss(fit_groups(groups, kernel, free=free, starts=starts[:1], most_rows=_FIRST_ROWS))

    kernel = kernels[0] if len(kernels) == 1 else min(kernels, key=first)
    return fit_groups(groups, kernel, free=free, starts=starts, most_rows=most_rows)


def refitted(fit: FitT, groups: Groups) -> FitT:
    """`fit`, whose values begin the search and are its priors, fitted to other rows of its kernel."""
    return fit_groups(groups, fit, free=fitted_names(fit), most_rows=1000)


def fitted_names(fit: Spec) -> list[str]:
    """The parameters that a fit has values of."""
    names = sorted(fit.model_fields_set)
    return [name for name in names if isinstance(getattr(fit, name), float) and _has_range(fit, name)]


def moved(fit: FitT, logs: Mapping[str, float]) -> FitT:
    """`fit` with the logarithms of parameters moved by `logs`, within their ranges."""
    values = {name: float(np.clip(getattr(fit, name) * np.exp(by), *_range(fit, name))) for name, by in logs.items()}
    return fit.model_copy(update=values)


def within_ranges(kind: type[FitT], values: Mapping[str, Any]) -> FitT:
    """A fit with `values`, those of parameters moved into their plausible ranges: where a search begins."""
    plain = kind()
    inside = {name: float(np.clip(values[name], *_range(plain, name))) for name in values if _has_range(plain, name)}
    return kind(**{**values, **inside})


def seconds_of(groups: Groups) -> Floats:
    """Measured seconds of all rows."""
    return np.concatenate([group.seconds for group in groups])


def with_residuals(fit: FitT, groups: Groups) -> FitT:
    """`fit` with its residuals over all rows."""
    predicted = np.concatenate([predict(group, fit) for group in groups])
    return fit.model_copy(update={"residuals": residuals_of(predicted, seconds_of(groups))})


def fit_form(
    predict: Callable[[FitT, NDArray[np.int64]], Floats],
    start: FitT,
    seconds: Floats,
    *,
    free: Sequence[str],
    starts: Sequence[Mapping[str, float]] = ({},),
    most_rows: int = _MAX_ROWS,
) -> FitT:
    """Fit the fields `free` of `start` so that `predict(fit, rows)` gives `seconds[rows]`.

    predict: seconds of the given row indices under a fit
    start:   prior means
    starts:  changes of `start` to begin from; the best result wins
    most_rows: larger tables are subsampled, always equally"""
    from scipy.optimize import least_squares

    rows = np.arange(len(seconds))
    if len(rows) > most_rows:
        rows = np.sort(np.random.default_rng(0).choice(len(rows), most_rows, replace=False))
    target = np.log(seconds[rows])
    low, high = (np.log(np.array(ends)) for ends in zip(*(_range(start, name) for name in free), strict=True))
    middle = np.clip(np.log([getattr(start, name) for name in free]), low, high)

    def build(logs: Floats) -> FitT:
        values = np.clip(np.exp(logs), np.exp(low), np.exp(high))
        return start.model_copy(update=dict(zip(free, map(float, values), strict=True)))

    def error(logs: Floats) -> Floats:
        of_rows = np.log(np.maximum(predict(build(logs), rows), 1e-12)) - target
        return np.append(of_rows, _LOSS_SCALE * (logs - middle) / _PRIOR)

    results = []
    for changes in starts:
        begin = np.log([changes.get(name, getattr(start, name)) for name in free])
        search = least_squares(
            error,
            np.clip(begin, low + 1e-3, high - 1e-3),
            bounds=(low, high),
            loss="soft_l1",
            f_scale=_LOSS_SCALE,
            diff_step=1e-2,
            max_nfev=40,
            x_scale=0.3,
        )
        results.append(search)
    return build(min(results, key=lambda result: float(result.cost)).x)


def ends_of(spec: Spec, name: str) -> dict[str, float]:
    """The plausible range (`ge`, `le`) of a field."""
    constraints = type(spec).model_fields[name].metadata
    return {end: float(getattr(item, end)) for item in constraints for end in ("ge", "le") if hasattr(item, end)}


def _has_range(spec: Spec, name: str) -> bool:
    ends = ends_of(spec, name)
    return set(ends) == {"ge", "le"} and 0 < ends["ge"] < ends["le"]


def _range(spec: Spec, name: str) -> tuple[float, float]:
    ends = ends_of(spec, name)
    if not _has_range(spec, name):
        raise TypeError(f"{type(spec).__name__}.{name} has no positive plausible range (ge, le)")
    return ends["ge"], ends["le"]


def residuals_of(predicted: Floats, seconds: Floats, spread: Floats | float = 1.0) -> Residuals:
    """Quantiles of log(measured / predicted), in units of each row's expected `spread`."""
    logs = np.log(seconds / predicted) / spread
    return rounded_residuals(np.quantile(logs, [0.1, 0.5, 0.9]), len(logs))


def rounded_residuals(quantiles: Sequence[float] | Floats, num_rows: int, digits: int = 5) -> Residuals:
    """Residuals from the 10th, 50th and 90th percentile of `num_rows` logarithms."""
    p10, p50, p90 = (round(float(value), digits) for value in quantiles)
    return Residuals(num_rows=num_rows, p10=p10, p50=p50, p90=p90)


def rounded(values: Mapping[str, float]) -> dict[str, Any]:
    """The values to four digits, as calibrations hold them."""
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def weighted_quantiles(values: Floats, weights: Floats) -> list[float]:
    """Weighted 10th, 50th and 90th percentile."""
    order = np.argsort(values)
    place = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return [float(np.interp(share, place, values[order])) for share in (0.1, 0.5, 0.9)]


def softened(errors: Floats, small: float) -> Floats:
    """Residuals for least squares: squared when small, logarithmic beyond `small`."""
    return np.sign(errors) * small * np.sqrt(np.log1p((errors / small) ** 2))


def widen_for_new_group(residuals: Residuals, num_groups: int) -> Residuals:
    """`residuals` widened for a new group, from the `num_groups` measured ones. Errors within a group are correlated,
    so few groups say little however many rows they have: deviations are widened as for a new draw from a normal
    distribution of unknown variance (Student's t; Hahn and Meeker, Statistical Intervals, 1991, section 4.7)."""
    from scipy.stats import norm, t

    degrees = max(1, num_groups - 1)
    factor = float(t.ppf(0.9, degrees) / norm.ppf(0.9)) * (1 + 1 / num_groups) ** 0.5
    wide = residuals.widened(factor)
    return wide.model_copy(update={"p10": round(wide.p10, 5), "p90": round(wide.p90, 5)})

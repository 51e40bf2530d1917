"""Fits the acceptance catalog: two parameters per drafter, mode and dataset.

Least squares of log L(n). Decays of drafters are alike, so each has a prior at the mean of all: a series of one length
has that decay, one of few lengths a value in between. Held out, this errs less on longer drafts than decays fitted
alone, and less than a fall by a power of the place or one acceptance for all places.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Observation
from perfmodel.evidence.sources.acceptance import LENGTH, DraftSeries, DraftSetup
from perfmodel.specs.engine.acceptance_catalog import AcceptanceCatalog, AcceptanceLaw, LawMatch

_NOISE = 0.02  # of a measured log L(n) about the law: repeats and sampling
_SPREAD = 0.05  # of log decay between drafters
_DECAY = 0.95  # where no series has two lengths: the mean of EAGLE-3 and DSpark drafters
Fold = tuple[list[Observation], list[Observation]]  # rows to predict, and rows to fit


def fit_catalog(rows: Sequence[Observation]) -> AcceptanceCatalog:
    """Laws of all series, with errors of draft lengths and of models left out. Raises SpecError without rows."""
    if not rows:
        raise SpecError("got no accepted lengths; a fit needs one row at least.")
    errors = {}
    for name, group in (("length_error", "length"), ("model_error", "model")):
        pairs = [(row, fit_laws(kept)) for left_out, kept in FOLDS[group](rows) if kept for row in left_out]
        logs = [np.log(row.metrics[LENGTH] / law_of(laws, row).law.length(row.setup.depth)) for row, laws in pairs]
        errors[name] = round(float(np.quantile(np.abs(logs), 0.8)), 4) if logs else 0.0
    return fit_laws(rows).model_copy(update=errors)


def fit_laws(rows: Sequence[Observation]) -> AcceptanceCatalog:
    """A law for each series of `rows`, which are not empty."""
    ordered = sorted((row.setup, row.metrics[LENGTH]) for row in rows)
    series = {key: list(members) for key, members in groupby(ordered, key=lambda item: item[0].series)}
    alone = [_fit(members, _DECAY, 1.0)[1] for members in series.values() if len({s.depth for s, _ in members}) > 1]
    decay = float(np.exp(np.mean(np.log(alone)))) if alone else _DECAY
    return AcceptanceCatalog(laws={key.key: _law(key, members, decay) for key, members in series.items()})


def law_of(catalog: AcceptanceCatalog, row: Observation) -> LawMatch:
    """The law of the row's series, else that of the nearest entries."""
    series: DraftSeries = row.setup.series
    own = catalog.laws.get(series.key)
    return catalog.nearest(series._asdict()) if own is None else LawMatch(own, (own,), True)


def _law(series: DraftSeries, members: Sequence[tuple[DraftSetup, float]], decay: float) -> AcceptanceLaw:
    first, own = (float(f"{value:.4g}") for value in _fit(members, decay, _SPREAD))
    names = {key: value for key, value in series._asdict().items() if key != "drafter"}
    return AcceptanceLaw(**names, first=first, decay=own, longest=max(setup.depth for setup, _ in members))


def _fit(members: Sequence[tuple[DraftSetup, float]], decay: float, spread: float) -> tuple[float, float]:
    """(first, decay) of one series, with a prior of the decay that is `spread` wide in its logarithm."""
    from scipy.optimize import least_squares

    depths, logs = np.array([setup.depth for setup, _ in members]), np.log([length for _, length in members])
    places = np.arange(depths.max())

    def errors(values: np.ndarray) -> np.ndarray:
        lengths = 1.0 + np.cumsum(np.cumprod(values[0] * values[1] ** places))
        return np.append((np.log(lengths[depths - 1]) - logs) / _NOISE, np.log(values[1] / decay) / spread)

    first, own = least_squares(errors, (0.7, min(decay, 0.99)), bounds=((0.01, 0.3), (1.0, 1.0))).x
    return float(first), float(own)


def _by(value_of: Callable[[Observation], object]) -> Callable[[Sequence[Observation]], Iterator[Fold]]:
    def folds(rows: Sequence[Observation]) -> Iterator[Fold]:
        for value in dict.fromkeys(map(value_of, rows)):
            yield [row for row in rows if value_of(row) == value], [row for row in rows if value_of(row) != value]

    return folds


def _longer(rows: Sequence[Observation]) -> Iterator[Fold]:
    half = max((row.setup.depth for row in rows), default=0) / 2
    yield [row for row in rows if row.setup.depth > half], [row for row in rows if row.setup.depth <= half]


def _other_lengths(rows: Sequence[Observation]) -> Iterator[Fold]:
    for kept in rows:
        own = [row for row in rows if row.setup.series == kept.setup.series and row is not kept]
        yield own, [row for row in rows if row.setup.series != kept.setup.series] + [kept]


# What `validate acceptance --leave-out` leaves out: each draft length; the longer half; of each series all lengths but
# one, for every one; each model; each mode.
FOLDS: Mapping[str, Callable[[Sequence[Observation]], Iterator[Fold]]] = {
    "length": _by(lambda row: row.setup.depth),
    "longer-half": _longer,
    "other-lengths": _other_lengths,
    "model": _by(lambda row: row.setup.series.model),
    "mode": _by(lambda row: row.setup.series.mode),
}

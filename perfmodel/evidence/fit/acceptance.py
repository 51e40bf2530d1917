"""Published mean accepted lengths of drafts, and the acceptance catalog fitted to them.

`acceptance_length` counts the model's own token: from 1 (no draft is right) to 1 + `num_speculative_tokens`. A drafter,
mode and dataset has two parameters, by least squares of log L(n). Decays of drafters are alike, so each has a prior at
the mean of all: one length alone has that decay. Held out, this errs less on longer drafts than one acceptance for all
places, or a fall by a power of the place. Domains (datasets) differ alike for all drafters, too: the log odds of
`first` are those of a drafter and of a domain, the latter with a prior at 0."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Entry, Observation, Reasons, described, grouped, lenient_rows, named
from perfmodel.specs.engine.speculation import KEYS, AcceptanceCatalog, AcceptanceLaw, LawMatch

LENGTH = "acceptance_length"
_COLUMNS = ("source_path", "model", "mode", "dataset", "measured_on", "num_speculative_tokens", LENGTH)
_NOISE = 0.02  # of a measured log L(n) about the law: repeats and sampling
_SPREAD = 0.05  # of log decay between drafters
_DECAY = 0.95  # where no series has two lengths: the mean of EAGLE-3 and DSpark drafters
_MAX_FIRST = 0.98  # so that there are odds to move
_DOMAIN_PRIOR = 0.3  # of log odds: what is left of one entry over the spread of domains


class DraftSetup(NamedTuple):
    """What was measured. drafter: the name of the source's file; depth: drafted tokens"""

    drafter: str
    model: str
    method: str
    dataset: str
    mode: str
    depth: int

    @property
    def series(self) -> str:
        """The same at all depths, as in the catalog."""
        return f"{self.drafter} {self.mode} {self.dataset}"


def read_acceptance(path: str | Path) -> tuple[list[Observation], Reasons]:
    """Rows of a table, or of all tables in a folder, with `DraftSetup`s, and (row, reason) of unreadable ones. Raises
    SpecError for another file."""
    entries: list[tuple[str, Entry]] = []
    for file in sorted(Path(path).glob("*.csv")) or [Path(path)]:
        prefix = "" if file == Path(path) else f"{file.stem}, "
        entries += ((prefix + name, row) for name, row in named(lenient_rows(file, _COLUMNS, "accepted lengths")))
    return described(entries, _row)


def _row(name: str, entry: Entry) -> Observation:
    depth, length = int(entry["num_speculative_tokens"]), float(entry[LENGTH])
    if depth < 1 or not 1 <= length <= 1 + depth:
        most = f"1 to {1 + depth}, the model's own token included"
        raise SpecError(f"got {LENGTH} {length:g} of {depth} drafted tokens; expected {most}.")
    words = re.findall(r"[\w.+-]+", entry["measured_on"])
    names = Path(entry["source_path"]).stem, entry["model"], words[-1].lower(), entry["dataset"], entry["mode"]
    setup = DraftSetup(*names, depth)
    labels = {key: str(getattr(setup, key)) for key in KEYS} | {"drafted tokens": f"{depth:02d}"}
    return Observation(name, setup, {LENGTH: length}, label=f"{setup.series}, {depth} drafted", labels=labels)


def fit_catalog(rows: Sequence[Observation]) -> AcceptanceCatalog:
    """Laws of all series, with errors of draft lengths and of models left out. Raises SpecError without rows."""
    if not rows:
        raise SpecError("there are no accepted lengths to fit to; expected at least one row.")
    errors = {}
    for name, group in (("length_error", "length"), ("model_error", "model")):
        pairs = [(row, fit_laws(kept)) for left_out, kept in FOLDS[group](rows) if kept for row in left_out]
        logs = [np.log(row.metrics[LENGTH] / law_of(laws, row).law.length(row.setup.depth)) for row, laws in pairs]
        errors[name] = round(float(np.quantile(np.abs(logs), 0.8)), 4) if logs else 0.0
    return fit_laws(rows).model_copy(update=errors)


def fit_laws(rows: Sequence[Observation]) -> AcceptanceCatalog:
    """A law for each series of `rows`, which are not empty."""
    series = grouped((row.setup.series, row) for row in sorted(rows, key=lambda row: row.setup))
    alone = [_fit(members, _DECAY, 1.0)[1] for members in series.values() if len(members) > 1]
    decay = float(np.exp(np.mean(np.log(alone)))) if alone else _DECAY
    laws = {}
    for name, members in series.items():
        first, own = (float(f"{value:.4g}") for value in _fit(members, decay, _SPREAD))
        keys = {key: getattr(members[0].setup, key) for key in KEYS}
        laws[name] = AcceptanceLaw(**keys, first=first, decay=own, longest=members[-1].setup.depth)
    return AcceptanceCatalog(laws=laws, domains=_domains(laws))


def _domains(laws: Mapping[str, AcceptanceLaw]) -> dict[str, float]:
    """Log odds of each dataset, beside those of each drafter in each mode; none where there is but one dataset."""
    names, datasets = (
        [*dict.fromkeys(values)] for values in zip(*((k.rpartition(" ")[::2]) for k in laws), strict=True)
    )
    if not datasets[1:]:
        return {}
    size = len(names) + len(datasets)
    design, odds = np.zeros((len(laws) + len(datasets), size)), np.zeros(len(laws) + len(datasets))
    for row, (key, law) in enumerate(laws.items()):
        name, _, dataset = key.rpartition(" ")
        design[row, [names.index(name), len(names) + datasets.index(dataset)]] = 1
        odds[row] = log(law.first / (1 - law.first))
    design[len(laws) :, len(names) :] = _DOMAIN_PRIOR * np.eye(len(datasets))
    steps = np.linalg.lstsq(design, odds, rcond=None)[0][len(names) :]
    return {dataset: round(float(value), 4) for dataset, value in zip(datasets, steps, strict=True)}


def law_of(catalog: AcceptanceCatalog, row: Observation) -> LawMatch:
    """The law of the row's series, else that of the nearest entries."""
    own = catalog.laws.get(row.setup.series)
    return catalog.nearest(row.setup._asdict()) if own is None else LawMatch(own, (own,), True)


def _fit(members: Sequence[Observation], decay: float, spread: float) -> tuple[float, float]:
    """(first, decay) of one series, with a prior of the decay that is `spread` wide in its logarithm."""
    from scipy.optimize import least_squares

    depths, logs = np.array([row.setup.depth for row in members]), np.log([row.metrics[LENGTH] for row in members])

    def errors(values: NDArray[np.float64]) -> NDArray[np.float64]:
        lengths = 1.0 + np.cumsum(np.cumprod(values[0] * values[1] ** np.arange(depths.max())))
        return np.append((np.log(lengths[depths - 1]) - logs) / _NOISE, np.log(values[1] / decay) / spread)

    first, own = least_squares(errors, (0.7, min(decay, 0.99)), bounds=((0.01, 0.3), (_MAX_FIRST, 1.0))).x
    return float(first), float(own)


Fold = tuple[list[Observation], list[Observation]]  # rows to predict, and rows to fit
_Folds = Callable[[Sequence[Observation]], Iterator[Fold]]


def _by(value_of: Callable[[DraftSetup], object]) -> _Folds:
    def folds(rows: Sequence[Observation]) -> Iterator[Fold]:
        for value in dict.fromkeys(value_of(row.setup) for row in rows):
            left_out = [row for row in rows if value_of(row.setup) == value]
            yield left_out, [row for row in rows if row not in left_out]

    return folds


def _lengths(rows: Sequence[Observation]) -> Iterator[Fold]:
    """Each length, of the series that have others."""
    for left_out, kept in _by(lambda setup: setup.depth)(rows):
        series = {row.setup.series for row in kept}
        yield [row for row in left_out if row.setup.series in series], kept


def _longer(rows: Sequence[Observation]) -> Iterator[Fold]:
    half = max((row.setup.depth for row in rows), default=0) / 2
    kept = [row for row in rows if row.setup.depth <= half]
    series = {row.setup.series for row in kept}
    yield [row for row in rows if row.setup.depth > half and row.setup.series in series], kept


def _other_lengths(rows: Sequence[Observation]) -> Iterator[Fold]:
    for kept in rows:
        own = [row for row in rows if row.setup.series == kept.setup.series and row is not kept]
        yield own, [row for row in rows if row not in own]


# What `validate acceptance --leave-out` leaves out: each draft length; the longer half; of each series all lengths but
# one, for every one; each model; each mode; each series, which is a domain of a drafter.
FOLDS: Mapping[str, _Folds] = {
    "length": _lengths,
    "longer-half": _longer,
    "other-lengths": _other_lengths,
    "model": _by(lambda setup: setup.model),
    "mode": _by(lambda setup: setup.mode),
    "domain": _by(lambda setup: setup.series),
}

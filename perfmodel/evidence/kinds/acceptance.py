"""`validate acceptance`: published mean accepted lengths of drafts vs. the acceptance catalog."""

from dataclasses import replace
from math import exp
from pathlib import Path

from perfmodel.evidence.fit.acceptance import FOLDS, LENGTH, fit_laws, law_of, read_acceptance
from perfmodel.evidence.observation import Observation, Prediction, Progress
from perfmodel.evidence.report import ValidationReport, comparison_of, report_of
from perfmodel.specs.engine.speculation import AcceptanceCatalog, load_catalog

_DIMENSIONS = ("row", "model", "method", "mode", "dataset", "drafted tokens")
_ABOUT = (
    "Mean tokens of a step with drafts, the model's own token included. The law has two numbers per drafter, mode and "
    "dataset: the acceptance of the first drafted token, and the factor by which it falls with each further one. Rows "
    "marked fitted are training data of the committed catalog; further length: of its series, but longer; not in the "
    "catalog: predicted by the mean of the nearest drafters (of its model, else its method, else its mode), moved to "
    "its dataset by the factor that all drafters share. "
    "The simplest predictor has the first token's acceptance at all places."
)


def validate_acceptance(path: str | Path, progress: Progress | None = None, group: str = "") -> ValidationReport:
    """Compare each row with the committed catalog, or, left out with its `group` (of `FOLDS`), with laws fitted to the
    rest of the rows. Rows that cannot be read are listed. Raises SpecError for another kind of file."""
    rows, unread = read_acceptance(path)
    if group:
        folds = [(left_out, fit_laws(kept)) for left_out, kept in FOLDS[group](rows) if kept]
        pairs = [_predicted(row, laws, "left out") for left_out, laws in folds for row in left_out]
        missed = sorted({row.name for row in rows} - {pair.row.name for pair in pairs})
        unread = [*unread, *((name, f"no row is left without its {group} to fit to.") for name in missed)]
    else:
        pairs = [_predicted(row, load_catalog()) for row in rows]
    dimensions = {name: (lambda pair, name=name: pair.row.labels[name]) for name in _DIMENSIONS}
    comparison = comparison_of(LENGTH, "tokens", pairs, dimensions)
    nearest = {pair.row.setup.series: pair.details["nearest"] for pair in pairs if pair.details["nearest"]}
    notes = [f"{series}: predicted by the mean of {names}." for series, names in nearest.items()]
    return report_of("acceptance", pairs, unread, [comparison], _ABOUT, 5, lambda *_: {}, notes)


def _predicted(row: Observation, catalog: AcceptanceCatalog, status: str = "") -> Prediction:
    match, depth, is_known = law_of(catalog, row), row.setup.depth, row.setup.series in catalog.laws
    if not status and is_known:
        status = "fitted" if depth <= match.law.longest else "further length"
    error = catalog.length_error if is_known else max(catalog.length_error, catalog.model_error)
    constant = match.law.model_copy(update={"decay": 1.0}).length(depth)
    return Prediction(
        replace(row, labels={**row.labels, "row": status or "not in the catalog"}, trivial={LENGTH: constant}),
        {LENGTH: match.law.length(depth)},
        intervals={LENGTH: (exp(-error), exp(error))} if error else {},
        details={"nearest": () if is_known else match.names},
    )

"""A sweep as a document: a row for each combination of the varied values."""

__all__ = ["sweep_view"]

from perfmodel.planning.metrics import metric_of
from perfmodel.planning.sweeps.sweep import SweepResult
from perfmodel.report.document import Document, Notes, Table
from perfmodel.report.numbers import format_metric


def sweep_view(result: SweepResult) -> Document:
    """Values by path, then the metrics; why points have none."""
    metrics = [metric_of(name) for name in result.metrics]
    rows = [
        (*map(str, values), *(format_metric(metric, record.values.get(metric.key)) for metric in metrics))
        for values, record in zip(result.values, result.records, strict=True)
    ]
    problems = dict.fromkeys(record.problem for record in result.records if record.problem)
    table = Table((*result.paths, *(metric.title for metric in metrics)), rows, left=0)
    return Document("", [table, Notes(list(problems))])

"""The page of all metrics: the registry that tables, studies, what-ifs and plans take their names from."""

__all__ = ["metrics_page"]

from docs_site.tables import as_code, in_cell, table
from perfmodel.planning import metrics

_BASES = {
    "run": "Of a run: `simulate`, `execute`, `plan`.",
    "step": "Of one step: `explain`, `roofline`; `step.batch` and `step.context` say which.",
    "operator": "Of one operator of a step.",
    "kernel": "Of one kernel, in published figures.",
    "memory": "Of the memory plan: `memory`.",
    "summary": "In the answers of runs, their pools and classes; not to be asked for by name.",
    "plan": "In a plan's finalists; not to be asked for by name.",
}
_HEADER = ("key", "name", "unit", "better", "digits")


def metrics_page() -> str:
    """What the page has below its introduction."""
    text = ""
    for basis, listed in metrics.metrics_by_basis().items():
        rows = [_row(item) for item in listed]
        text += f"## {basis.capitalize()}\n\n{_BASES[basis]}\n\n{table(_HEADER, rows)}\n"
    aliases = [(as_code(alias), as_code(key)) for alias, key in sorted(metrics.ALIASES.items())]
    latencies = [(in_cell(label), in_cell(text)) for label, text in metrics.LATENCIES.values()]
    text += "## Latencies\n\n" + table(("name", "what it is"), latencies)
    text += "\n## Other names\n\nAlso understood:\n\n" + table(("name", "key"), aliases)
    return text


def _row(metric: metrics.Metric) -> tuple[str, str, str, str, str]:
    better = "" if metric.is_neutral else "lower" if metric.is_better_low else "higher"
    return as_code(metric.key), in_cell(metric.name), metric.unit, better, str(metric.digits)

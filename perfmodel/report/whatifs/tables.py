"""What-ifs as rows of text: what each varied value does to a metric; all values of an axis; a grid."""

__all__ = ["path_words", "place_words", "value_words", "whatif_tables", "x_words"]

from collections.abc import Iterator

from perfmodel.plan.sensitivity.vary import Axis
from perfmodel.plan.sensitivity.whatif import Sensitivity, WhatIfAnswers
from perfmodel.plan.sweeps.points import Record
from perfmodel.report.drawing.chart_axes import short_number
from perfmodel.report.drawing.metric_labels import capital, metric_label, metric_unit
from perfmodel.report.studies.tables import StudyTable

_MISSING = "–"
_WORDS = {
    "peak_flops": "peak FLOPs",
    "bandwidth": "bandwidth",
    "capacity": "capacity",
    "power_cap_w": "power cap in W",
    "kernels": "kernel overheads",
    "host": "host time",
    "rate": "arrival rate",
    "concurrency": "concurrency",
}
_OF_NETWORKS = {"bandwidth_bytes_per_s": "network bandwidth", "latency_s": "network latency"}
_NAMES = {"hbm": "HBM", "nvlink": "NVLink", "pcie": "PCIe", "infinity_fabric": "Infinity Fabric", "ici": "ICI"}


def path_words(path: str) -> str:
    """`HBM bandwidth` for hardware.hbm.bandwidth; paths that have no words stay as they are."""
    parts = path.split(".")
    if parts[:2] == ["cluster", "network"] and parts[-1] in _OF_NETWORKS:
        return _OF_NETWORKS[parts[-1]]
    if parts[:2] == ["cluster", "pools"] and "hardware" in parts:
        return f"{path_words('.'.join(parts[3:]))} of pool {parts[2]}"
    if path == "cluster.kv_transfer.bandwidth_bytes_per_s":
        return "KV link bandwidth"
    word = _WORDS.get(parts[-1])
    if word is None or parts[0] not in ("hardware", "overheads", "traffic"):
        return path
    owner = _NAMES.get(parts[-2], "")
    return f"{owner} {word}" if owner else word if len(parts) == 2 or parts[0] == "traffic" else path


def x_words(x: float, unit: str) -> str:
    """A value on an axis with its unit."""
    return f"{short_number(x)}x" if unit == "x" else f"{short_number(x)} {unit}".strip()


def place_words(path: str, x: float, unit: str) -> str:
    """A place on an axis in a sentence: `6 req/s`, `1.3x the HBM bandwidth`, `batch 148`."""
    if path == "step.batch":
        return f"batch {short_number(x)}"
    if path == "traffic.arrivals.rate" and not unit:
        return f"{short_number(x)} req/s"
    return f"{x_words(x, unit)} the {path_words(path)}" if unit == "x" else f"{path_words(path)} {x_words(x, unit)}"


def value_words(value: float | None) -> str:
    """A metric's value, or a dash."""
    return _MISSING if value is None else short_number(value)


def whatif_tables(answers: WhatIfAnswers) -> Iterator[StudyTable]:
    """Sensitivities by metric; then each axis of more than three values, or of words; then the grid."""
    for metric in answers.question.base.metrics:
        yield _sensitivities(answers, metric)
    for axis in answers.question.axes:
        if len(axis.texts) > 3 or not axis.xs or answers.others:
            yield _values(answers, axis)
    if answers.grid:
        for metric in answers.question.base.metrics:
            yield _grid(answers, metric)


def _sensitivities(answers: WhatIfAnswers, metric: str) -> StudyTable:
    rows = [_sensitivity(each) for each in answers.of_metric(metric) if each.axis.xs]
    title = f"{_title(metric)}: {value_words(answers.base.values.get(metric))} as it is"
    return StudyTable(title, ["varied", "from", "gives", "to", "gives", "elasticity"], rows, 1)


def _sensitivity(each: Sensitivity) -> list[str]:
    axis = each.axis
    low, high = (x_words(x, axis.unit) for x in (axis.xs[0], axis.xs[-1]))
    elasticity = _MISSING if each.elasticity is None else f"{each.elasticity:+.2f}"
    elasticity = "0.00" if elasticity in ("+0.00", "-0.00") else elasticity
    return [path_words(axis.path), low, value_words(each.low), high, value_words(each.high), elasticity]


def _values(answers: WhatIfAnswers, axis: Axis) -> StudyTable:
    metrics = answers.question.base.metrics
    head = [path_words(axis.path), *(_title(metric) for metric in metrics)]
    rows = [
        [text, *_cells(record, metrics)] for text, record in zip(axis.texts, answers.by_axis[axis.path], strict=True)
    ]
    if axis.path in answers.others:
        head += [f"{_title(metric)}, alternative" for metric in metrics]
        for row, record in zip(rows, answers.others[axis.path], strict=True):
            row += _cells(record, metrics)
    return StudyTable(f"Along {path_words(axis.path)}", head, rows, 1)


def _grid(answers: WhatIfAnswers, metric: str) -> StudyTable:
    down, across = answers.question.axes
    rows = [
        [text, *(value_words(answers.grid[one, other].values.get(metric)) for other in across.overrides)]
        for text, one in zip(down.texts, down.overrides, strict=True)
    ]
    head = [f"{path_words(down.path)} \\ {path_words(across.path)}", *across.texts]
    return StudyTable(_title(metric), head, rows, 1)


def _cells(record: Record, metrics: tuple[str, ...]) -> list[str]:
    return [value_words(record.values.get(metric)) for metric in metrics]


def _title(metric: str) -> str:
    unit = metric_unit(metric)
    return capital(metric_label(metric)) + (f", {unit}" if unit else "")

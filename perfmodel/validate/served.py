"""`validate mlperf` and `validate served`: published results of servers and offline jobs beside predictions.

Each device counts once (`pooled`).
"""

__all__ = ["report_served", "validate_mlperf", "validate_served"]

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path

import numpy as np

from perfmodel.calibrate.served.mlperf import read_mlperf_rows
from perfmodel.calibrate.served.predictions import ServedPair, predict_served
from perfmodel.calibrate.served.setups import ServedRow
from perfmodel.calibrate.served.tables import devices_folder, read_served_rows
from perfmodel.cost.calibrations.provenance import Provenance, provenance_of
from perfmodel.trust.setups import setup_of
from perfmodel.validate.pooled import Read, SettingFigure, pooled_report
from perfmodel.validate.report import ValidationReport

Progress = Callable[[int, int], None]
_ABOUT = {
    "mlperf": (
        "Results of MLPerf Inference's closed division. Offline: tokens per second of a saturated engine. Server and "
        "Interactive: TTFT and TPOT at the rate at which the submission just keeps its limits, which is taken to be "
        "near its own capacity. Lengths are the data sets'; over how many devices an instance is spread, and how many "
        "samples run together, results do not say: the layout that serves most within the limits is taken."
    ),
    "served": (
        "Published results of servers, offline jobs and static batches, each simulated as its table describes it. "
        "Where a table has medians for means, they stand for them."
    ),
}
_POOLED = (
    " Errors are of devices: a device's is the median over its groups (rows of one setting), a group's is the "
    "prediction against the median of its figures. Rows whose flags say that they repeat another or contradict "
    "themselves are listed apart."
)


def validate_mlperf(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Predict every result and compare; rows that cannot be predicted are listed with the reason.

    Raises SpecError for a file that is no table of such results.
    """
    return _validated("mlperf", read_mlperf_rows(path), Path(path), progress)


def validate_served(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Likewise, of a table of published serving results."""
    return _validated("served", read_served_rows(path), Path(path), progress)


def _validated(
    kind: str, read: tuple[list[ServedRow], list[tuple[str, str]]], path: Path, progress: Progress | None
) -> ValidationReport:
    rows, left_out = read
    return report_served(kind, predict_served(rows, devices_folder(path), progress), left_out)


def report_served(kind: str, pairs: Sequence[ServedPair], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """The comparison of `pairs`, pooled over devices.

    kind: mlperf or served; left_out: (row, reason) of those that could not be read
    """
    covered = [pair for pair in pairs if not pair.reason]
    reasons = [*left_out, *((pair.row.row_id, pair.reason) for pair in pairs if pair.reason)]
    return pooled_report(
        kind,
        Read(len(pairs) + len(left_out), len(covered), reasons),
        _figures([pair for pair in covered if not pair.row.is_apart]),
        _figures([pair for pair in covered if pair.row.is_apart]),
        elsewhere="elsewhere",
        apart_because="that they repeat another or contradict themselves",
        provenance=_provenance(covered),
        about=_ABOUT[kind] + _POOLED,
    )


def _figures(pairs: Sequence[ServedPair]) -> list[SettingFigure]:
    """Figures of one setting on one device as one, by metric."""
    found: dict[tuple[str, str, str], list[ServedPair]] = defaultdict(list)
    for pair in pairs:
        for metric in pair.row.measured:
            if isfinite(pair.predicted.get(metric, float("nan"))):
                found[pair.row.labels["device"], pair.row.group, metric].append(pair)
    return [
        SettingFigure(
            metric,
            mine[0].row.row_id,
            device,
            _setting(mine[0].row),
            mine[0].row.labels,
            float(np.median([pair.predicted[metric] for pair in mine])),
            float(np.median([pair.row.measured[metric] for pair in mine])),
            mine[0].intervals.get(metric, (float("nan"), float("nan"))),
            tuple(pair.row.measured[metric] for pair in mine),
            setup_of(scenario),
        )
        for (device, _, metric), mine in found.items()
        if (scenario := mine[0].scenario) is not None
    ]


def _setting(row: ServedRow) -> str:
    """What ran on what, in a line."""
    setup = row.setup
    what = f"{setup.model} {setup.precision} on {setup.num_devices} x {setup.device}"
    return f"{what}, {setup.engine} {setup.version}, {row.labels['scenario']}"


def _provenance(pairs: Sequence[ServedPair]) -> Provenance:
    return provenance_of([pair.scenario for pair in pairs if pair.scenario is not None])

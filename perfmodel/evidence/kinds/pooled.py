"""`validate mlperf` and `validate served`: published results of servers and offline jobs beside predictions.

Each device counts once (`pooled`).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path

import numpy as np

from perfmodel.cost.calibrations.backends import load_backends
from perfmodel.cost.calibrations.provenance import FittedSource, Provenance, provenance_of
from perfmodel.evidence.predict.local import LocalPair, predict_rows
from perfmodel.evidence.predict.served import ServedPair, predict_served
from perfmodel.evidence.report import Read, SettingFigure, ValidationReport, pooled_report
from perfmodel.evidence.sources.local import LocalRow, read_local_rows
from perfmodel.evidence.sources.results import devices_folder, read_mlperf_rows, read_served_rows
from perfmodel.evidence.sources.setups import ServedRow
from perfmodel.trust.index import setup_of

Progress = Callable[[int, int], None]
_ABOUT_served = {
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
        _figures_served([pair for pair in covered if not pair.row.is_apart]),
        _figures_served([pair for pair in covered if pair.row.is_apart]),
        elsewhere="elsewhere",
        apart_because="that they repeat another or contradict themselves",
        provenance=_provenance_served(covered),
        about=_ABOUT_served[kind] + _POOLED,
    )


def _figures_served(pairs: Sequence[ServedPair]) -> list[SettingFigure]:
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
            _setting_served(mine[0].row),
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


def _setting_served(row: ServedRow) -> str:
    """What ran on what, in a line."""
    setup = row.setup
    what = f"{setup.model} {setup.precision} on {setup.num_devices} x {setup.device}"
    return f"{what}, {setup.engine} {setup.version}, {row.labels['scenario']}"


def _provenance_served(pairs: Sequence[ServedPair]) -> Provenance:
    return provenance_of([pair.scenario for pair in pairs if pair.scenario is not None])


_METRICS = {"tg": "decode_tokens_per_s", "pp": "prompt_tokens_per_s"}
_DIMENSIONS: dict[str, Callable[[LocalRow], str]] = {
    "device": lambda row: row.device,
    "device class": lambda row: row.device_class,
    "backend": lambda row: row.backend,
    "model": lambda row: row.model,
    "gguf type": lambda row: row.gguf_type,
    "test": lambda row: row.test,
    "engine": lambda row: row.tool or "not said",
}
_ABOUT_local = (
    "Tokens per second of llama.cpp (llama-bench, llama-server, Ollama, LocalScore) and MLX on single machines, each "
    "figure as the steps that it took. Errors are of devices: a device's is the median over its groups (rows of one "
    "setting), a group's is the prediction against the median of its figures. Rows whose flags say that the host was "
    "at fault (slow, anomalous, weak host, power limit, patched kernels, RPC) are listed apart. Figures of the same "
    "table may have been fitted to; `benchmarks/cross_validate_local.py` leaves out whole devices and whole models."
)


def validate_local(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Price every row and compare; rows that cannot be priced are listed with the reason.

    Raises SpecError for a file that is no table of such figures.
    """
    rows, left_out = read_local_rows(path)
    return report_local(predict_rows(rows, Path(path).parent, progress), left_out)


def report_local(pairs: Sequence[LocalPair], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """The comparison of `pairs`, pooled over devices; left_out: (row, reason) of those that could not be read."""
    covered = [pair for pair in pairs if not pair.reason]
    reasons = [*left_out, *((pair.row.row_id, pair.reason) for pair in pairs if pair.reason)]
    flags = sorted({pair.row.flags for pair in covered if pair.row.is_apart})
    return pooled_report(
        "local",
        Read(len(pairs) + len(left_out), len(covered), reasons),
        _figures_local([pair for pair in covered if not pair.row.is_apart]),
        _figures_local([pair for pair in covered if pair.row.is_apart]),
        elsewhere="on other hosts",
        apart_because=f"that the host was at fault: {'; '.join(flags)}",
        provenance=_provenance_local(covered),
        about=_ABOUT_local,
    )


def _figures_local(pairs: Sequence[LocalPair]) -> list[SettingFigure]:
    """Rows of one setting on one device as one."""
    found: dict[tuple[str, str, str], list[LocalPair]] = defaultdict(list)
    for pair in pairs:
        if pair.row.test in _METRICS:
            found[pair.row.device, pair.row.group, pair.row.test].append(pair)
    return [
        SettingFigure(
            _METRICS[mine[0].row.test],
            mine[0].row.row_id,
            mine[0].row.device,
            _setting_local(mine[0].row),
            {name: of(mine[0].row) for name, of in _DIMENSIONS.items()},
            float(np.median([pair.predicted for pair in mine])),
            float(np.median([pair.row.tokens_per_s for pair in mine])),
            mine[0].interval,
            tuple(pair.row.tokens_per_s for pair in mine),
            setup_of(scenario)._replace(input_tokens=0.0, output_tokens=0.0),  # a test has steps and no requests
        )
        for mine in found.values()
        if (scenario := mine[0].scenario) is not None
    ]


def _setting_local(row: LocalRow) -> str:
    """What ran on what, in a line."""
    return f"{row.model} {row.gguf_type} on {row.device}, {row.backend}, {row.tool or 'tool not said'}"


def _provenance_local(pairs: Sequence[LocalPair]) -> Provenance:
    """The files of the engines' backends that predictions came from."""
    engines = {pair.scenario.engine.described.description.name for pair in pairs if pair.scenario is not None}
    fits = [found for engine in sorted(engines) if (found := load_backends(engine)) is not None]
    return Provenance(tuple(FittedSource.of(fit) for fit in fits))

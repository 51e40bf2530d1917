"""`validate operators`: every row of measured kernel tables beside its prediction under the device's calibration."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import Calibration, load_calibration
from perfmodel.cost.calibrations.provenance import FittedSource, Provenance
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.breakdown import kernel_sizes, row_breakdown
from perfmodel.evidence.fit.kernels import KernelModule
from perfmodel.evidence.fit.systems import module_of
from perfmodel.evidence.report import (
    NOT_APPLICABLE,
    Comparison,
    Dimension,
    Rows,
    ValidationReport,
    by_dimension,
    joined,
    pooled,
    worst_of,
)
from perfmodel.evidence.sources.kernels import Group, KernelTable, op_of, read_table, table_files, understood
from perfmodel.specs import HardwareSpec, load_hardware

Progress = Callable[[int, int], None]
Floats = NDArray[np.float64]
_METRIC = "latency"
_ANY_ENGINE = "vllm"  # whose calibration holds the libraries that all engines call


@dataclass(frozen=True)
class _Judged:
    """The rows of one kernel: predicted and measured seconds, and the ends of the 80 % interval as factors."""

    system: str
    op: str
    group: Group
    predicted: Floats
    low: float
    high: float
    fit: Any
    is_own: bool  # whether the fit is this kernel's, not a relative's
    device: DeviceFacts
    calibration: Calibration

    @property
    def dimensions(self) -> dict[str, Dimension]:
        """What the rows are grouped by."""
        family, *formats = self.group.key.split("/")
        constants = {
            "device": self.device.hardware.name,
            "engine": self.group.engine,
            "kernel": family,
            "format": formats[0] if formats else NOT_APPLICABLE,
            "table": f"{self.op} {self.group.engine} {self.group.key}",
        }
        count = len(self.predicted)
        return {name: Dimension.constant(value, count) for name, value in constants.items()} | kernel_sizes(
            self.group.sizes
        )

    @property
    def labels(self) -> list[str]:
        head = f"{self.system}/{self.op} {self.group.engine} {self.group.key} row"
        return [f"{head} {row}" for row in self.group.rows.tolist()]


def validate_operators(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Predict every row of the tables `<system>/<op>`; rows of kernels without a form are listed with the reason.

    Raises SpecError for a folder without tables, or without any row that could be predicted.
    """
    files = table_files(path)
    if not files:
        raise SpecError(f"{path}: has no tables <system>/<op>.parquet, .csv or .csv.gz.")
    judged: list[_Judged] = []
    notes: list[str] = []
    num_rows = 0
    for done, file in enumerate(files, 1):
        table_rows, result, reasons = _judge(file)
        num_rows += table_rows
        judged += result
        notes += reasons
        if progress is not None:
            progress(done, len(files))
    if not judged:
        raise SpecError(f"{path}: no row could be predicted; {notes[0] if notes else 'no known kernels'}")
    comparison = _comparison(judged)
    by = {name: {"latency": _rows(members).stats()} for name, members in _grouped(judged)}
    return ValidationReport(
        kind="operators",
        rows=num_rows,
        covered=sum(len(member.group.rows) for member in judged),
        metrics=pooled([comparison]),
        by=by | by_dimension([comparison]),
        worst=worst_of([comparison], 10, partial(_breakdown, judged)),
        notes=notes,
        comparisons=[comparison],
        provenance=Provenance(tuple(sorted({FittedSource.of(member.calibration) for member in judged}))),
        about=_about(judged),
    )


def _comparison(judged: list[_Judged]) -> Comparison:
    parts = [member.dimensions for member in judged]
    dimensions = {name: joined([part[name] for part in parts]) for name in parts[0]}
    return Comparison.of(_METRIC, _rows(judged), "s", dimensions)


def _breakdown(judged: list[_Judged], comparison: Comparison, number: int) -> dict[str, Any]:
    """Parts of one row, counted as in `_rows`."""
    given = int(np.flatnonzero(comparison.rows.kept)[number])
    for member in judged:
        if given < len(member.predicted):
            return row_breakdown(member.group, given, member.fit, member.device, float(member.predicted[given]))
        given -= len(member.predicted)
    raise IndexError(number)


def _about(judged: list[_Judged]) -> str:
    own, related = (sum(len(m.predicted) for m in judged if m.is_own is kind) for kind in (True, False))
    return (
        f"Measured times of single kernels (`latency_ms`, one GPU, mostly replayed from CUDA graphs with warm "
        f"caches) beside the physical form of each kernel under its device's calibration, timed as the tables "
        f"were. {own:,} rows are of kernels with a fit of their own: where these are the tables that the "
        f"sources below count, they are training data, and their errors say how well a dozen parameters "
        f"describe a kernel's shapes, not how well an unseen device is predicted. {related:,} rows are "
        f"predicted by the fit of a related kernel or device and are no training data."
    )


def _judge(file: Path) -> tuple[int, list[_Judged], list[str]]:
    """(rows of the table, what could be judged, why the rest could not)."""
    name = f"{file.parent.name}/{op_of(file)}"
    table = read_table(file)
    module = module_of(op_of(file))
    if module is None:
        return len(table), [], [f"not covered: {name}: {len(table)} rows of a kernel without a form"]
    try:
        hardware = load_hardware(file.parent.name)
    except PerfmodelError as error:
        return len(table), [], [f"not covered: {name}: {error}"]
    try:
        with understood(file):
            judged, reasons = _judge_groups(file, module, table, hardware)
    except SpecError as error:
        return len(table), [], [f"not covered: {name}: {error}"]
    return len(table), judged, reasons


def _judge_groups(
    file: Path, module: KernelModule, table: KernelTable, hardware: HardwareSpec
) -> tuple[list[_Judged], list[str]]:
    """(what could be judged, why the rest could not)."""
    name, device = f"{file.parent.name}/{op_of(file)}", DeviceFacts.of(hardware)
    judged, reasons = [], []
    groups = module.groups(table, device)
    for group in groups:
        calibration = load_calibration(hardware, _ANY_ENGINE if group.engine == "nccl" else group.engine)
        fit = _fit_for(group, calibration)
        if fit is None:
            reasons.append(f"not covered: {name}: {len(group.rows)} rows of {group.key}: no fit in the calibrations")
            continue
        judged.append(_judged(file, module, group, fit, device, calibration))
    known = sum(len(group.rows) for group in groups)
    if known < len(table):
        reasons.append(f"not covered: {name}: {len(table) - known} rows of a format or kernel without a form")
    return judged, reasons


def _fit_for(group: Group, calibration: Calibration) -> Any:
    """The kernel's own fit, else that of the key of the same family with the most parts in common."""
    own = calibration.families.get(group.key)
    if own is not None:
        return own
    parts = group.key.split("/")

    def in_common(key: str) -> int:
        return sum(1 for a, b in zip(parts, key.split("/"), strict=False) if a == b)

    related = [key for key in calibration.families if key.split("/")[0] == parts[0]]
    return calibration.families[max(related, key=in_common)] if related else None


def _judged(
    file: Path, module: KernelModule, group: Group, fit: Any, device: DeviceFacts, calibration: Calibration
) -> _Judged:
    residuals, spread = fit.residuals, calibration.spread
    return _Judged(
        system=file.parent.name,
        op=op_of(file),
        group=group,
        predicted=module.predict(group, fit, device),
        low=float(np.exp(residuals.p10 * spread)),
        high=float(np.exp(residuals.p90 * spread)),
        fit=fit,
        is_own=group.key in calibration.families and not calibration.is_passed_on,
        device=device,
        calibration=calibration,
    )


def _rows(members: list[_Judged]) -> Rows:
    sizes = [len(member.predicted) for member in members]
    return Rows(
        np.concatenate([member.predicted for member in members]),
        np.concatenate([member.group.seconds for member in members]),
        [label for member in members for label in member.labels],
        (np.repeat([m.low for m in members], sizes), np.repeat([m.high for m in members], sizes)),
    )


def _grouped(judged: list[_Judged]) -> Iterator[tuple[str, list[_Judged]]]:
    """Rows grouped by `<system>/<op>`, then by kernel."""
    for names in (
        [f"{member.system}/{member.op}" for member in judged],
        [f"{member.system}/{member.op} {member.group.engine} {member.group.key}" for member in judged],
    ):
        for name in sorted(set(names)):
            yield name, [member for member, its_name in zip(judged, names, strict=True) if its_name == name]

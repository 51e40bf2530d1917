"""`validate operators`: every row of measured kernel tables vs. its prediction under the device's calibration."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import Calibration, load_calibration
from perfmodel.cost.calibrations.provenance import FittedSource, Provenance
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.breakdown import kernel_sizes, row_breakdown
from perfmodel.evidence.fit.kernels import predict, timed
from perfmodel.evidence.fit.systems import MODULES
from perfmodel.evidence.observation import Progress
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
from perfmodel.evidence.sources.kernels import Group, op_of, read_table, table_files, understood
from perfmodel.specs import load_hardware

_ANY_ENGINE = "vllm"  # whose calibration holds the libraries that all engines call


@dataclass(frozen=True)
class _Kernel:
    """One kernel's rows in `<system>/<op>` and their predictions. roofline: what the declared peaks alone give; ends:
    80 % interval as factors; is_own: the fit is this kernel's, not a related one's"""

    table: str
    group: Group
    predicted: NDArray[np.float64]
    roofline: NDArray[np.float64]
    ends: tuple[float, float]
    fit: Any
    is_own: bool
    device: DeviceFacts
    calibration: Calibration

    @property
    def name(self) -> str:
        return f"{self.group.engine} {self.group.key}"

    @property
    def dimensions(self) -> dict[str, Dimension]:
        """Groups of the rows."""
        family, *formats = self.group.key.split("/")
        constants = {
            "device": self.device.hardware.name,
            "engine": self.group.engine,
            "kernel": family,
            "format": formats[0] if formats else NOT_APPLICABLE,
            "table": f"{self.table.partition('/')[2]} {self.name}",
        }
        count = len(self.predicted)
        sizes = kernel_sizes(self.group.sizes)
        return {name: Dimension.constant(value, count) for name, value in constants.items()} | sizes


def validate_operators(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Predict every row of the tables `<system>/<op>`; kernels without a model are listed with the reason. Raises
    SpecError for a folder without tables or predictable rows."""
    files = table_files(path)
    if not files:
        raise SpecError(f"{path}: has no tables <system>/<op>.parquet, .csv or .csv.gz.")
    kernels: list[_Kernel] = []
    notes: list[str] = []
    num_rows = 0
    for done, file in enumerate(files, 1):
        count, predicted, reasons = _predicted(file)
        num_rows += count
        kernels += predicted
        notes += (f"not covered: {file.parent.name}/{op_of(file)}: {reason}" for reason in reasons)
        if progress is not None:
            progress(done, len(files))
    if not kernels:
        raise SpecError(f"{path}: no row could be predicted; {notes[0] if notes else 'no known kernels'}")
    parts = [kernel.dimensions for kernel in kernels]
    dimensions = {name: joined([part[name] for part in parts]) for name in parts[0]}
    comparison = Comparison.of("latency", _rows(kernels), "s", dimensions)
    groups: tuple[defaultdict[str, list[_Kernel]], ...] = (defaultdict(list), defaultdict(list))
    for kernel in kernels:
        groups[0][kernel.table].append(kernel)
        groups[1][f"{kernel.table} {kernel.name}"].append(kernel)
    by = {name: {"latency": _rows(members).stats()} for group in groups for name, members in sorted(group.items())}
    return ValidationReport(
        kind="operators",
        rows=num_rows,
        covered=sum(len(kernel.group.rows) for kernel in kernels),
        metrics=pooled([comparison]),
        by=by | by_dimension([comparison]),
        worst=worst_of([comparison], 10, partial(_breakdown, kernels)),
        notes=notes,
        comparisons=[comparison],
        provenance=Provenance(tuple(sorted({FittedSource.of(kernel.calibration) for kernel in kernels}))),
        about=_about(kernels),
    )


def _breakdown(kernels: Sequence[_Kernel], comparison: Comparison, number: int) -> dict[str, Any]:
    place = int(np.flatnonzero(comparison.rows.kept)[number])
    ends = np.cumsum([len(kernel.predicted) for kernel in kernels])
    which = int(np.searchsorted(ends, place, side="right"))
    kernel = kernels[which]
    row = place - int(ends[which]) + len(kernel.predicted)
    return row_breakdown(kernel.group, row, kernel.fit, kernel.device, float(kernel.predicted[row]))


def _about(kernels: Sequence[_Kernel]) -> str:
    own, related = (sum(len(k.predicted) for k in kernels if k.is_own is is_own) for is_own in (True, False))
    return (
        f"Measured times of single kernels (`latency_ms`, one GPU, mostly replayed from CUDA graphs with warm "
        f"caches) beside the physical form of each kernel under its device's calibration, timed as the tables "
        f"were. {own:,} rows are of kernels with a fit of their own: where these are the tables that the "
        f"sources below count, they are training data, and their errors say how well a dozen parameters "
        f"describe a kernel's shapes, not how well an unseen device is predicted. {related:,} rows are "
        f"predicted by the fit of a related kernel or device and are no training data."
    )


def _predicted(file: Path) -> tuple[int, list[_Kernel], list[str]]:
    """(rows of the table, predicted kernels, reasons for the others)"""
    table, module = read_table(file), MODULES.get(op_of(file))
    if module is None:
        return len(table), [], [f"{len(table)} rows of a kernel without a form"]
    kernels: list[_Kernel] = []
    reasons: list[str] = []
    try:
        hardware = load_hardware(file.parent.name)
        device = DeviceFacts.of(hardware)
        with understood(file):
            groups = module.groups(table, device)
            for group in groups:
                calibration = load_calibration(hardware, _ANY_ENGINE if group.engine == "nccl" else group.engine)
                fit = _fit_for(group, calibration)
                if fit is None:
                    reasons.append(f"{len(group.rows)} rows of {group.key}: no fit in the calibrations")
                    continue
                tails = np.array([fit.residuals.p10, fit.residuals.p90]) * calibration.spread
                low, high = np.exp(tails).tolist()
                is_own = group.key in calibration.families and not calibration.is_passed_on
                name, seconds = f"{file.parent.name}/{op_of(file)}", predict(group, fit, device)
                roofline = _roofline(group, fit, device)
                kernels.append(_Kernel(name, group, seconds, roofline, (low, high), fit, is_own, device, calibration))
    except PerfmodelError as error:
        return len(table), [], [str(error)]
    known = sum(len(group.rows) for group in groups)
    if known < len(table):
        reasons.append(f"{len(table) - known} rows of a format or kernel without a form")
    return len(table), kernels, reasons


def _fit_for(group: Group, calibration: Calibration) -> Any:
    """The kernel's own fit, else that of its family's key with the most parts in common."""
    if group.key in calibration.families:
        return calibration.families[group.key]
    parts = group.key.split("/")

    def in_common(key: str) -> int:
        return sum(1 for a, b in zip(parts, key.split("/"), strict=False) if a == b)

    related = [key for key in calibration.families if key.split("/")[0] == parts[0]]
    return calibration.families[max(related, key=in_common)] if related else None


def _roofline(group: Group, fit: Any, device: DeviceFacts) -> NDArray[np.float64]:
    """Seconds of each row at the declared peaks: the longer of compute and memory, or the wire; nan for modules that
    were measured as a whole."""
    fractions = {name: 1.0 for name in type(fit).model_fields if name.endswith("_fraction")}
    parts = timed(group.sizes, fit.model_copy(update=fractions), device)
    if hasattr(parts, "wire"):
        return np.asarray(parts.wire, dtype=float)
    if hasattr(parts, "compute"):
        return np.maximum(np.ravel(parts.compute), np.ravel(parts.memory))
    return np.full(len(group.seconds), np.nan)


def _rows(kernels: Sequence[_Kernel]) -> Rows:
    sizes = [len(kernel.predicted) for kernel in kernels]
    low, high = (np.repeat([kernel.ends[end] for kernel in kernels], sizes) for end in (0, 1))
    return Rows(
        np.concatenate([kernel.predicted for kernel in kernels]),
        np.concatenate([kernel.group.seconds for kernel in kernels]),
        [f"{kernel.table} {kernel.name} row {row}" for kernel in kernels for row in kernel.group.rows.tolist()],
        (low, high),
        np.concatenate([kernel.roofline for kernel in kernels]),
    )

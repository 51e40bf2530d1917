"""`validate operators`: every row of measured kernel tables vs. its prediction under the device's calibration."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import Calibration, load_calibration
from perfmodel.cost.calibrations.files import with_others
from perfmodel.cost.calibrations.provenance import FittedSource, Provenance
from perfmodel.cost.kernel_models.module import ModuleSizes
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence import report
from perfmodel.evidence.breakdown import kernel_sizes, row_breakdown
from perfmodel.evidence.fit.kernels import predict, timed
from perfmodel.evidence.fit.systems import MODULES, bare_key, groups_of, key_of
from perfmodel.evidence.observation import Progress, reported
from perfmodel.evidence.sources.kernels import Group, KernelTable, op_of, read_table, table_files
from perfmodel.specs import load_hardware

_ANY_ENGINE = "vllm"  # whose calibration holds the libraries that all engines call
_SAMPLED = 200  # rows of each kernel, version and format of a table


@dataclass(frozen=True)
class PredictedKernel:
    """One kernel's rows in `<system>/<op>` and their predictions. roofline: what the declared peaks alone give; ends:
    80 % interval as factors; is_own: the fit is this kernel's, not a related one's"""

    table: str
    group: Group
    predicted: NDArray[np.float64]
    roofline: NDArray[np.float64]
    ends: tuple[float, float]
    fit: Any
    is_own: bool
    calibration: Calibration

    @classmethod
    def of(
        cls, table: KernelTable, group: Group, fit: Any, calibration: Calibration, is_own: bool = False
    ) -> "PredictedKernel":
        """The rows of `group` in `table` under `fit`; intervals are as much wider as those of `calibration`.
        is_own: whether the fit is of this kernel"""
        tails = np.array([fit.residuals.p10, fit.residuals.p90]) * calibration.spread
        low, high = np.exp(tails).tolist()
        name, seconds = f"{table.system}/{table.op}", predict(group, fit)
        return cls(name, group, seconds, _roofline(group, fit), (low, high), fit, is_own, calibration)

    @property
    def name(self) -> str:
        return f"{self.group.engine} {self.group.key}"

    @property
    def dimensions(self) -> dict[str, report.Dimension]:
        """Groups of the rows."""
        family, *formats = self.group.key.split("/")
        constants = {
            "device": self.group.device.hardware.name,
            "engine": self.group.engine,
            "kernel": family,
            "device and kernel": f"{self.group.device.hardware.name} {family}",
            "format": formats[0] if formats else report.NOT_APPLICABLE,
            "table": f"{self.table.partition('/')[2]} {self.name}",
        }
        count = len(self.predicted)
        sizes = kernel_sizes(self.group.sizes)
        return {name: report.Dimension.constant(value, count) for name, value in constants.items()} | sizes


def validate_operators(
    path: str | Path, progress: Progress | None = None, is_full: bool = False
) -> report.ValidationReport:
    """Predict the rows of the tables `<system>/<op>`, or a sample; kernels without a model are listed with the reason.
    is_full: all rows. Raises SpecError for a folder without tables or predictable rows."""
    files = table_files(path)
    if not files:
        raise SpecError(f"{path}: has no tables <system>/<op>.parquet, .csv or .csv.gz.")
    kernels: list[PredictedKernel] = []
    notes: list[str] = []
    num_rows = num_sampled = 0
    for file in reported(files, len(files), progress):
        try:
            table = read_table(file)
        except SpecError as error:
            notes.append(f"not covered: {error}")
            continue
        if table.untimed:
            notes.append(f"{file.parent.name}/{op_of(file)}: {table.untimed:,} rows carry no time")
        sample = table if is_full else table.sampled(_SAMPLED)
        predicted, reasons = _predicted(sample, file)
        num_rows, num_sampled = num_rows + len(table), num_sampled + len(sample)
        kernels += predicted
        notes += (f"not covered: {file.parent.name}/{op_of(file)}: {reason}" for reason in reasons)
    if not kernels:
        raise SpecError(f"{path}: no row could be predicted; {notes[0] if notes else 'no known kernels'}")
    if num_sampled < num_rows:
        notes.insert(0, f"a sample of {num_sampled:,} of {num_rows:,} rows, always the same; --full compares all")
    return report_kernels(kernels, num_sampled, notes, _about(kernels))


def report_kernels(
    kernels: Sequence[PredictedKernel], num_rows: int, notes: Sequence[str], about: str
) -> report.ValidationReport:
    """The report of predicted kernels. num_rows: of the tables, predicted or not; notes: what is not covered, and why;
    about: a paragraph on what the rows and their predictions are"""
    parts = [kernel.dimensions for kernel in kernels]
    dimensions = {name: report.joined([part[name] for part in parts]) for name in parts[0]}
    comparison = report.Comparison.of("latency", _rows(kernels), "s", dimensions)
    groups: tuple[defaultdict[str, list[PredictedKernel]], ...] = (defaultdict(list), defaultdict(list))
    for kernel in kernels:
        groups[0][kernel.table].append(kernel)
        groups[1][f"{kernel.table} {kernel.name}"].append(kernel)
    by = {name: {"latency": _rows(members).stats()} for group in groups for name, members in sorted(group.items())}
    return report.ValidationReport(
        kind="operators",
        rows=num_rows,
        covered=sum(len(kernel.group.rows) for kernel in kernels),
        metrics=report.pooled([comparison]),
        by=by | report.by_dimension([comparison]),
        worst=report.worst_of([comparison], 10, partial(_breakdown, kernels)),
        notes=list(notes),
        comparisons=[comparison],
        provenance=Provenance(tuple(sorted({FittedSource.of(kernel.calibration) for kernel in kernels}))),
        about=about,
    )


def _breakdown(kernels: Sequence[PredictedKernel], comparison: report.Comparison, number: int) -> dict[str, Any]:
    place = int(np.flatnonzero(comparison.rows.kept)[number])
    ends = np.cumsum([len(kernel.predicted) for kernel in kernels])
    which = int(np.searchsorted(ends, place, side="right"))
    kernel = kernels[which]
    row = place - int(ends[which]) + len(kernel.predicted)
    return row_breakdown(kernel.group, row, kernel.fit, kernel.group.device, float(kernel.predicted[row]))


def _about(kernels: Sequence[PredictedKernel]) -> str:
    own, related = (sum(len(k.predicted) for k in kernels if k.is_own is is_own) for is_own in (True, False))
    return (
        f"Measured times of single kernels (`latency_ms`, one GPU, mostly replayed from CUDA graphs with warm "
        f"caches) beside the physical form of each kernel under its device's calibration, timed as the tables "
        f"were. {own:,} rows are of kernels with a fit of their own: where these are the tables that the "
        f"sources below count, they are training data, and their errors say how well a dozen parameters "
        f"describe a kernel's shapes, not how well an unseen device is predicted. {related:,} rows are "
        f"predicted by the fit of a related kernel or device and are no training data."
    )


def _predicted(table: KernelTable, file: Path) -> tuple[list[PredictedKernel], list[str]]:
    """(predicted kernels, reasons for the others) of a table."""
    if table.op not in MODULES:
        return [], [f"{len(table)} rows of a kernel without a form"]
    kernels: list[PredictedKernel] = []
    reasons: list[str] = []
    try:
        groups = groups_of(table, file)
        for group in groups:
            calibration = own_calibration(table.system, group.engine)
            key = key_of(group, calibration)
            if key is None:
                reasons.append(f"{len(group.rows)} rows of {group.key}: no fit in the calibrations")
                continue
            fit = (calibration.others | calibration.families)[key]
            is_own = key in (group.key, bare_key(group.key)) or key.startswith(f"{group.key}/")
            kernels.append(PredictedKernel.of(table, group, fit, calibration, is_own and not calibration.is_passed_on))
    except PerfmodelError as error:
        return [], [str(error)]
    known = sum(len(group.rows) for group in groups)
    if known < len(table):
        reasons.append(f"{len(table) - known} rows of a format or kernel without a form")
    return kernels, reasons


@lru_cache(maxsize=64)
def own_calibration(system: str, engine: str) -> Calibration:
    """The calibration of a table's device and engine, with kernels that are not the engine's defaults."""
    hardware = load_hardware(system)
    return with_others(load_calibration(hardware, _ANY_ENGINE if engine == "nccl" else engine), hardware)


def _roofline(group: Group, fit: Any) -> NDArray[np.float64]:
    """Seconds of each row at the declared peaks: the longer of compute and memory, or the wire; nan for modules that
    were measured as a whole."""
    fractions = {name: 1.0 for name in type(fit).model_fields if name.endswith("_fraction")}
    parts = timed(group.sizes, fit.model_copy(update=fractions), group.device)
    if isinstance(group.sizes, ModuleSizes):  # overlaps of its parts are unknown
        return np.full(len(group.seconds), np.nan)
    if hasattr(parts, "wire"):
        return np.asarray(parts.wire, dtype=float)
    if hasattr(parts, "compute"):
        return np.maximum(np.ravel(parts.compute), np.ravel(parts.memory))
    return np.full(len(group.seconds), np.nan)


def _rows(kernels: Sequence[PredictedKernel]) -> report.Rows:
    sizes = [len(kernel.predicted) for kernel in kernels]
    low, high = (np.repeat([kernel.ends[end] for kernel in kernels], sizes) for end in (0, 1))
    return report.Rows(
        np.concatenate([kernel.predicted for kernel in kernels]),
        np.concatenate([kernel.group.seconds for kernel in kernels]),
        [f"{kernel.table} {kernel.name} row {row}" for kernel in kernels for row in kernel.group.rows.tolist()],
        (low, high),
        np.concatenate([kernel.roofline for kernel in kernels]),
    )

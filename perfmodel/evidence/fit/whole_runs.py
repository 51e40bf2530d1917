"""Fits a few parameters per architecture, with priors, to whole runs of vendors without kernel tables.

Fitted results depend on mean step time: offline and static batches as seconds per token, and TTFT of a lone prompt.
Each setting counts once. Undetermined parameters stay at their priors.

The energy per matrix operation at full clock comes from large products of vendors with kernel tables and their TDP: per
device and format the share of the declared peak a large product reaches. Tiles, waves and quantization leave a common
share c, power the rest:

    reached / peak = c min(1, (TDP / (peak e))^(1/3))"""

from collections.abc import Sequence
from math import log, nan
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from perfmodel.cost import OperatorTimer, Residuals, load_calibration
from perfmodel.cost.calibrations.calibration import LAUNCH_OVERHEAD_S
from perfmodel.cost.calibrations.files import calibrated_kernels
from perfmodel.cost.calibrations.whole_runs import OTHERS, ArchitectureFit, WholeRunFits, is_older
from perfmodel.cost.kernel_models.device import sustained_share, tdp_w
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.fit.kernels import rounded, rounded_residuals, softened, weighted_quantiles
from perfmodel.evidence.observation import Floats, Observation, Progress, grouped, recorded_version, reported
from perfmodel.evidence.predict.results import has_kernel_tables, predict_row, predict_served
from perfmodel.evidence.sources.local import DeviceTable
from perfmodel.evidence.sources.setups import served_device
from perfmodel.files.tables import load_table
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm
from perfmodel.specs.engine.description import describe_engine
from perfmodel.specs.scenario_file import load_hardware

_SIZE = 8192  # rows, columns and depth of a large product
_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}
_ENERGIES_J = np.geomspace(1e-13, 1e-11, 401)  # that are tried


def fit_operation_j() -> float:
    """Joules per operation at full clock, from all committed kernel tables; 0 without any."""
    shares = measured_shares()

    def misses(energy: float) -> float:
        """Sum of squared log errors at the best common share."""
        left = [log(share / sustained_share(tdp, peak, energy)) for _, _, tdp, peak, share in shares]
        centre = min(sum(left) / len(left), 0.0)
        return sum((item - centre) ** 2 for item in left)

    return float(f"{min(_ENERGIES_J.tolist(), key=misses):.3g}") if shares else 0.0


def measured_shares() -> list[tuple[str, str, float, float, float]]:
    """(device, number format, watts, declared peak in operations/s, reached share) per calibrated device and engine."""
    result = []
    for device, engine, file in calibrated_kernels():
        hardware = load_hardware(device)
        own = load_calibration(hardware, engine, file).families
        for rate, peak in hardware.declared.peak_flops_per_s.items():
            if f"gemm/{rate}" in own and rate in _BYTES:
                work = gemm("product", _SIZE, _SIZE, _SIZE, LinearFormat(rate, _BYTES[rate], _BYTES[rate], 2.0))
                timer = OperatorTimer(hardware, load_calibration(hardware, engine))
                reached = work.flops / timer.time(work).duration_s
                result.append((device, rate, tdp_w(hardware), peak, reached / peak))
    return result


_TABLE = load_table("fit_parameters")
_PRIORS = _TABLE["whole_runs"]
_LOADS = ("saturated", "burst", "closed", "first_token")
_METRICS = ("tokens_per_s", "output_tokens_per_s", "batch_latency", "tpot_mean", "ttft_mean")
_MAX_SETTINGS = 24
_DIGITS = 4  # of residuals
_MAX_STEPS = 6
_SMALL = 0.25  # errors beyond it weigh less


def fit_whole_runs(rows: Sequence[Observation], folder: Path, progress: Progress | None = None) -> WholeRunFits:
    """Fit every architecture without kernel tables. folder: of `devices.csv`. Raises SpecError if `rows` have none."""
    members = _by_architecture(rows, DeviceTable(folder))
    if not members:
        raise SpecError("no results on devices without kernel tables to fit")
    operation_j = fit_operation_j()
    result: dict[bool, dict[str, ArchitectureFit]] = {False: {}, True: {}}
    for (architecture, is_before), selected in reported(sorted(members.items()), len(members), progress):
        fit = _fit(architecture, selected, folder, operation_j, is_before)
        if fit is not None:
            result[is_before][architecture] = fit
    fits = with_others(WholeRunFits(architectures=result[False], older=result[True], operation_j=operation_j))
    return fits.model_copy(update={"widths": _widths(rows, folder, fits)})


def with_others(fits: WholeRunFits) -> WholeRunFits:
    """`fits` with the mean architecture, for unlisted ones."""
    own = {name: fit for name, fit in fits.architectures.items() if name not in OTHERS.values()}
    members = grouped((OTHERS[_kind_of(name)], fit) for name, fit in own.items())
    order = [name for name in dict.fromkeys(OTHERS.values()) if name in members]
    return fits.model_copy(update={"architectures": own | {name: _mean(members[name]) for name in order}})


def without_own(fits: WholeRunFits) -> WholeRunFits:
    """`fits` with each architecture replaced by the mean of the others: leave one out. Older builds have no others."""
    own = {name: fit for name, fit in fits.architectures.items() if name not in OTHERS.values()}
    result: dict[str, ArchitectureFit] = {}
    for name in own:
        rest = {item: fit for item, fit in own.items() if item != name}
        mean = with_others(WholeRunFits(architectures=rest)).architectures.get(OTHERS[_kind_of(name)])
        result |= {name: mean} if mean is not None else {}
    return fits.model_copy(update={"architectures": {**fits.architectures, **result}, "older": {}})


def _kind_of(architecture: str) -> str:
    is_cpu = any(word in architecture for word in ("rapids", "lake", "zen", "neoverse", "cpu"))
    return "cpu" if is_cpu else "gpu"


def _mean(fits: Sequence[ArchitectureFit]) -> ArchitectureFit:
    """Geometric means; launches as of a GPU."""
    launches = [fit.launch_s * LAUNCH_OVERHEAD_S["gpu"] / LAUNCH_OVERHEAD_S[fit.kind] for fit in fits]
    fits = [fit.model_copy(update={"launch_s": s, "kind": "gpu"}) for fit, s in zip(fits, launches, strict=True)]
    values = {name: float(np.exp(np.mean([np.log(getattr(fit, name)) for fit in fits]))) for name in _PRIORS}
    left = [fit.residuals for fit in fits]
    low, high = min(item.p10 for item in left), max(item.p90 for item in left)
    widest = Residuals(num_rows=sum(item.num_rows for item in left), p10=low, p90=high)
    return ArchitectureFit(**rounded(values), rows=sum(fit.rows for fit in fits), residuals=widest)


def _widths(rows: Sequence[Observation], folder: Path, fits: WholeRunFits) -> dict[str, Residuals]:
    """Quantiles of log(measured / predicted) by metric; a device weighs sqrt(number of errors). Rows at a rate are left
    out: their intervals follow from those of saturated engines."""
    counted = [row for row in rows if row.is_reliable and row.setup.load != "open"]
    result: dict[str, list[tuple[str, float]]] = {}
    for pair in predict_served(counted, folder, fits=without_own(fits)):
        for metric, measured in pair.row.metrics.items():
            if metric in pair.metrics:
                error = float(np.log(measured / pair.metrics[metric]))
                result.setdefault(metric, []).append((pair.row.setup.device, error))
    widths = {}
    for key, members in sorted(result.items()):
        devices, errors = zip(*members, strict=True)
        weights = np.array([devices.count(device) ** -0.5 for device in devices])
        widths[key] = rounded_residuals(weighted_quantiles(np.array(errors), weights), len(errors), _DIGITS)
    return widths


def _by_architecture(rows: Sequence[Observation], table: DeviceTable) -> dict[tuple[str, bool], list[Observation]]:
    """Rows to fit per architecture and of older engines (`is_older`), one per setting."""
    result: dict[tuple[str, bool], dict[str, Observation]] = {}
    for row in rows:
        if row.setup.load not in _LOADS or not row.is_reliable or describe_engine(row.setup.engine).facts.backends:
            continue
        try:
            hardware = served_device(row.setup, table)
        except PerfmodelError:
            continue
        architecture = hardware.declared.architecture
        if architecture is None or has_kernel_tables(hardware, row.setup.engine):
            continue
        of = architecture, is_older(row.setup.engine, recorded_version(row.setup.engine, row.setup.version))
        result.setdefault(of, {}).setdefault(row.group, row)
    chosen = {name: list(members.values()) for name, members in result.items()}
    return {name: rows[:: max(1, -(-len(rows) // _MAX_SETTINGS))] for name, rows in chosen.items()}


def _fit(
    architecture: str, rows: Sequence[Observation], folder: Path, operation_j: float, is_before: bool
) -> ArchitectureFit | None:
    """The fit to the rows that can be predicted; None without any. is_before: of older engines"""
    kind = served_device(rows[0].setup, DeviceTable(folder)).kind
    priors = _PRIORS | (
        _TABLE["whole_runs_of_older"] if is_before else _TABLE["whole_runs_of_cpus"] if kind == "cpu" else {}
    )
    usual, deviation = priors["launch_s"]
    priors["launch_s"] = usual * LAUNCH_OVERHEAD_S[kind] / LAUNCH_OVERHEAD_S["gpu"], deviation
    centre = np.log([value for value, _ in priors.values()])
    sd = np.array([deviation for _, deviation in priors.values()])
    highest = np.log([0.98 if name.endswith("fraction") else 0.05 for name in priors])

    def fit_of(vector: Floats) -> ArchitectureFit:
        values = dict(zip(priors, np.exp(vector).tolist(), strict=True))
        return ArchitectureFit(**rounded(values), kind=kind, rows=len(rows))

    def left_over(fit: ArchitectureFit) -> Floats:
        """log(measured / predicted) seconds of each row; nan without a prediction."""
        own, result = {architecture: fit}, []
        fits = WholeRunFits(architectures=own, older=own if is_before else {}, operation_j=operation_j)
        for pair in (predict_row(row, folder, fits) for row in rows):
            metric = next((name for name in _METRICS if name in pair.row.metrics and name in pair.metrics), None)
            ratio = nan if metric is None else float(np.log(pair.row.metrics[metric] / pair.metrics[metric]))
            result.append(-ratio if "tokens" in (metric or "") else ratio)
        return np.array(result)

    def errors(vector: Floats) -> Floats:
        return np.concatenate([softened(left_over(fit_of(vector)), _SMALL) / _SMALL, (vector - centre) / sd])

    predicted = np.isfinite(left_over(fit_of(centre)))
    rows = [row for row, is_predicted in zip(rows, predicted.tolist(), strict=True) if is_predicted]
    if not rows:
        return None
    bounds = centre - 4 * sd, np.minimum(centre + 4 * sd, highest)
    fit = fit_of(least_squares(errors, centre, bounds=bounds, diff_step=0.02, max_nfev=_MAX_STEPS).x)
    left = left_over(fit)
    residuals = rounded_residuals(np.quantile(left, (0.1, 0.5, 0.9)), len(left), _DIGITS)
    return fit.model_copy(update={"residuals": residuals})

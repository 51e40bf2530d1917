"""`Trust`: how near an answer is to what was measured, as a level, a sentence and the nearest measurements.

Levels, nearest first: `validated` where measured rows of this device, engine, number format and family of models at
similar sizes were predicted within a quarter; `calibrated` where kernels of this device or of another of its
architecture were measured; `transferred` where those of another architecture stand for them; `datasheet` where nothing
does.
"""

__all__ = ["LEVELS", "Level", "Trust", "nearest_rows", "trust_of"]

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, Literal

from perfmodel.cost.calibrations.backends import backend_calibration
from perfmodel.cost.calibrations.files import measured_device
from perfmodel.cost.calibrations.whole_runs import whole_run_calibration
from perfmodel.specs import load_hardware
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.trust.cells import MeasuredCell, MeasuredRow, measured_cells, measured_rows
from perfmodel.trust.setups import SIZES, MeasuredSetup, setup_of

Level = Literal["validated", "calibrated", "transferred", "datasheet"]
LEVELS: tuple[Level, ...] = ("validated", "calibrated", "transferred", "datasheet")
_SIMILAR = 2.0  # sizes within so many times the measured ones
_MOST_ERROR = 0.25  # of rows that an answer is validated by, in the median: as of published figures (`techniques`)
_NUM_NEAREST = 3
_NUM_ROWS = 8
# How far another device, engine, family or format is, in doublings of a size; from small to large.
_OTHER_DEVICE, _OTHER_ENGINE, _OTHER_FAMILY, _OTHER_FORMAT = 4.0, 2.0, 4.0, 1.0
_NAMES = {
    "total_b": "billions of parameters",
    "active_b": "billions of active parameters",
    "devices": "devices",
    "input_tokens": "input tokens",
    "output_tokens": "output tokens",
    "concurrency": "concurrency",
}
_OF_STEPS = (
    "tpot_mean",
    "tpot",
    "itl_mean",
    "decode_tokens_per_s",
    "throughput",
    "output_tokens_per_s",
    "tokens_per_s",
)


@dataclass(frozen=True)
class Trust:
    """level, sentence: how near what was measured is; setup: of the answer

    errors:  metric -> (rows, median of |predicted / measured - 1|) of the rows that the answer is validated by
    nearest: measured cells, nearest first, whatever the level
    """

    level: Level
    sentence: str
    setup: MeasuredSetup
    errors: Mapping[str, tuple[int, float]]
    nearest: Sequence[MeasuredCell]

    def to_json(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "because": self.sentence,
            "rows": max((count for count, _ in self.errors.values()), default=0),
            "median_errors": {metric: error for metric, (_, error) in self.errors.items()},
            "nearest": [_cell_json(cell) for cell in self.nearest],
        }


def trust_of(scenario: Scenario) -> Trust:
    """How near the scenario's setup is to what was measured."""
    setup = setup_of(scenario)
    cells = measured_cells()
    alike = [cell for cell in cells if _is_alike(setup, cell)]
    errors = _pooled(alike)
    found = (_of_kernels(pool.hardware or scenario.hardware, pool.engine) for pool in scenario.pools)
    level, sentence = max(found, key=lambda each: LEVELS.index(each[0]))
    error = next((errors[metric][1] for metric in _OF_STEPS if metric in errors), None)
    if error is None:
        sentence = f"{_missing(setup, cells)}; {sentence}" if level != "datasheet" else sentence
        return Trust(level, sentence, setup, {}, _nearest(setup, cells))
    if error > _MOST_ERROR:
        sentence = f"measured rows like it were missed by {error:.0%} in the median; {sentence}"
        return Trust(level, sentence, setup, errors, _nearest(setup, alike))
    return Trust("validated", _validated(setup, errors), setup, errors, _nearest(setup, alike))


def nearest_rows(trust: Trust) -> list[MeasuredRow]:
    """Single measurements near the answer's setup, nearest first: those of validations whose rows may be copied."""
    setup = trust.setup
    same = (row for row in measured_rows() if row.setup.device == setup.device)  # the others are too far away
    rows = [(_distance(setup, row.setup, row.setup), row) for row in same]
    near = [each for each in rows if each[0] < _OTHER_DEVICE]
    return [row for _, row in sorted(near, key=lambda each: each[0])[:_NUM_ROWS]]


def _is_alike(setup: MeasuredSetup, cell: MeasuredCell) -> bool:
    """Whether a cell is of the device, engine, format and family asked about, at similar sizes."""
    return _is_kin(setup, cell) and not _other_sizes(setup, cell)


def _is_kin(setup: MeasuredSetup, cell: MeasuredCell) -> bool:
    low = cell.low
    same = low.device == setup.device and low.engine == setup.engine and low.weights == setup.weights
    return same and low.family == setup.family and low.separate == setup.separate


def _other_sizes(setup: MeasuredSetup, cell: MeasuredCell) -> list[str]:
    """The sizes that are not similar to those of the cell."""
    low, high = cell.low, cell.high
    return [size for size in SIZES if _outside(getattr(setup, size), getattr(low, size), getattr(high, size)) > 1]


def _missing(setup: MeasuredSetup, cells: Iterable[MeasuredCell]) -> str:
    """Why no measured row is like the setup."""
    kin = [cell for cell in cells if _is_kin(setup, cell)]
    if not kin:
        return "no measured row is of this device, engine, format and family of models"
    nearest = min(kin, key=lambda cell: _distance(setup, cell.low, cell.high))
    ranges = [
        f"{_NAMES[size]} {_range(getattr(nearest.low, size), getattr(nearest.high, size))}"
        for size in _other_sizes(setup, nearest)
    ]
    return f"the nearest measured rows, of {nearest.low.model}, have {', '.join(ranges)}"


def _range(low: float, high: float) -> str:
    return f"{low:,.4g}" if low == high else f"{low:,.4g} to {high:,.4g}"


def _outside(value: float, low: float, high: float) -> float:
    """How many times `_SIMILAR` a size lies outside of what was measured; 0 inside, and where either is not known."""
    if not value or not high or low <= value <= high:
        return 0.0
    if value > high:
        return log2(value / high) / log2(_SIMILAR)
    return log2(low / value) / log2(_SIMILAR)


def _distance(setup: MeasuredSetup, low: MeasuredSetup, high: MeasuredSetup) -> float:
    found = sum(_outside(getattr(setup, size), getattr(low, size), getattr(high, size)) for size in SIZES)
    found += _OTHER_DEVICE * (setup.device != low.device) * (1 if setup.architecture == low.architecture else 2)
    found += _OTHER_ENGINE * (setup.engine != low.engine)
    found += _OTHER_FAMILY * (setup.family != low.family or setup.separate != low.separate)
    return found + _OTHER_FORMAT * (setup.weights != low.weights)


def _nearest(setup: MeasuredSetup, cells: Iterable[MeasuredCell]) -> list[MeasuredCell]:
    """One metric of each of the nearest cells."""
    found: dict[tuple[str, ...], MeasuredCell] = {}
    of_steps = [cell for cell in cells if cell.metric in _OF_STEPS]
    for cell in sorted(of_steps, key=lambda each: _distance(setup, each.low, each.high)):
        found.setdefault((cell.kind, cell.low.device, cell.low.engine, cell.low.version, cell.low.model), cell)
        if len(found) == _NUM_NEAREST:
            break
    return list(found.values())


def _pooled(cells: Sequence[MeasuredCell]) -> dict[str, tuple[int, float]]:
    """Rows of each metric, and the median over them of their cells' median errors."""
    found = {}
    for metric in dict.fromkeys(cell.metric for cell in cells):
        mine = sorted((cell.median_error, cell.rows) for cell in cells if cell.metric == metric)
        total, passed = sum(rows for _, rows in mine), 0
        for error, rows in mine:
            passed += rows
            if 2 * passed >= total:
                found[metric] = (total, error)
                break
    return found


def _validated(setup: MeasuredSetup, errors: Mapping[str, tuple[int, float]]) -> str:
    rows = max(count for count, _ in errors.values())
    named = ", ".join(f"{_title(metric)} {error:.1%}" for metric, (_, error) in errors.items())
    return (
        f"{rows:,} measured rows of {setup.device}, {setup.engine} and models of this family ({setup.family}) at "
        f"similar sizes; median error: {named}"
    )


def _title(metric: str) -> str:
    name, _, of = metric.partition("_")
    known = {"tpot": "TPOT", "ttft": "TTFT", "itl": "ITL", "e2el": "E2E"}
    return f"{of} {known[name]}".strip() if name in known else metric.replace("_per_s", "/s").replace("_", " ")


def _of_kernels(hardware: HardwareSpec, engine: EngineSpec) -> tuple[Level, str]:
    """What kernels of a device are known by, where no measured row is like the setup."""
    unknown: tuple[Level, str] = "datasheet", f"no kernel of {hardware.name} nor of a related device was measured"
    if engine.described.facts.backends:
        found = backend_calibration(hardware, engine)
        if found.origin == "datasheet":
            return unknown
        if found.spread > 1:
            return "transferred", "its backend was fitted to devices of other generations"
        return "calibrated", "its backend was fitted to devices of this generation"
    if engine.profile == "datasheet":
        return unknown
    measured = measured_device(hardware, engine.profile)
    if measured == hardware.name:
        return "calibrated", "its kernels were measured"
    if measured is None:
        if whole_run_calibration(hardware, engine.profile) is None:
            return unknown
        return "transferred", "what whole runs of its architecture reach stands for its kernels"
    if load_hardware(measured).declared.architecture == hardware.declared.architecture:
        return "calibrated", f"kernels of {measured}, of its architecture, were measured"
    return "transferred", f"kernels of {measured}, of another architecture, stand for its own"


def _cell_json(cell: MeasuredCell) -> dict[str, Any]:
    names = ("device", "engine", "version", "model", "weights")
    return {
        "validation": cell.kind,
        **{name: getattr(cell.low, name) for name in names},
        **{size: [getattr(cell.low, size), getattr(cell.high, size)] for size in SIZES[2:]},
        "metric": cell.metric,
        "rows": cell.rows,
        "median_error": cell.median_error,
    }

"""`Trust`: a level, the errors to expect, and the nearest measurements.

Levels, nearest first: `validated`: rows of this device, engine, number format and model family at similar sizes were
predicted within `VALIDATED_BELOW`; `calibrated`: kernels of this device or its architecture were measured;
`transferred`: kernels of another architecture stand in; `datasheet`: nothing was measured. The badge prints errors of
similar rows, else those of the nearest cross-validation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, Literal, NamedTuple

from perfmodel.cost.calibrations.backends import backend_calibration
from perfmodel.cost.calibrations.files import measured_device
from perfmodel.cost.calibrations.whole_runs import whole_run_calibration
from perfmodel.specs import load_hardware
from perfmodel.specs.cluster import PoolSpec
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.trust import index
from perfmodel.trust.index import Cut, MeasuredCell, MeasuredSetup, measured_cells, measured_rows

Level = Literal["validated", "calibrated", "transferred", "datasheet"]
LEVELS: tuple[Level, ...] = ("validated", "calibrated", "transferred", "datasheet")
_SIMILAR = 2.0  # sizes within so many times the measured ones
# The largest median error of any figure on the badge at which it still says "validated". Deployments that one chooses
# between are mostly a factor of two apart: their order survives an error of a quarter either way (2 x 0.75 > 1.25), and
# does not survive one of a third.
VALIDATED_BELOW = 0.25
_FEWEST_ROWS = 3  # needed to validate: two may agree by chance
_NUM_NEAREST = 3
_NUM_ROWS = 8
# How far another device, engine, family or format is, in doublings of a size; from small to large.
_OTHER_DEVICE, _OTHER_ENGINE, _OTHER_FAMILY, _OTHER_FORMAT = 4.0, 2.0, 4.0, 1.0
_NAMES = {
    "total_b": "billion parameters",
    "active_b": "billion active parameters",
    "devices": "device(s)",
    "input_tokens": "input token(s)",
    "output_tokens": "output token(s)",
    "concurrency": "request(s) in flight",
}
# What the badge prints: the first of each that was measured, under the name it has there.
_OF_STEPS = {
    "tpot_mean": "TPOT",
    "tpot": "TPOT",
    "itl_mean": "ITL",
    "decode_tokens_per_s": "decode tok/s",
    "throughput": "output tok/s",
    "output_tokens_per_s": "output tok/s",
    "tokens_per_s": "output tok/s",
    "e2el_mean": "E2E",
    "e2el": "E2E",
}
_OF_PROMPTS = {"ttft_mean": "TTFT", "ttft": "TTFT", "prompt_tokens_per_s": "prompt tok/s"}
_SHOWN = (_OF_STEPS, _OF_PROMPTS)


# What no measured row has; what it costs is worked out from kernels and rules.
_FEATURES: Mapping[str, Callable[[Scenario, PoolSpec], bool]] = {
    "vectors or scores": lambda scenario, pool: (pool.model or scenario.model).pooling is not None,
    "LoRA adapters": lambda _, pool: pool.engine.enable_lora,
    "speculation": lambda _, pool: pool.engine.speculative_config is not None,
    "a second tier of KV": lambda _, pool: pool.engine.kv_offload is not None,
    "two-batch overlap": lambda _, pool: pool.engine.enable_dbo,
    "prompts shared out over ranks": lambda _, pool: pool.engine.prefill_context_parallel_size > 1,
    "feed-forward devices": lambda _, pool: pool.engine.afd_config is not None,
    "experts on more than 16 devices": lambda _, pool: (
        pool.engine.enable_expert_parallel and pool.engine.num_devices > 16
    ),
    "images": lambda scenario, _: scenario.traffic.images is not None,
    "answers of a required shape": lambda scenario, _: scenario.traffic.structured_outputs is not None,
    "beams": lambda scenario, _: scenario.traffic.beam_width > 1,
    "an autoscaler": lambda _, pool: pool.autoscaling is not None,
    "MIG slices": lambda scenario, pool: ":" in (pool.hardware or scenario.hardware).name,
}


class ErrorFigures(NamedTuple):
    """Errors of one metric, |predicted / measured - 1|. rows: number of measurements, 0 for expected errors"""

    rows: int
    median: float
    p90: float


@dataclass(frozen=True)
class Trust:
    """How near a setup is to measured ones.

    because:  reasons for the level, in sentences
    errors:   metric -> errors of similar rows, or else expected errors
    left_out: what the cross-validation behind expected errors left out; None with similar rows
    nearest:  measured cells, nearest first"""

    level: Level
    because: str
    setup: MeasuredSetup
    errors: Mapping[str, ErrorFigures]
    left_out: Cut | None
    nearest: Sequence[MeasuredCell]

    @property
    def figures(self) -> str:
        """`rows like this: TPOT 8 % (p90 25), 37 rows`, or `no rows like this: expect TPOT 8 % (p90 25)`."""
        shown = _shown(self.errors)
        counts = {figures.rows for figures in shown.values()}
        texts = []
        for name, figures in shown.items():
            where = f" in {figures.rows:,} rows" if len(counts) > 1 else ""
            texts.append(f"{name} {_percent(figures.median)} % (p90 {_percent(figures.p90)}){where}")
        if self.left_out is not None:
            return f"no rows like this: expect {', '.join(texts)}"
        count = max(counts)
        whole = f", {count:,} row{'' if count == 1 else 's'}" if len(counts) == 1 else ""
        return f"rows like this: {', '.join(texts)}{whole}"

    @property
    def badge(self) -> str:
        """The level and its errors, as every command, page and document prints them."""
        return f"{self.level}; {self.figures}"

    def __str__(self) -> str:
        return f"{self.badge}. {self.because}"

    def to_json(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "badge": self.badge,
            "because": self.because,
            "rows": max(figures.rows for figures in self.errors.values()),
            "median_errors": {metric: figures.median for metric, figures in self.errors.items()},
            "p90_errors": {metric: figures.p90 for metric, figures in self.errors.items()},
            "left_out": self.left_out,
            "nearest": [_cell_json(cell) for cell in self.nearest],
        }


def trust_of(scenario: Scenario) -> Trust:
    """Trust in predictions for the scenario's setup."""
    setup, cells = index.setup_of(scenario), measured_cells()
    kin = [cell for cell in cells if _is_kin(setup, cell)]
    alike = [cell for cell in kin if not _other_sizes(setup, cell)]
    alike = [cell for cell in alike if cell.low.model == setup.model] or alike
    errors = _pooled(alike)
    origins = (_of_kernels(pool.hardware or scenario.hardware, pool.engine) for pool in scenario.pools)
    level, because, cut = max(origins, key=lambda origin: (LEVELS.index(origin[0]), index.CUTS.index(origin[2])))
    extras = [name for name, is_used in _FEATURES.items() if any(is_used(scenario, pool) for pool in scenario.pools)]
    if (shown := _shown(errors)) and not extras:
        first, *others = sorted({cell.low.model for cell in alike})
        models = f"{first} and {len(others)} other models" if others else first
        because = f"Measured: {models} on {setup.device} under {setup.engine}."
        if all(figures.median <= VALIDATED_BELOW and figures.rows >= _FEWEST_ROWS for figures in shown.values()):
            level = "validated"
        return Trust(level, because, setup, errors, None, _nearest(setup, alike))
    if level != "datasheet" and not any(cell.low.family == setup.family for cell in cells):
        because = f"{because} No model of its family ({setup.family}) was measured."
    elif kin and not alike and level != "datasheet":
        because = f"{because} {_sizes_of_nearest(setup, kin)}"
    if extras:
        because = f"{because} No row has {' or '.join(extras)}."
    known = {cell.low.model for cell in cells if (cell.low.device, cell.low.engine) == (setup.device, setup.engine)}
    if cut not in ("architecture", "datasheet"):
        # the nearest cross-validation that left out what no row has
        cut = "device" if not known else "cell" if setup.model in known else "model"
    return Trust(level, because, setup, _expected(setup, scenario, cells, cut), cut, _nearest(setup, cells))


def nearest_rows(trust: Trust) -> list[index.MeasuredRow]:
    """Measurements near the answer's setup, nearest first, of validations whose rows may be copied."""
    setup = trust.setup
    same = (row for row in measured_rows() if row.setup.device == setup.device)  # other devices are too distant
    rows = [(_distance(setup, row.setup, row.setup), row) for row in same]
    near = [item for item in rows if item[0] < _OTHER_DEVICE]
    return [row for _, row in sorted(near, key=lambda item: item[0])[:_NUM_ROWS]]


def _is_kin(setup: MeasuredSetup, cell: MeasuredCell) -> bool:
    """Whether the cell has the setup's device, engine, format and family, at any size."""
    low = cell.low
    same = low.device == setup.device and low.engine == setup.engine and _is_alike(low.weights, setup.weights)
    return same and low.family == setup.family and low.separate == setup.separate


def _other_sizes(setup: MeasuredSetup, cell: MeasuredCell) -> list[str]:
    """Sizes that differ from the cell's."""
    return [size for size, far in _outside(setup, cell.low, cell.high).items() if far > 1]


def _sizes_of_nearest(setup: MeasuredSetup, kin: Iterable[MeasuredCell]) -> str:
    nearest = min(kin, key=lambda cell: _distance(setup, cell.low, cell.high))
    sizes = _other_sizes(setup, nearest)
    ranges = []
    for size in sizes:
        if size != "active_b" or "total_b" not in sizes:
            low, high, own = (_number(getattr(item, size)) for item in (nearest.low, nearest.high, setup))
            count = low if getattr(nearest.low, size) == getattr(nearest.high, size) else f"{low} to {high}"
            ranges.append(f"{count} {_NAMES[size].replace('(s)', '' if count == '1' else 's')} (here {own})")
    return f"The nearest rows ({nearest.low.model}) have {', '.join(ranges)}."


def _number(value: float) -> str:
    """At least four digits, no exponent: 8.03, 574.2, 500,000"""
    return f"{value:,.4g}" if value < 9999.5 else f"{value:,.0f}"


def _outside(setup: MeasuredSetup, low: MeasuredSetup, high: MeasuredSetup) -> dict[str, float]:
    """Distance of each size from the measured range in factors of `_SIMILAR`; 0 inside, or if the setup has none; 1 if
    only the measurements have none, as the requests in flight where arrivals decide, at whatever load."""
    result = {}
    for size in index.SIZES:
        value, least, most = getattr(setup, size), getattr(low, size), getattr(high, size)
        if not value or least <= value <= most:
            result[size] = 0.0
        elif not most:
            result[size] = 1.0
        else:
            result[size] = log2(value / most if value > most else least / value) / log2(_SIMILAR)
    return result


def _distance(setup: MeasuredSetup, low: MeasuredSetup, high: MeasuredSetup) -> float:
    result = sum(_outside(setup, low, high).values())
    result += _OTHER_DEVICE * (setup.device != low.device) * (1 if setup.architecture == low.architecture else 2)
    result += _OTHER_ENGINE * (setup.engine != low.engine)
    result += _OTHER_FAMILY * (setup.family != low.family or setup.separate != low.separate)
    return result + _OTHER_FORMAT * (not _is_alike(setup.weights, low.weights))


def _is_alike(one: str, other: str) -> bool:
    """Whether two weight formats have equal bytes and rates: both 16-bit floats do."""
    return one == other or {one, other} == {"bf16", "fp16"}


def _nearest(setup: MeasuredSetup, cells: Iterable[MeasuredCell]) -> list[MeasuredCell]:
    """The nearest cells, one metric each."""
    result: dict[tuple[str, ...], MeasuredCell] = {}
    of_steps = [cell for cell in cells if cell.metric in _OF_STEPS]
    for cell in sorted(of_steps, key=lambda item: _distance(setup, item.low, item.high)):
        result.setdefault((cell.kind, cell.low.device, cell.low.engine, cell.low.version, cell.low.model), cell)
        if len(result) == _NUM_NEAREST:
            break
    return list(result.values())


def _pooled(cells: Sequence[MeasuredCell]) -> dict[str, ErrorFigures]:
    by_metric: dict[str, list[float]] = {}
    for cell in cells:
        by_metric.setdefault(cell.metric, []).extend(abs(error) for error in cell.errors)
    return {
        metric: ErrorFigures(len(errors), index.quantile(errors, 0.5), index.quantile(errors, 0.9))
        for metric, errors in by_metric.items()
    }


def _shown(errors: Mapping[str, ErrorFigures]) -> dict[str, ErrorFigures]:
    """Badge name -> errors: one metric of steps and one of prompts."""
    firsts = (next((metric for metric in names if metric in errors), None) for names in _SHOWN)
    return {names[metric]: errors[metric] for names, metric in zip(_SHOWN, firsts, strict=True) if metric is not None}


def _percent(share: float) -> str:
    """Whole per cent, at least 1, the repeatability of measurements; past tenfold, where servers are at their limit, no
    figure says more."""
    return f"{max(1.0, 100 * share):.0f}" if share <= 10 else "over 1,000"


def _expected(
    setup: MeasuredSetup, scenario: Scenario, cells: Sequence[MeasuredCell], cut: Cut
) -> dict[str, ErrorFigures]:
    """Errors without similar rows: the cross-validation's, at least those of the nearest measured rows."""
    hardware = scenario.hardware
    devices = "apu" if hardware.declared.memory[0].unified else "gpu"  # as errors of single machines are grouped
    devices = "cpu" if hardware.kind == "cpu" else "apple" if hardware.maker == "apple" else devices
    expected = index.left_out_errors(setup.engine, devices, cut)
    result = {}
    for names in _SHOWN:
        metric = next((metric for metric in names if metric in expected), None)
        if metric is None:
            continue
        members = [cell for cell in cells if cell.metric in names]
        distances = [_distance(setup, cell.low, cell.high) for cell in members]
        least = min(distances, default=0.0)
        near = _pooled([cell for cell, distance in zip(members, distances, strict=True) if distance == least])
        nearest = next((near[name] for name in names if name in near), ErrorFigures(0, 0.0, 0.0))
        median, p90 = expected[metric]
        result[metric] = ErrorFigures(0, max(median, nearest.median), max(p90, nearest.p90))
    return result


def _of_kernels(hardware: HardwareSpec, engine: EngineSpec) -> tuple[Level, str, Cut]:
    """Level, reason and matching cross-validation cut by the kernels measured."""
    profile, name = engine.profile, hardware.name
    if engine.described.facts.backends:
        calibration = backend_calibration(hardware, engine)
        if calibration.origin != "datasheet":
            if calibration.spread > 1:
                return "transferred", f"{profile} was fitted to devices of other generations.", "device"
            return "calibrated", f"{profile} was fitted to devices of this generation.", "device"
    elif profile == "datasheet":
        return "datasheet", "The engine profile `datasheet` has no measurements.", "datasheet"
    elif measured := measured_device(hardware, profile):
        if measured == name:
            return "calibrated", f"Kernels of {name} were measured.", "device"
        if load_hardware(measured).declared.architecture == hardware.declared.architecture:
            return "calibrated", f"Kernels of {measured}, of the same architecture, were measured.", "device"
        return "transferred", f"Kernels of {measured}, of another architecture, were measured.", "device"
    elif whole_run_calibration(hardware, profile) is not None:
        return "transferred", f"Whole runs on the architecture of {name} were measured.", "architecture"
    because = f"No kernel of {name} nor of a related device was measured"
    if hardware.kind == "gpu":
        because += "; what kernels of all architectures share stands in"
    return "datasheet", f"{because}.", "datasheet"


def _cell_json(cell: MeasuredCell) -> dict[str, Any]:
    return {
        "validation": cell.kind,
        **{name: getattr(cell.low, name) for name in ("device", "engine", "version", "model", "weights")},
        **{size: [getattr(cell.low, size), getattr(cell.high, size)] for size in index.SIZES[2:]},
        "metric": cell.metric,
        "rows": cell.rows,
        "median_error": cell.median_error,
    }

"""Index of validated setups and their errors, and of cross-validation errors.

`hardware_specs/validated`, written by `benchmarks/accuracy_table.py`: `<name>.csv` has a line per cell (device x engine
version x model x number format) and metric: the range of measured setups and the prediction errors.
`<name>.rows.csv.gz` has the rows, if they may be copied. `left_out/errors.csv` has a line per engine, cut and metric:
errors to expect without similar rows, from cross-validation reports (`benchmarks/left_out_index.py`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from perfmodel.errors import SpecError
from perfmodel.files.catalog import data_dir
from perfmodel.files.sandbox import read_rows
from perfmodel.models import architecture as arch
from perfmodel.models.params import count_parameters
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Lengths

SIZES = ("total_b", "active_b", "devices", "input_tokens", "output_tokens", "concurrency")


class MeasuredSetup(NamedTuple):
    """A deployment and its load, as far as published measurements state them.

    device:        with the CPU if that holds some layers: "rtx-4090 + ryzen-9-7950x"
    family:        kinds of layers: "dense, attention", "mixture of experts, latent attention"
    weights:       number format; separate: prefill and decode are disaggregated
    total_b, active_b: parameters in billions, total and per token
    devices:       per engine
    input_tokens, output_tokens: means per request; 0 for traces and growing conversations
    concurrency:   requests in flight (closed loop, or the maximum); 0 if arrivals decide"""

    device: str
    architecture: str
    engine: str
    version: str
    model: str
    family: str
    weights: str
    separate: bool
    total_b: float
    active_b: float
    devices: float
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    concurrency: float = 0.0


def setup_of(scenario: Scenario) -> MeasuredSetup:
    """The setup of a scenario; of its decode pool if disaggregated."""
    pool = next((pool for pool in scenario.pools if pool.role != "prefill" and not pool.shadow), scenario.pools[0])
    model, engine, traffic = pool.model or scenario.model, pool.engine, scenario.traffic
    family, total, active = _sizes(model)
    concurrency = traffic.arrivals.concurrency if traffic.arrivals.process == "closed_loop" else None
    hardware = pool.hardware or scenario.hardware
    return MeasuredSetup(
        device=hardware.name if engine.cpu is None else f"{hardware.name} + {engine.cpu}",
        architecture=hardware.declared.architecture or "",
        engine=engine.profile,
        version=engine.described.version.described,
        model=model.name,
        family=family,
        weights=model.quantization.weights or model.dtype,
        separate=scenario.cluster.is_disaggregated,
        total_b=total / 1e9,
        active_b=active / 1e9,
        devices=float(engine.num_devices),
        input_tokens=0.0 if traffic.has_conversations else _mean(traffic.input_tokens),
        output_tokens=_mean(traffic.output_tokens),
        concurrency=float(concurrency or 0.0),
    )


def _mean(lengths: Lengths | None) -> float:
    """In tokens; 0 if a file has the lengths."""
    return (lengths.mean_tokens or 0.0) if lengths is not None else 0.0


@lru_cache(maxsize=256)
def _sizes(model: ModelSpec) -> tuple[str, int, int]:
    """The model's family, total and active parameters."""
    layers = [layer for layer, _ in model.layers]
    sparse = any(isinstance(layer.ffn, arch.MoEFFN) for layer in layers)
    mixers = sorted({_kind(layer.mixer) for layer in layers if layer.mixer is not None})
    counted = count_parameters(model)
    return f"{'mixture of experts' if sparse else 'dense'}, {' and '.join(mixers)}", counted.total, counted.active


def _kind(mixer: arch.Mixer) -> str:
    if isinstance(mixer, arch.LatentAttention):
        return "latent attention" if mixer.indexer is None else "sparse latent attention"
    return _KINDS[type(mixer)]


_KINDS: dict[type, str] = {
    arch.GatedDeltaNet: "gated delta rule",
    arch.Mamba: "state space",
    arch.LinearAttention: "linear attention",
    arch.CompressedAttention: "compressed attention",
    arch.Attention: "attention",
}
NAMES = tuple(name for name in MeasuredSetup._fields if name not in SIZES)
_NAMES_OF = itemgetter(*NAMES)  # of a CSV line
_SIZES_OF = {end: itemgetter(*(size + end for size in SIZES)) for end in ("", "_low", "_high")}


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One measurement and its prediction, in the metric's unit. kind: of the validation"""

    kind: str
    setup: MeasuredSetup
    metric: str
    predicted: float
    measured: float
    label: str

    @property
    def error(self) -> float:
        """predicted / measured - 1"""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """Measurements of one cell in one metric.

    low, high: the smallest and largest of each size over the rows
    errors:    predicted / measured - 1 per row, ascending"""

    kind: str
    low: MeasuredSetup
    high: MeasuredSetup
    metric: str
    errors: tuple[float, ...]

    @property
    def rows(self) -> int:
        """Number of measurements."""
        return len(self.errors)

    @property
    def median_error(self) -> float:
        """Median of |predicted / measured - 1|."""
        return quantile([abs(error) for error in self.errors], 0.5)


def quantile(values: Sequence[float], share: float) -> float:
    """The `share` quantile of `values`, linearly interpolated, as numpy's default."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@cache
def measured_cells() -> tuple[MeasuredCell, ...]:
    """All cells of the index."""
    cells = []
    for line in _lines("*.csv"):
        ends, errors = (_setup(line, "_low"), _setup(line, "_high")), tuple(map(float, line["errors"].split()))
        cells.append(MeasuredCell(line["kind"], *ends, line["metric"], errors))
    return tuple(cells)


@cache
def measured_rows() -> tuple[MeasuredRow, ...]:
    """Rows of all validations that may be copied."""
    rows = []
    for line in _lines("*.rows.csv.gz"):
        figures = float(line["predicted"]), float(line["measured"])
        rows.append(MeasuredRow(line["kind"], _setup(line), line["metric"], *figures, line["label"]))
    return tuple(rows)


def _lines(pattern: str) -> Iterator[dict[str, str]]:
    for file in sorted(data_dir("validated").glob(pattern)):
        try:
            yield from read_rows(file)
        except (OSError, ValueError) as error:
            raise SpecError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _setup(line: dict[str, str], end: str = "") -> MeasuredSetup:
    """The setup of a CSV line; of a cell, one `end` of its ranges."""
    *named, separate = _NAMES_OF(line)
    return MeasuredSetup._make((*named, separate == "True", *map(float, _SIZES_OF[end](line))))


# What was left out of the fit, nearest first: a cell is a model in a number format under one version of an engine on a
# device; an architecture leaves no kernel times behind; with a datasheet nothing is fitted at all.
Cut = Literal["cell", "model", "device", "architecture", "datasheet"]
CUTS: tuple[Cut, ...] = ("cell", "model", "device", "architecture", "datasheet")


class LeftOutError(NamedTuple):
    """Errors of one metric with a cut left out of the fit.

    engine, devices: profile, and kind of devices (cpu, apu, apple, gpu); "" for any
    median, p90:     of |predicted / measured - 1| over the rows left out, or over their devices"""

    engine: str
    left_out: Cut
    devices: str
    metric: str
    median: float
    p90: float
    report: str


@cache
def measured_left_out() -> tuple[LeftOutError, ...]:
    """All lines of the file."""
    result = []
    for line in read_rows(data_dir("validated") / "left_out" / "errors.csv"):
        cut: Any = line["left_out"]
        errors = float(line["median_error"]), float(line["p90_error"])
        result.append(LeftOutError(line["engine"], cut, line["devices"], line["metric"], *errors, line["report"]))
    return tuple(result)


def left_out_errors(engine: str, devices: str, cut: Cut) -> dict[str, tuple[float, float]]:
    """Metric -> (median, p90) to expect of `engine` on a kind of `devices`, with `cut` left out.

    A more distant cut includes what nearer ones leave out, so its error is at least as large: the largest over cuts up
    to `cut` counts; without any, the nearest beyond. An engine without reports takes the largest errors of all engines.
    """
    lines = [line for line in measured_left_out() if line.devices in ("", devices)]
    if any(line.engine == engine for line in lines):
        lines = [line for line in lines if line.engine in ("", engine)]
    reach = max(CUTS.index(cut), min((CUTS.index(line.left_out) for line in lines), default=0))
    errors_of: dict[str, tuple[float, float]] = {}
    for line in lines:
        if CUTS.index(line.left_out) <= reach:
            median, p90 = errors_of.get(line.metric, (0.0, 0.0))
            errors_of[line.metric] = max(median, line.median), max(p90, line.p90)
    return errors_of

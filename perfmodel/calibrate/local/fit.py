"""The fit of an engine's backends to recorded figures, and what it says of devices and models that it has not seen.

Residuals are logarithms of seconds per token of each setting (a group's median); a device counts by the logarithm of
how many settings it has, and large residuals next to nothing: hosts that throttle, laptops, memory that is half fitted
are no part of what is to be learned. Intervals come from whole chips left out, siblings together.
"""

__all__ = ["HeldOut", "fit_backends", "held_out", "settings_of"]

import datetime
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from perfmodel.calibrate.local.columns import KernelColumns, Setting, columns_of, predicted_log_seconds
from perfmodel.calibrate.local.devices import DeviceTable
from perfmodel.calibrate.local.models import local_model
from perfmodel.calibrate.local.parameters import CPU_START, GPU_START, ParameterLayout, Start
from perfmodel.calibrate.local.rows import LocalRow
from perfmodel.calibrate.local.steps import local_engine, local_scenario
from perfmodel.cost.calibrations.backends import (
    BackendFit,
    BackendFits,
    generation_of,
    has_small_cores,
    power_factor,
    product_rates,
)
from perfmodel.cost.forms.blocks import MatmulRates, StreamRates, StreamSizes, matmul_seconds, stream_seconds
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.fits import Residuals
from perfmodel.errors import PerfmodelError
from perfmodel.specs.engine.description import BackendFacts
from perfmodel.specs.engine.versions import parse_version
from perfmodel.specs.hardware import HardwareSpec

Progress = Callable[[str], None]
_SMALL = 0.12  # residuals beyond it count less and less
_PRIOR_WEIGHT = 0.05  # of a standard deviation from the start, in residuals of one setting
_MOST_STEPS, _STEPS_AGAIN = 40, 6
_FOLDS = 10
_FEWEST_CHIPS = 5  # to leave out one after another; with fewer, intervals are those of the backend with most devices
_FEW = Residuals(num_rows=1, p10=-0.3, p90=0.3)  # of an engine that was recorded on fewer chips [assumed]
_RELATED = 0.5  # of the starts' deviations, for backends that start from the numbers of another one
_SOURCE = "llama-bench, LocalScore and MLX figures published by others, cited in the header of the report"
# Beside those that are apart: what a row's flags say of it that a fit cannot use.
_NOT_FITTED = ("memory", "cluster")


@dataclass(frozen=True)
class HeldOut:
    """Settings with predictions of fits that had not seen their chip, or their model."""

    settings: tuple[Setting, ...]
    predicted: NDArray[Any]  # tokens per second


def settings_of(rows: Sequence[LocalRow], folder: Path) -> list[Setting]:
    """What a fit is made to: rows of one setting as one, with the median of their figures.

    folder: where `devices.csv` is
    """
    table, groups = DeviceTable(folder), defaultdict[LocalRow, list[float]](list)
    for row in rows:
        if not row.is_apart and not any(word in row.flags for word in _NOT_FITTED):
            key = replace(row, row_id="", tokens_per_s=1.0, flags="", group="", build="", backend_detail="", date=None)
            key = replace(key, build=local_engine(row).version or "", backend_detail=row.backend_detail[:2])
            groups[key].append(row.tokens_per_s)
    found = []
    for row, figures in groups.items():
        try:
            hardware = table.device(row.device, row.device_class)
            model = local_model(row.model, row.params, row.active_params, row.gguf_type, row.file_size_bytes)
            found.append(Setting(row, hardware, local_scenario(row, model, hardware), median(figures)))
        except PerfmodelError:
            continue
    return found


def fit_backends(
    rows: Sequence[LocalRow], folder: Path, engine: str, command: str, progress: Progress = lambda _: None
) -> BackendFits:
    """The numbers of all backends of `engine` that `rows` have figures of.

    rows, folder: of the table; engine: its name; command: that is written into the file
    progress:     is told which backend is being fitted

    Raises PerfmodelError where no row is of this engine.
    """
    mine = [each for each in settings_of(rows, folder) if each.scenario.engine.profile == engine]
    fits: dict[str, BackendFit] = {}
    first: BackendFit | None = None
    for backend in _most_devices_first(mine):
        progress(backend)
        chosen = [each for each in mine if each.scenario.engine.backend == backend]
        problem = _Problem(chosen, None if chosen[0].hardware.kind == "cpu" else first)
        vector = problem.solve()
        decode, prompt = problem.residuals(problem.left_out(vector, problem.chips))
        if len(set(problem.chips)) < _FEWEST_CHIPS:
            decode, prompt = (first.decode_residuals, first.prompt_residuals) if first is not None else (_FEW, _FEW)
        fits[backend] = problem.layout.fit(vector, decode, prompt)
        if first is None and chosen[0].hardware.kind != "cpu":
            first = fits[backend]
    if not fits:
        raise PerfmodelError(f"the table has no figures of {engine}; give one that has, or another --engine.")
    like = next((name for name in fits if fits[name] is first), next(iter(fits)))
    return BackendFits(
        engine=engine,
        source=_SOURCE,
        date=datetime.datetime.now(datetime.UTC).date(),
        command=command,
        like=like,
        backends=fits,
    )


def held_out(rows: Sequence[LocalRow], folder: Path, by: str, progress: Progress = lambda _: None) -> HeldOut:
    """Predictions of fits from which whole chips (by="device") or whole models (by="model") were left out.

    rows, folder: of the table; progress: is told which backend is being fitted
    """
    mine = settings_of(rows, folder)
    groups: dict[tuple[str, str], list[Setting]] = defaultdict(list)
    for each in mine:
        groups[each.scenario.engine.profile, each.scenario.engine.backend or ""].append(each)
    found: list[Setting] = []
    predicted: list[NDArray[Any]] = []
    first: BackendFit | None = None
    for (_, backend), chosen in sorted(groups.items(), key=lambda item: -len({x.row.device for x in item[1]})):
        progress(backend)
        is_cpu = chosen[0].hardware.kind == "cpu"
        problem = _Problem(chosen, None if is_cpu else first)
        vector = problem.solve()
        keys = problem.chips if by == "device" else [each.scenario.model.name for each in chosen]
        found += chosen
        predicted.append(np.exp(-problem.left_out(vector, keys)))
        if first is None and not is_cpu:
            first = problem.layout.fit(vector, Residuals(), Residuals())
    return HeldOut(tuple(found), np.concatenate(predicted))


def _most_devices_first(settings: Sequence[Setting]) -> list[str]:
    """The backends, that of CPUs last."""
    devices = defaultdict[tuple[bool, str], set[str]](set)
    for each in settings:
        devices[each.hardware.kind == "cpu", each.scenario.engine.backend or ""].add(each.row.device)
    return [name for _, name in sorted(devices, key=lambda key: (key[0], -len(devices[key])))]


def _chip(hardware: HardwareSpec) -> tuple[object, ...]:
    """What siblings have in common: boards of one chip."""
    l2 = hardware.level("l2")
    declared = hardware.declared
    return hardware.kind, hardware.maker, declared.compute_units, l2.capacity_bytes if l2 else 0


class _Problem:
    """One backend's figures, as columns, and the search for its numbers."""

    def __init__(self, settings: Sequence[Setting], related: BackendFit | None) -> None:
        self.settings = settings
        self.columns = columns_of(settings)
        self.chips: list[object] = [_chip(each.hardware) for each in settings]
        self.measured = np.log([1.0 / each.measured for each in settings])
        generations = [generation_of(each.hardware) for each in settings]
        versions = [each.scenario.engine.described.version.described for each in settings]
        newest = max(versions, key=lambda text: parse_version(text or "0")[0])
        is_cpu = settings[0].hardware.kind == "cpu"
        self.layout = ParameterLayout(
            _starts(CPU_START if is_cpu else GPU_START, related),
            self.columns.forms,
            sorted(set(generations) - {""}),
            sorted(set(versions) - {newest}),
            related.cycles if related is not None else {},
        )
        self._facts = _Facts(self.columns, settings, generations, versions, self.layout)
        count = Counter((each.row.device, each.row.test) for each in settings)
        totals = np.array([count[each.row.device, each.row.test] for each in settings])
        self._weights = np.sqrt(np.log2(1.0 + totals) / totals)

    def predicted(self, vector: NDArray[Any]) -> NDArray[Any]:
        """log(seconds per token) of each setting."""
        seconds = self._facts.seconds(*self.layout.read(vector))
        return predicted_log_seconds(self.columns, seconds, len(self.settings))

    def solve(self, mask: NDArray[Any] | None = None, start: NDArray[Any] | None = None) -> NDArray[Any]:
        """The numbers that fit the settings of `mask` best. start: from where the search begins"""
        weights = self._weights if mask is None else self._weights * mask
        centre, sd = self.layout.prior

        def errors(vector: NDArray[Any]) -> NDArray[Any]:
            own = weights * _robust(self.predicted(vector) - self.measured)
            return np.concatenate([own, _PRIOR_WEIGHT * (vector - centre) / sd])

        steps = _MOST_STEPS if start is None else _STEPS_AGAIN
        found: NDArray[Any] = least_squares(errors, centre if start is None else start, max_nfev=steps).x
        return found

    def left_out(self, vector: NDArray[Any], keys: Sequence[object]) -> NDArray[Any]:
        """Predictions of each setting by fits without the settings of its key, which are shared out to folds.

        vector: of all settings, where the searches begin
        """
        names = list(dict.fromkeys(keys))
        fold = {name: number % _FOLDS for number, name in enumerate(names)}
        folds = np.array([fold[key] for key in keys])
        found = np.zeros(len(keys))
        for number in range(min(_FOLDS, len(names))):
            out = folds == number
            start = vector if len(names) > 1 else self.layout.prior[0]
            again = self.solve((~out).astype(float), start)
            found[out] = self.predicted(again)[out]
        return found

    def residuals(self, predicted: NDArray[Any]) -> tuple[Residuals, Residuals]:
        """What `predicted` leaves unexplained of decodes, and of prompts; each device counts alike."""
        found = []
        for test in ("tg", "pp"):
            chosen = np.array([each.row.test == test for each in self.settings])
            names = [each.row.device for each, is_in in zip(self.settings, chosen, strict=True) if is_in]
            count = Counter(names)
            shares = np.array([1.0 / count[name] for name in names])
            found.append(_quantiles((self.measured - predicted)[chosen], shares))
        return found[0], found[1]


def _starts(own: dict[str, Start], related: BackendFit | None) -> dict[str, Start]:
    """A backend with few devices starts from the numbers of one with many."""
    if related is None:
        return own
    return {
        name: Start(getattr(related, name) or start.value, start.sd * (_RELATED if start.sd > 1e-3 else 1.0))
        for name, start in own.items()
    }


def _robust(errors: NDArray[Any]) -> NDArray[Any]:
    """Quadratic for small errors, logarithmic for large ones, in a least-squares sum."""
    found: NDArray[Any] = np.sign(errors) * _SMALL * np.sqrt(np.log1p((errors / _SMALL) ** 2))
    return found


def _quantiles(values: NDArray[Any], weights: NDArray[Any]) -> Residuals:
    if not len(values):
        return Residuals()
    order = np.argsort(values)
    place = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    p10, p50, p90 = (round(float(np.interp(q, place, values[order])), 5) for q in (0.1, 0.5, 0.9))
    return Residuals(num_rows=len(values), p10=p10, p50=p50, p90=p90)


class _Facts:
    """What devices declare, as columns beside those of their kernels."""

    def __init__(
        self,
        columns: KernelColumns,
        settings: Sequence[Setting],
        generations: Sequence[str],
        versions: Sequence[str],
        layout: ParameterLayout,
    ) -> None:
        rates = [product_rates(_backend(each), each.hardware) for each in settings]
        devices = [DeviceFacts.of(each.hardware) for each in settings]
        self._columns = columns
        of = columns.setting

        def column(values: Sequence[float]) -> NDArray[Any]:
            found: NDArray[Any] = np.array(values, dtype=float)[of]
            return found

        self._units = column([device.compute_units for device in devices])
        self._clocks = column([device.compute_units * device.clock_hz for device in devices])
        self._bandwidth = column([device.bandwidth for device in devices])
        self._peak = column([device.peak(rate) for device, (rate, _) in zip(devices, rates, strict=True)])
        self._float_peak = column([device.peak(rate) for device, (_, rate) in zip(devices, rates, strict=True)])
        self._vector = column([device.peak("vector") for device in devices])
        self._tdp = column([each.hardware.declared.tdp_w or 65.0 for each in settings])
        self._is_flash = column([each.scenario.engine.attention == "flash" for each in settings]) > 0
        self._has_small = column([has_small_cores(each.hardware) for each in settings]) > 0
        self._generation = _places(generations, layout.generations)[of]
        self._version = _places(versions, layout.versions)[of]

    def seconds(
        self, numbers: dict[str, float], cycles: NDArray[Any], generations: NDArray[Any], versions: NDArray[Any]
    ) -> NDArray[Any]:
        """What each kernel takes; the arguments are those of `ParameterLayout.read`."""
        columns, n = self._columns, numbers
        of_launch, of_memory, of_cycles, of_compute = _rows(generations, self._generation)
        old_launch, old_compute, old_float, old_attention = _rows(versions, self._version)
        slower = power_factor(n["core_w"], n["power"], self._units, self._tdp)
        computing = slower * np.where(self._has_small, n["small_cores"], 1.0)
        launch = (n["launch_s"] + n["unit_launch_s"] * self._units) * of_launch * old_launch
        reached = n["memory_fraction"] * of_memory / slower
        bandwidth = np.minimum(1.0, reached) * self._bandwidth
        is_float = columns.form == (columns.forms.index("float") if "float" in columns.forms else -2)
        products = np.where(
            is_float,
            n["float_compute_fraction"] * old_float * self._float_peak,
            n["compute_fraction"] * old_compute * self._peak,
        )
        products = products * of_compute / computing * np.where(columns.is_experts, n["expert_compute"], 1.0)
        own = cycles[np.maximum(columns.form, 0)] * of_cycles * computing
        rates = MatmulRates(
            launch,
            np.minimum(1.0, reached * np.where(columns.is_experts, n["expert_memory"], 1.0)) * self._bandwidth,
            self._clocks,
            self._units,
            products,
            own,
            n["row_share"],
            n["vector_knee"],
            n["tile"],
            n["half_rows"],
            n["knee"],
        )
        rate = np.where(self._is_flash, n["attention_fraction"], n["score_fraction"])
        share = np.where(self._is_flash, n["kv_fraction"], n["score_kv_fraction"])
        attention = rate * old_attention * of_compute / computing * self._float_peak
        streamed = StreamRates(
            launch,
            np.where(columns.is_attention, attention, self._vector),
            bandwidth,
            np.minimum(1.0, share * of_memory / slower) * self._bandwidth,
        )
        sizes = columns.sizes
        passed = stream_seconds(StreamSizes(sizes.flops, sizes.num_bytes, columns.kv_bytes, sizes.kernels), streamed)
        multiplied: NDArray[Any] = matmul_seconds(sizes, rates, np).duration
        multiplied[columns.form < 0] = passed[columns.form < 0]
        return multiplied


def _backend(setting: Setting) -> BackendFacts:
    engine = setting.scenario.engine
    return engine.described.facts.backends[engine.backend]  # type: ignore[index]  # rows name one


def _places(values: Sequence[str], names: Sequence[str]) -> NDArray[Any]:
    """The number of each value among `names`; one more than the last for those that have no factors."""
    return np.array([names.index(value) if value in names else len(names) for value in values])


def _rows(factors: NDArray[Any], places: NDArray[Any]) -> Any:
    """The factors at `places`, one row for each kind; 1 for those that have none."""
    padded = np.vstack([factors, np.ones(factors.shape[1])])
    return padded[places].T

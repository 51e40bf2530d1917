"""The fit of an engine's backends to recorded figures, and what it says of devices and models that it has not seen.

Residuals are logarithms of seconds per token of each setting (a group's median); a device counts by the logarithm of
how many settings it has, and large residuals next to nothing: hosts that throttle, laptops, memory that is half fitted
are no part of what is to be learned. Intervals come from whole chips left out, siblings together.

The kernels of all figures are columns, priced at once. Numbers are fitted as logarithms; each starts from what is
plausible before any figure is seen, and the prior's standard deviation keeps backends, generations and versions with
few figures near what they start from.
"""

import datetime
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from perfmodel.cost.calibrations.backends import (
    BackendFit,
    BackendFits,
    Factors,
    generation_of,
    has_small_cores,
    power_factor,
    product_rates,
)
from perfmodel.cost.forms.blocks.matmul import BlockSizes, MatmulRates, block_sizes, matmul_seconds, piece_of, pieces
from perfmodel.cost.forms.blocks.stream import StreamRates, StreamSizes, stream_seconds
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.fits import Residuals
from perfmodel.cost.steps.stages import layer_split_of
from perfmodel.errors import PerfmodelError
from perfmodel.evidence.observation import Observation
from perfmodel.evidence.sources.local import DeviceTable, LocalSetup, local_engine, local_scenario, row_tests
from perfmodel.ops.graphs.step import StepGraph, build_graph
from perfmodel.ops.work import BatchShape, Work
from perfmodel.specs.engine.description import BackendFacts
from perfmodel.specs.engine.versions import parse_version
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario

_MATMULS = ("gemm", "moe")
_STREAMED = ("elementwise", "embedding", "sampling", "scan")


class Setting(NamedTuple):
    """What was timed with what stands for it, and the median of its figures; tokens per second."""

    row: LocalSetup
    hardware: HardwareSpec
    scenario: Scenario
    measured: float


class KernelColumns(NamedTuple):
    """A row for each kernel, of each piece, of each step, of each test of each setting.

    test, setting: numbers that a kernel is of; test_setting: the setting of each test
    runs:     how often it runs, for each token of its test
    form:     number of the weights' format among `forms`, -1 for kernels that multiply none
    is_experts, is_attention: kinds of kernels
    sizes:    of multiplications and, in part, of the others; kv_bytes beside them
    """

    test: NDArray[Any]
    setting: NDArray[Any]
    test_setting: NDArray[Any]
    runs: NDArray[Any]
    form: NDArray[Any]
    is_experts: NDArray[Any]
    is_attention: NDArray[Any]
    sizes: BlockSizes
    kv_bytes: NDArray[Any]
    forms: tuple[str, ...]


def columns_of(settings: Sequence[Setting]) -> KernelColumns:
    """All kernels of `settings`."""
    forms: dict[str, int] = {}
    rows: list[tuple[float, ...]] = []
    test_setting: list[int] = []
    for number, setting in enumerate(settings):
        scenario = setting.scenario
        graph = build_graph(scenario.model, scenario.engine, sampling="default", hardware=scenario.hardware)
        budget = scenario.engine.max_num_batched_tokens
        split = layer_split_of(scenario.engine)
        for test in row_tests(setting.row, scenario.model.attention_spans, budget):
            for shape in test.shapes:
                share = split.share(shape.num_tokens) if split is not None else 1.0
                place = (float(len(test_setting)), float(number))
                for count, *sizes in _kernels(graph, shape, scenario.engine.ubatch_size, forms):
                    rows.append((*place, count * share / test.tokens, *sizes))
            test_setting.append(number)
    table = np.array(rows).T
    return KernelColumns(
        table[0].astype(int),
        table[1].astype(int),
        np.array(test_setting),
        table[2],
        table[3].astype(int),
        table[4] > 0,
        table[5] > 0,
        BlockSizes(*table[6:12]),
        table[12],
        tuple(forms),
    )


def _kernels(
    graph: StepGraph, shape: BatchShape, micro_batch: int, forms: dict[str, int]
) -> Iterable[tuple[float, ...]]:
    """(count, form, is_experts, is_attention, sizes ..., kv_bytes) of each kernel of a step."""
    for node in graph.nodes:
        work = node.work(shape)
        if not work.num_kernels:
            continue
        runs = node.expected_runs(shape)
        if work.family in _MATMULS:
            form = forms.setdefault(work.format.removesuffix("_wo") or "float", len(forms))
            for count, sizes in _pieces(work, shape, micro_batch):
                yield (runs * count, form, work.family == "moe", 0.0, *sizes, work.kv_bytes)
            continue
        launches = work.num_kernels
        if work.family == "attention_prefill" and micro_batch:
            launches *= -(-shape.num_tokens // micro_batch)
        num_bytes = work.weight_bytes + work.activation_bytes
        is_attention = work.family not in _STREAMED
        yield (runs, -1.0, 0.0, is_attention, work.flops, num_bytes, launches, 0.0, 1.0, 1.0, work.kv_bytes)


def _pieces(work: Work, shape: BatchShape, micro_batch: int) -> Iterable[tuple[int, BlockSizes]]:
    sizes = block_sizes(work)
    tokens = float(shape.num_tokens if work.family == "moe" else sizes.rows)
    for count, size in pieces(tokens, micro_batch):
        yield count, piece_of(sizes, work.weight_bytes, size / tokens)


def predicted_log_seconds(columns: KernelColumns, seconds: NDArray[Any], num_settings: int) -> NDArray[Any]:
    """log(seconds per token) of each setting from the seconds of each kernel: of the mean rate over its tests."""
    by_test = np.bincount(columns.test, columns.runs * seconds, len(columns.test_setting))
    tests = np.bincount(columns.test_setting, minlength=num_settings)
    rate = np.bincount(columns.test_setting, 1.0 / by_test, num_settings) / tests
    result: NDArray[Any] = -np.log(rate)
    return result


_CYCLES_SD = 0.6


class Start(NamedTuple):
    """value: before the logarithm; sd: of the logarithm, next to nothing for a number that stays"""

    value: float
    sd: float


_FIXED = 1e-4
GPU_START: dict[str, Start] = {
    "launch_s": Start(8e-6, 1.0),
    "unit_launch_s": Start(1e-12, _FIXED),
    "memory_fraction": Start(0.88, 0.1),
    "other_cycles": Start(0.1, 0.5),
    "row_share": Start(0.3, 0.7),
    "vector_knee": Start(3.0, 0.3),
    "compute_fraction": Start(0.4, 0.7),
    "float_compute_fraction": Start(0.5, 0.7),
    "tile": Start(4000.0, 1.2),
    "half_rows": Start(10.0, 0.7),
    "knee": Start(1.6, 0.3),
    "expert_memory": Start(0.8, 0.3),
    "expert_compute": Start(0.7, 0.5),
    "attention_fraction": Start(0.1, 1.0),
    "kv_fraction": Start(0.4, 0.5),
    "score_fraction": Start(0.05, 1.0),
    "score_kv_fraction": Start(0.3, 0.5),
    "core_w": Start(1.0, _FIXED),
    "power": Start(1e-6, _FIXED),
    "small_cores": Start(1.0, _FIXED),
}
CPU_START: dict[str, Start] = {
    **GPU_START,
    "unit_launch_s": Start(5e-7, 1.0),
    "memory_fraction": Start(0.8, 0.3),
    "other_cycles": Start(0.6, 0.5),
    "compute_fraction": Start(0.7, 0.7),
    "float_compute_fraction": Start(0.5, 0.7),
    "tile": Start(10.0, _FIXED),
    "kv_fraction": Start(0.5, 0.4),
    "score_kv_fraction": Start(0.5, 0.4),
    "core_w": Start(3.5, 0.4),
    "power": Start(0.7, 0.4),
    "small_cores": Start(1.5, 0.3),
}
GENERATION_SD = {"launch": 0.3, "memory": 0.05, "cycles": 0.3, "compute": 0.4}
# Small beside the sd of the numbers themselves: where the newest version has no prompts, those of the one before count.
VERSION_SD = {"launch": 0.4, "compute": 0.25, "float_compute": 0.25, "attention": 0.4}


@dataclass(frozen=True)
class ParameterLayout:
    """Which place of the vector is what.

    starts: of the backend's numbers; forms: formats of weights with cycles of their own
    generations, versions: that have factors
    """

    starts: Mapping[str, Start]
    forms: Sequence[str]
    generations: Sequence[str]
    versions: Sequence[str]
    cycles: Mapping[str, float]

    @property
    def prior(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Centre and standard deviations of the vector."""
        centre = [start.value for start in self.starts.values()]
        sd = [start.sd for start in self.starts.values()]
        centre += [self.cycles.get(form, self.starts["other_cycles"].value) for form in self.forms]
        sd += [_CYCLES_SD] * len(self.forms)
        factors = [
            *(list(GENERATION_SD.values()) * len(self.generations)),
            *(list(VERSION_SD.values()) * len(self.versions)),
        ]
        return np.concatenate([np.log(centre), np.zeros(len(factors))]), np.array(sd + factors)

    def read(self, vector: NDArray[Any]) -> tuple[dict[str, float], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """The numbers by name, cycles by form, factors by generation, and by version; none as logarithms."""
        values = np.exp(vector)
        first, second = len(self.starts), len(self.starts) + len(self.forms)
        third = second + len(GENERATION_SD) * len(self.generations)
        numbers = dict(zip(self.starts, values[:first].tolist(), strict=True))
        numbers.update({name: max(1.0, numbers[name]) for name in ("knee", "vector_knee")})  # a sum at most
        by_generation = values[second:third].reshape(-1, len(GENERATION_SD))
        by_version = values[third:].reshape(-1, len(VERSION_SD))
        return numbers, values[first:second], by_generation, by_version

    def fit(self, vector: NDArray[Any], decode: Residuals, prompt: Residuals) -> BackendFit:
        """The vector as a file has it.

        vector: of the fit; decode, prompt: what figures of devices that were left out leave unexplained
        """
        numbers, cycles, generations, versions = self.read(vector)
        if numbers["power"] < 1e-3:
            numbers.update(power=0.0, core_w=1.0)
        if numbers["unit_launch_s"] < 1e-10:
            numbers["unit_launch_s"] = 0.0
        return BackendFit(
            **{name: _rounded(value) for name, value in numbers.items()},
            cycles={form: _rounded(value) for form, value in zip(self.forms, cycles.tolist(), strict=True)},
            by_generation=_factors(self.generations, GENERATION_SD, generations),
            by_version=_factors(self.versions, VERSION_SD, versions),
            decode_residuals=decode,
            prompt_residuals=prompt,
        )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _factors(names: Sequence[str], fields: Mapping[str, float], values: NDArray[Any]) -> dict[str, Factors]:
    return {
        name: Factors(**{field: _rounded(value) for field, value in zip(fields, row, strict=True)})
        for name, row in zip(names, values.tolist(), strict=True)
    }


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


def settings_of(rows: Sequence[Observation], folder: Path) -> list[Setting]:
    """What a fit is made to: rows of one setting as one, with the median of their figures.

    folder: where `devices.csv` is
    """
    table, groups = DeviceTable(folder), defaultdict[tuple[str, LocalSetup], list[float]](list)
    for row in rows:
        if row.is_reliable and not any(word in row.flags for word in _NOT_FITTED):
            setup: LocalSetup = row.setup
            version, detail = local_engine(setup).version or "", setup.backend_detail[:2]
            key = replace(setup, build=version, backend_detail=detail, date=None)
            groups[row.source, key].append(row.metrics[setup.metric])
    result = []
    for (_, setup), figures in groups.items():
        try:
            hardware = table.device(setup.device, setup.device_class)
            scenario = local_scenario(setup, setup.stored_model(), hardware)
            result.append(Setting(setup, hardware, scenario, median(figures)))
        except PerfmodelError:
            continue
    return result


def fit_backends(rows: Sequence[Observation], folder: Path, engine: str, command: str) -> BackendFits:
    """The numbers of all backends of `engine` that `rows` have figures of.

    rows, folder: of the table; engine: its name; command: that is written into the file

    Raises PerfmodelError where no row is of this engine.
    """
    members = [item for item in settings_of(rows, folder) if item.scenario.engine.profile == engine]
    fits: dict[str, BackendFit] = {}
    first: BackendFit | None = None
    for backend in _most_devices_first(members):
        chosen = [item for item in members if item.scenario.engine.backend == backend]
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


def held_out(rows: Sequence[Observation], folder: Path, by: str, progress: Progress = lambda _: None) -> HeldOut:
    """Predictions of fits from which whole chips (by="device") or whole models (by="model") were left out.

    rows, folder: of the table; progress: is told which backend is being fitted
    """
    members = settings_of(rows, folder)
    groups: dict[tuple[str, str], list[Setting]] = defaultdict(list)
    for entry in members:
        groups[entry.scenario.engine.profile, entry.scenario.engine.backend or ""].append(entry)
    result: list[Setting] = []
    predicted: list[NDArray[Any]] = []
    first: BackendFit | None = None
    for (_, backend), chosen in sorted(groups.items(), key=lambda item: -len({x.row.device for x in item[1]})):
        progress(backend)
        is_cpu = chosen[0].hardware.kind == "cpu"
        problem = _Problem(chosen, None if is_cpu else first)
        vector = problem.solve()
        keys = problem.chips if by == "device" else [entry.scenario.model.name for entry in chosen]
        result += chosen
        predicted.append(np.exp(-problem.left_out(vector, keys)))
        if first is None and not is_cpu:
            first = problem.layout.fit(vector, Residuals(), Residuals())
    return HeldOut(tuple(result), np.concatenate(predicted))


def _most_devices_first(settings: Sequence[Setting]) -> list[str]:
    """The backends, that of CPUs last."""
    devices = defaultdict[tuple[bool, str], set[str]](set)
    for item in settings:
        devices[item.hardware.kind == "cpu", item.scenario.engine.backend or ""].add(item.row.device)
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
        self.chips: list[object] = [_chip(item.hardware) for item in settings]
        self.measured = np.log([1.0 / item.measured for item in settings])
        generations = [generation_of(item.hardware) for item in settings]
        versions = [item.scenario.engine.described.version.described for item in settings]
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
        count = Counter((item.row.device, item.row.test) for item in settings)
        totals = np.array([count[item.row.device, item.row.test] for item in settings])
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
        result: NDArray[Any] = least_squares(errors, centre if start is None else start, max_nfev=steps).x
        return result

    def left_out(self, vector: NDArray[Any], keys: Sequence[object]) -> NDArray[Any]:
        """Predictions of each setting by fits without the settings of its key, which are shared out to folds.

        vector: of all settings, where the searches begin
        """
        names = list(dict.fromkeys(keys))
        fold = {name: number % _FOLDS for number, name in enumerate(names)}
        folds = np.array([fold[key] for key in keys])
        result = np.zeros(len(keys))
        for number in range(min(_FOLDS, len(names))):
            out = folds == number
            start = vector if len(names) > 1 else self.layout.prior[0]
            again = self.solve((~out).astype(float), start)
            result[out] = self.predicted(again)[out]
        return result

    def residuals(self, predicted: NDArray[Any]) -> tuple[Residuals, Residuals]:
        """What `predicted` leaves unexplained of decodes, and of prompts; each device counts alike."""
        result = []
        for test in ("tg", "pp"):
            chosen = np.array([item.row.test == test for item in self.settings])
            names = [item.row.device for item, is_in in zip(self.settings, chosen, strict=True) if is_in]
            count = Counter(names)
            shares = np.array([1.0 / count[name] for name in names])
            result.append(_quantiles((self.measured - predicted)[chosen], shares))
        return result[0], result[1]


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
    result: NDArray[Any] = np.sign(errors) * _SMALL * np.sqrt(np.log1p((errors / _SMALL) ** 2))
    return result


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
        rates = [product_rates(_backend(item), item.hardware) for item in settings]
        devices = [DeviceFacts.of(item.hardware) for item in settings]
        self._columns = columns
        of = columns.setting

        def column(values: Sequence[float]) -> NDArray[Any]:
            result: NDArray[Any] = np.array(values, dtype=float)[of]
            return result

        self._units = column([device.compute_units for device in devices])
        self._clocks = column([device.compute_units * device.clock_hz for device in devices])
        self._bandwidth = column([device.bandwidth for device in devices])
        self._peak = column([device.peak(rate) for device, (rate, _) in zip(devices, rates, strict=True)])
        self._float_peak = column([device.peak(rate) for device, (_, rate) in zip(devices, rates, strict=True)])
        self._vector = column([device.peak("vector") for device in devices])
        self._tdp = column([item.hardware.declared.tdp_w or 65.0 for item in settings])
        self._is_flash = column([item.scenario.engine.attention == "flash" for item in settings]) > 0
        self._has_small = column([has_small_cores(item.hardware) for item in settings]) > 0
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

"""Fits an engine's backends to recorded rates, with cross-validated intervals.

Residuals are log seconds per token per setting (median of a group). A device weighs log(its settings), and large
residuals weigh almost nothing: throttling hosts, laptops and partly populated memory should not be learned. Intervals
come from leaving whole chips out, siblings together.

All kernels are priced at once, as columns. Parameters are fitted as logarithms with priors, which hold backends,
generations and versions with little data."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from perfmodel.cost.calibrations import backends as calibrated
from perfmodel.cost.kernel_models import blocks
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.steps.stages import layer_split_of
from perfmodel.dates import today
from perfmodel.errors import PerfmodelError
from perfmodel.evidence.fit.kernels import rounded, rounded_residuals, softened, weighted_quantiles
from perfmodel.evidence.observation import Observation, grouped
from perfmodel.evidence.sources.local import DeviceTable, LocalSetup, local_engine, local_scenario, row_tests
from perfmodel.files.tables import load_table
from perfmodel.ops.graphs.step import StepGraph, build_graph
from perfmodel.ops.work import BatchShape
from perfmodel.specs.engine.description import BackendFacts
from perfmodel.specs.engine.versions import parse_version
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario

Vector = NDArray[Any]

_MATMULS = ("gemm", "moe")
_STREAMED = ("elementwise", "embedding", "sampling", "scan")
_SMALL = 0.12  # residuals beyond it count less and less
_PRIOR_WEIGHT = 0.05  # of a standard deviation from the start, in residuals of one setting
_MAX_STEPS, _STEPS_AGAIN = 40, 6
_FOLDS = 10
_FEWEST_CHIPS = 5  # to leave out one after another; with fewer, intervals are those of the backend with most devices
_FEW = Residuals(num_rows=1, p10=-0.3, p90=0.3)  # of an engine that was recorded on fewer chips [assumed]
_RELATED = 0.5  # of the starts' deviations, for backends that start from the numbers of another one
_SOURCE = "llama-bench, LocalScore and MLX figures published by others, cited in the header of the report"
# Beside those that are apart: what a row's flags say of it that a fit cannot use.
_NOT_FITTED = ("memory", "cluster")


class Setting(NamedTuple):
    """What was timed, its scenario, and the median rate in tokens/s."""

    row: LocalSetup
    hardware: HardwareSpec
    scenario: Scenario
    measured: float

    @property
    def is_cpu(self) -> bool:
        return self.hardware.kind == "cpu"

    @property
    def backend(self) -> str:
        return self.scenario.engine.backend or ""


def settings_of(rows: Sequence[Observation], folder: Path) -> list[Setting]:
    """Settings to fit: rows of one setting merged by their median. folder: of `devices.csv`"""
    table, groups = DeviceTable(folder), defaultdict[tuple[str, LocalSetup], list[float]](list)
    for row in rows:
        if row.is_reliable and not any(word in row.flags for word in _NOT_FITTED):
            groups[row.source, merged_setup(row)].append(row.metrics[row.setup.metric])
    result = []
    for (_, setup), figures in groups.items():
        with suppress(PerfmodelError):
            hardware = table.device(setup.device, setup.device_class)
            scenario = local_scenario(setup, setup.stored_model(), hardware)
            result.append(Setting(setup, hardware, scenario, median(figures)))
    return result


def merged_setup(row: Observation) -> LocalSetup:
    """The row's setup without what rows of one setting may differ in: builds of one version, and dates."""
    setup: LocalSetup = row.setup
    version, detail = local_engine(setup).version or "", setup.backend_detail[:2]
    return replace(setup, build=version, backend_detail=detail, date=None)


class KernelColumns(NamedTuple):
    """A row per kernel of each piece of each step of each test of each setting.

    test, setting: indices the kernel belongs to; test_setting: setting of each test
    runs:     executions per token of its test
    form:     index of the weight format in `forms`, -1 for kernels without multiplication
    is_experts, is_attention: kinds of kernels
    sizes:    of multiplications and, partly, others; kv_bytes in addition"""

    test: Vector
    setting: Vector
    test_setting: Vector
    runs: Vector
    form: Vector
    is_experts: Vector
    is_attention: Vector
    sizes: blocks.BlockSizes
    kv_bytes: Vector
    forms: tuple[str, ...]


def columns_of(settings: Sequence[Setting]) -> KernelColumns:
    """All kernels of `settings`."""
    forms: dict[str, int] = {}
    rows: list[tuple[float, ...]] = []
    test_setting: list[int] = []
    for number, setting in enumerate(settings):
        scenario = setting.scenario
        graph = build_graph(scenario.model, scenario.engine, sampling="default", hardware=scenario.hardware)
        budget, micro_batch = scenario.engine.max_num_batched_tokens, scenario.engine.ubatch_size
        split = layer_split_of(scenario.engine)
        for test in row_tests(setting.row, scenario.model.attention_spans, budget):
            for shape in test.shapes:
                share = split.share(shape.num_tokens) if split is not None else 1.0
                place = (float(len(test_setting)), float(number))
                for count, *sizes in _kernels(graph, shape, micro_batch, forms):
                    rows.append((*place, count * share / test.tokens, *sizes))
            test_setting.append(number)
    in_test, in_setting, runs, form, is_experts, is_attention, *sizes, kv_bytes = np.array(rows).T
    places = in_test.astype(int), in_setting.astype(int), np.array(test_setting)
    kinds = form.astype(int), is_experts > 0, is_attention > 0
    return KernelColumns(*places, runs, *kinds, blocks.BlockSizes(*sizes), kv_bytes, tuple(forms))


def _kernels(
    graph: StepGraph, shape: BatchShape, micro_batch: int, forms: dict[str, int]
) -> Iterable[tuple[float, ...]]:
    """(count, form, is_experts, is_attention, sizes ..., kv_bytes) of each kernel of a step."""
    for node in graph.nodes:
        work = node.work(shape)
        if not work.num_kernels:
            continue
        runs, is_experts = node.expected_runs(shape), work.family == "moe"
        if work.family in _MATMULS:
            form = forms.setdefault(work.format.removesuffix("_wo") or "float", len(forms))
            sizes = blocks.block_sizes(work)
            tokens = float(shape.num_tokens if is_experts else sizes.rows)
            for count, size in blocks.pieces(tokens, micro_batch):
                piece = blocks.piece_of(sizes, work.weight_bytes, size / tokens)
                yield (runs * count, form, is_experts, 0.0, *piece, work.kv_bytes)
            continue
        launches = work.num_kernels
        if work.family == "attention_prefill" and micro_batch:
            launches *= -(-shape.num_tokens // micro_batch)
        num_bytes, is_attention = work.weight_bytes + work.activation_bytes, work.family not in _STREAMED
        yield (runs, -1.0, 0.0, is_attention, work.flops, num_bytes, launches, 0.0, 1.0, 1.0, work.kv_bytes)


_CYCLES_SD = 0.6


class Start(NamedTuple):
    """value: before the logarithm; sd: of the logarithm, near 0 for a fixed parameter"""

    value: float
    sd: float


_TABLE = load_table("fit_parameters")
GENERATION_SD: Mapping[str, float] = _TABLE["generation_sd"]
VERSION_SD: Mapping[str, float] = _TABLE["version_sd"]


@dataclass(frozen=True)
class ParameterLayout:
    """Layout of the parameter vector. starts: of the backend's numbers; forms: weight formats with their own cycles;
    generations, versions: that have factors"""

    starts: Mapping[str, Start]
    forms: Sequence[str]
    generations: Sequence[str]
    versions: Sequence[str]
    cycles: Mapping[str, float]

    @property
    def prior(self) -> tuple[Vector, Vector]:
        """Mean and standard deviations of the vector."""
        centre, sd = (list(column) for column in zip(*self.starts.values(), strict=True))
        centre += [self.cycles.get(form, self.starts["other_cycles"].value) for form in self.forms]
        sd += [_CYCLES_SD] * len(self.forms)
        factors = [*GENERATION_SD.values()] * len(self.generations) + [*VERSION_SD.values()] * len(self.versions)
        return np.concatenate([np.log(centre), np.zeros(len(factors))]), np.array(sd + factors)

    def read(self, vector: Vector) -> tuple[dict[str, float], Vector, Vector, Vector]:
        """Numbers by name, cycles by form, factors by generation and by version; not as logarithms."""
        lengths = len(self.starts), len(self.forms), len(GENERATION_SD) * len(self.generations)
        values, cycles, by_generation, by_version = np.split(np.exp(vector), np.cumsum(lengths))
        numbers = dict(zip(self.starts, values.tolist(), strict=True))
        numbers.update({name: max(1.0, numbers[name]) for name in ("knee", "vector_knee")})  # a sum at most
        return numbers, cycles, by_generation.reshape(-1, len(GENERATION_SD)), by_version.reshape(-1, len(VERSION_SD))

    def fit(self, vector: Vector, decode: Residuals, prompt: Residuals) -> calibrated.BackendFit:
        """The vector as a file stores it. decode, prompt: residuals of left-out devices"""
        numbers, cycles, generations, versions = self.read(vector)
        if numbers["power"] < 1e-3:
            numbers.update(power=0.0, core_w=1.0)
        if numbers["unit_launch_s"] < 1e-10:
            numbers["unit_launch_s"] = 0.0

        def factors(names: Sequence[str], fields: Mapping[str, float], values: Vector) -> dict[str, calibrated.Factors]:
            rows = zip(names, values.tolist(), strict=True)
            return {name: calibrated.Factors(**rounded(dict(zip(fields, row, strict=True)))) for name, row in rows}

        return calibrated.BackendFit(
            **rounded(numbers),
            cycles=rounded(dict(zip(self.forms, cycles.tolist(), strict=True))),
            by_generation=factors(self.generations, GENERATION_SD, generations),
            by_version=factors(self.versions, VERSION_SD, versions),
            decode_residuals=decode,
            prompt_residuals=prompt,
        )


def fit_backends(rows: Sequence[Observation], folder: Path, engine: str, command: str) -> calibrated.BackendFits:
    """Fit all backends of `engine` in `rows`; folder: of `devices.csv`; command: recorded in the file. Raises
    PerfmodelError without rows of this engine."""
    members = [item for item in settings_of(rows, folder) if item.scenario.engine.profile == engine]
    groups = grouped((item.backend, item) for item in members).values()
    cpus_last = sorted(groups, key=lambda group: (group[0].is_cpu, -_num_devices(group)))
    fits: dict[str, calibrated.BackendFit] = {}
    for problem, vector in _solved(cpus_last):
        decode, prompt = problem.residuals(problem.left_out(vector, problem.chips))
        if len(set(problem.chips)) < _FEWEST_CHIPS:
            first = next(iter(fits.values()), None)
            decode, prompt = (first.decode_residuals, first.prompt_residuals) if first is not None else (_FEW, _FEW)
        fits[problem.settings[0].backend] = problem.layout.fit(vector, decode, prompt)
    if not fits:
        raise PerfmodelError(f"the table has no figures of {engine}; give one that has, or another --engine.")
    date, like = today(), next(iter(fits))
    return calibrated.BackendFits(engine=engine, source=_SOURCE, date=date, command=command, like=like, backends=fits)


def held_out(rows: Sequence[Observation], folder: Path, by: str) -> tuple[list[Setting], Vector]:
    """The settings, and their tokens per second predicted by fits without their chips (by="device") or models
    (by="model"). rows, folder: of the table"""
    settings = settings_of(rows, folder)
    groups = grouped(((item.scenario.engine.profile, item.backend), item) for item in settings).values()
    result: list[Setting] = []
    predicted: list[Vector] = []
    for problem, vector in _solved(sorted(groups, key=lambda group: -_num_devices(group))):
        keys = problem.chips if by == "device" else [entry.scenario.model.name for entry in problem.settings]
        result += problem.settings
        predicted.append(np.exp(-problem.left_out(vector, keys)))
    if not result:
        raise PerfmodelError("the table has no rows that can be fitted to; give one that has.")
    return result, np.concatenate(predicted)


def _num_devices(settings: Iterable[Setting]) -> int:
    return len({item.row.device for item in settings})


def _solved(groups: Iterable[list[Setting]]) -> Iterator[tuple["_Problem", Vector]]:
    """Each backend's problem and solution; GPU backends start from the first one's solution."""
    first: calibrated.BackendFit | None = None
    for chosen in groups:
        problem = _Problem(chosen, None if chosen[0].is_cpu else first)
        vector = problem.solve()
        yield problem, vector
        if first is None and not chosen[0].is_cpu:
            first = problem.layout.fit(vector, Residuals(), Residuals())


def _chip(hardware: HardwareSpec) -> tuple[object, ...]:
    """Identifies boards of one chip."""
    l2, declared = hardware.level("l2"), hardware.declared
    return hardware.kind, hardware.maker, declared.compute_units, l2.capacity_bytes if l2 else 0


class _Problem:
    """One backend's data and its optimization problem."""

    def __init__(self, settings: Sequence[Setting], related: calibrated.BackendFit | None) -> None:
        self.settings = settings
        self.columns = columns_of(settings)
        self.chips: list[object] = [_chip(item.hardware) for item in settings]
        self.measured = np.log([1.0 / item.measured for item in settings])
        generations = [calibrated.generation_of(item.hardware) for item in settings]
        versions = [item.scenario.engine.described.version.described for item in settings]
        newest = max(versions, key=lambda text: parse_version(text or "0")[0])
        starts = _starts(settings[0].is_cpu, related)
        cycles, others = related.cycles if related is not None else {}, sorted(set(versions) - {newest})
        self.layout = ParameterLayout(starts, self.columns.forms, sorted(set(generations) - {""}), others, cycles)
        count = Counter((item.row.device, item.row.test) for item in settings)
        totals = np.array([count[item.row.device, item.row.test] for item in settings])
        self._weights = np.sqrt(np.log2(1.0 + totals) / totals)

        def column(values: Iterable[float]) -> Vector:
            return np.array(list(values), dtype=float)[self.columns.setting]

        rates = [calibrated.product_rates(_backend(item), item.hardware) for item in settings]
        devices = [DeviceFacts.of(item.hardware) for item in settings]
        self._units = column(device.compute_units for device in devices)
        self._clocks = column(device.compute_units * device.clock_hz for device in devices)
        self._bandwidth = column(device.bandwidth for device in devices)
        self._peak = column(device.peak(rate) for device, (rate, _) in zip(devices, rates, strict=True))
        self._float_peak = column(device.peak(rate) for device, (_, rate) in zip(devices, rates, strict=True))
        self._vector = column(device.peak("vector") for device in devices)
        self._tdp = column(item.hardware.declared.tdp_w or 65.0 for item in settings)
        self._is_flash = column(item.scenario.engine.attention == "flash" for item in settings) > 0
        self._has_small = column(calibrated.has_small_cores(item.hardware) for item in settings) > 0
        self._generation = _places(generations, self.layout.generations)[self.columns.setting]
        self._version = _places(versions, self.layout.versions)[self.columns.setting]

    def predicted(self, vector: Vector) -> Vector:
        """log(seconds per token) of each setting, from the mean rate over its tests."""
        columns, count = self.columns, len(self.settings)
        by_test = np.bincount(columns.test, columns.runs * self._seconds(vector), len(columns.test_setting))
        tests = np.bincount(columns.test_setting, minlength=count)
        return -np.log(np.bincount(columns.test_setting, 1.0 / by_test, count) / tests)

    def _seconds(self, vector: Vector) -> Vector:
        n, cycles, generations, versions = self.layout.read(vector)
        columns, sizes = self.columns, self.columns.sizes
        of_launch, of_memory, of_cycles, of_compute = _rows(generations, self._generation)
        old_launch, old_compute, old_float, old_attention = _rows(versions, self._version)
        slower = calibrated.power_factor(n["core_w"], n["power"], self._units, self._tdp)
        computing = slower * np.where(self._has_small, n["small_cores"], 1.0)
        launch = (n["launch_s"] + n["unit_launch_s"] * self._units) * of_launch * old_launch
        reached = n["memory_fraction"] * of_memory / slower
        is_float = columns.form == (columns.forms.index("float") if "float" in columns.forms else -2)
        of_floats = n["float_compute_fraction"] * old_float * self._float_peak
        products = np.where(is_float, of_floats, n["compute_fraction"] * old_compute * self._peak)
        rates = blocks.MatmulRates(
            launch,
            np.minimum(1.0, reached * np.where(columns.is_experts, n["expert_memory"], 1.0)) * self._bandwidth,
            self._clocks,
            self._units,
            products * of_compute / computing * np.where(columns.is_experts, n["expert_compute"], 1.0),
            cycles[np.maximum(columns.form, 0)] * of_cycles * computing,
            *(n[name] for name in ("row_share", "vector_knee", "tile", "half_rows", "knee")),
        )
        rate = np.where(self._is_flash, n["attention_fraction"], n["score_fraction"])
        share = np.where(self._is_flash, n["kv_fraction"], n["score_kv_fraction"])
        attention = rate * old_attention * of_compute / computing * self._float_peak
        peaks = np.where(columns.is_attention, attention, self._vector)
        speeds = (np.minimum(1.0, part) * self._bandwidth for part in (reached, share * of_memory / slower))
        streamed = blocks.StreamRates(launch, peaks, *speeds)
        passed = blocks.stream_seconds(sizes, columns.kv_bytes, streamed)
        multiplied: Vector = blocks.matmul_seconds(sizes, rates, np).duration
        multiplied[columns.form < 0] = passed[columns.form < 0]
        return multiplied

    def solve(self, mask: Vector | None = None, start: Vector | None = None) -> Vector:
        """The best fit to the settings of `mask`, searched from `start`."""
        weights = self._weights if mask is None else self._weights * mask
        centre, sd = self.layout.prior

        def errors(vector: Vector) -> Vector:
            own = weights * softened(self.predicted(vector) - self.measured, _SMALL)
            return np.concatenate([own, _PRIOR_WEIGHT * (vector - centre) / sd])

        steps = _MAX_STEPS if start is None else _STEPS_AGAIN
        result: Vector = least_squares(errors, centre if start is None else start, max_nfev=steps).x
        return result

    def left_out(self, vector: Vector, keys: Sequence[object]) -> Vector:
        """Out-of-fold predictions, folds by key; searches start at `vector`, the fit to all."""
        names = list(dict.fromkeys(keys))
        fold = {name: number % _FOLDS for number, name in enumerate(names)}
        folds = np.array([fold[key] for key in keys])
        result = np.zeros(len(keys))
        for number in range(min(_FOLDS, len(names))):
            out = folds == number
            again = self.solve((~out).astype(float), vector if len(names) > 1 else self.layout.prior[0])
            result[out] = self.predicted(again)[out]
        return result

    def residuals(self, predicted: Vector) -> tuple[Residuals, Residuals]:
        """Residuals of decodes and prompts; devices weigh equally."""
        result = []
        for test in ("tg", "pp"):
            chosen = np.array([item.row.test == test for item in self.settings])
            names = [item.row.device for item in self.settings if item.row.test == test]
            left = (self.measured - predicted)[chosen]
            weights = np.array([1.0 / names.count(name) for name in names])
            quantiles = weighted_quantiles(left, weights) if names else (0.0, 0.0, 0.0)
            result.append(rounded_residuals(quantiles, len(left)))
        return result[0], result[1]


def _starts(is_cpu: bool, related: calibrated.BackendFit | None) -> dict[str, Start]:
    """A backend with few devices starts from the numbers of a related one."""
    rows = _TABLE["backends"] | (_TABLE["backends_of_cpus"] if is_cpu else {})
    own = {name: Start(*row) for name, row in rows.items()}
    if related is None:
        return own
    return {
        name: Start(getattr(related, name) or start.value, start.sd * (_RELATED if start.sd > 1e-3 else 1.0))
        for name, start in own.items()
    }


def _backend(setting: Setting) -> BackendFacts:
    engine = setting.scenario.engine
    return engine.described.facts.backends[engine.backend]  # type: ignore[index]  # rows name one


def _places(values: Sequence[str], names: Sequence[str]) -> Vector:
    """Index of each value in `names`; len(names) if absent."""
    return np.array([names.index(value) if value in names else len(names) for value in values])


def _rows(factors: Vector, places: Vector) -> Any:
    return np.vstack([factors, np.ones(factors.shape[1])])[places].T

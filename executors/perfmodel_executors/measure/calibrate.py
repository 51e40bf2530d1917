"""Calibration of this machine's CPU: a grid of steps of one model or several, timed in pairs, fitted to their graphs.
Half a minute a model. It predicts steps of those models: operators are told apart only as far as the steps differ."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from perfmodel.cost import Calibration, save_calibration
from perfmodel.cost.calibrations.for_all import routing_of
from perfmodel.cost.steps.speculation import passes_of
from perfmodel.errors import DoesNotFitError, SpecError
from perfmodel.evidence.fit.whole_steps import features, fit_steps
from perfmodel.files.catalog import data_dir
from perfmodel.models.params import count_parameters
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import on_device
from perfmodel.ops.graphs.drafting import Drafter, drafter_of
from perfmodel.ops.graphs.step import StepGraph, build_graph
from perfmodel.ops.routing import Routing, slowest_uniform_routing
from perfmodel.ops.work import BatchShape
from perfmodel.specs import load_hardware, load_model
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import SpeculativeConfig
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Adapters, ExpertRouting, Sampling
from perfmodel_executors.measure import cpu_steps
from perfmodel_executors.measure.bench import StepBench, StepGrants
from perfmodel_executors.measure.ceilings import CopyCase, copy_cases, measure_ceilings, with_measured_link
from perfmodel_executors.measure.protocol import DriftMeter, Measured, PairedCases, measure_together
from perfmodel_executors.models.random_weights import TRAINED
from perfmodel_executors.models.support import CPU
from perfmodel_executors.parallel.ranks import LeadingRunner, Ranks
from perfmodel_executors.runner import RunnerSetup
from perfmodel_executors.sampling import settings_of
from perfmodel_executors.speculation.build import build_speculator

ENGINE = "perfmodel"  # the engine that a calibration of this executor is for
DEFAULT_MODELS = ("tiny-llama", "tiny-moe")
MIN_ROUNDS = 10
_MAX_PARAMETERS = 5e8
_DEFAULT = Sampling()
_DEFAULT_RANGE = cpu_steps.StepRange()

Progress = Callable[[int, int | None], None]


class StepCase(NamedTuple):
    """A step to time: of the model, or of what drafts for it."""

    shape: StepGrants
    is_draft: bool = False


class ServedModel(NamedTuple):
    """A model as an engine serves it, and the range of its steps to time; load: what `routing` makes of a step."""

    model: ModelSpec
    hardware: HardwareSpec
    engine: EngineSpec
    span: cpu_steps.StepRange
    seed: int = 0
    sampling: Sampling = _DEFAULT
    routing: ExpertRouting = TRAINED
    load: Routing = slowest_uniform_routing
    adapters: Adapters | None = None

    @classmethod
    def of(cls, scenario: Scenario) -> "ServedModel":
        where = (scenario.hardware, scenario.engine, cpu_steps.scenario_range(scenario))
        named = scenario.routing != TRAINED
        load = routing_of(scenario) if named else slowest_uniform_routing  # random routers choose nearly evenly
        adapters = scenario.traffic.adapters
        return cls(scenario.model, *where, scenario.seed, scenario.sampling, scenario.routing, load, adapters)

    @property
    def num_adapters(self) -> int:
        return 0 if self.adapters is None else self.adapters.count


class StepTimes:
    """Steps of one model and its drafter, and their times once `measured`; copies: of KV blocks to a second tier."""

    measured: Measured[StepCase]
    copies: Measured[CopyCase] | None = None

    def __init__(self, served: ServedModel, ranks: Ranks) -> None:
        self.served = served
        model, engine, span = served.model, served.engine, served.span
        settings = settings_of(served.sampling, model)
        self.setup = RunnerSetup(
            model, engine, 0, CPU, served.seed, "torch", settings, served.routing, served.num_adapters
        )
        self.runner = runner = ranks.runner(self.setup)
        leads = isinstance(runner, LeadingRunner)
        self.speculator = None if leads else build_speculator(runner, engine, seed=served.seed)
        bench = StepBench(runner, served.seed)
        reference = bench.step(cpu_steps.REFERENCE if runner.keeps_kv else cpu_steps.REFERENCE_WITHOUT_CACHE)
        self._graphs = {False: self._graph()}
        cases = {StepCase(shape): bench.step(shape) for shape in cpu_steps.calibration_grid(span)}
        drafter = drafter_of(model, engine, "greedy")
        passes = None if self.speculator is None else self.speculator.proposer.runner
        if drafter is not None and passes is not None:
            self._graphs[True] = drafter.graph
            bench = StepBench(passes, served.seed)
            assert engine.speculative_config is not None
            widest = widest_pass(engine.speculative_config, drafter)
            grid = cpu_steps.drafting_grid(span, widest, drafter.computes_prompts)
            cases |= {StepCase(shape, True): bench.step(shape) for shape in grid}
        self.group = PairedCases(cases, reference, runner.new_clock())

    @property
    def rows(self) -> list[dict[tuple[str, str], float]]:
        """Features of each step, for a fit."""
        spans, hardware = self.served.model.attention_spans, self.served.hardware
        rows = []
        for shape, is_draft in self.group.cases:
            graph = self._graphs[is_draft] if shape.layers is None else self._graph(shape.layers)
            rows.append(features(graph, hardware, shape.batch_shape(spans, self.served.num_adapters)))
        return rows

    def _graph(self, layers: int | None = None) -> StepGraph:
        served = self.served
        model = on_device(served.model, served.hardware)
        if model.exits is not None:
            reach = tuple(float(layers is None or i < layers) for i in range(model.num_layers))
            model = replace(model, exits=replace(model.exits, reach=reach))
        method = served.sampling.method
        return build_graph(model, served.engine, sampling=method, routing=served.load, adapters=served.adapters)

    def with_link(self, scenario: Scenario) -> Scenario:
        """The scenario with its second tier behind the link that was measured, where it has one."""
        engine, copies = scenario.engine, self.copies
        if engine.kv_offload is None or copies is None:
            return scenario
        offload = with_measured_link(engine.kv_offload, scenario.hardware, copies, self.runner.cache.block_bytes)
        return scenario.model_copy(update={"engine": engine.model_copy(update={"kv_offload": offload})})

    def drift_meter(self, every: int = 1) -> DriftMeter:
        clock = self.runner.new_clock()
        return DriftMeter(self.group.reference, self.measured.reference_s, every=every, clock_ns=clock)


class CalibratedMachine(NamedTuple):
    """A calibration for one scenario, with the timings it came from."""

    calibration: Calibration
    times: StepTimes


def calibrate_cpu(
    models: Sequence[str] | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
    budget_s: float = 25.0,
    min_rounds: int = MIN_ROUNDS,
    span: cpu_steps.StepRange = _DEFAULT_RANGE,
) -> tuple[Calibration, Path]:
    """Measures this machine on `models`, fits them together, and writes the calibration of device `cpu` to `out`.
    budget_s: wall seconds of timed rounds per model, at least `min_rounds`; span: of the steps to time."""
    hardware, engine = load_hardware("cpu"), EngineSpec(dtype="bfloat16", profile=ENGINE)
    specs = [load_model(name) for name in models or DEFAULT_MODELS]
    served = [ServedModel(model, hardware, engine, span) for model in specs]
    times = [time_together([own], budget_s, min_rounds, progress)[0] for own in served]
    command = "perfmodel calibrate --device cpu" + "".join(f" --model {name}" for name in models or ())
    calibration = fitted(hardware, times, command)
    path = out or data_dir("calibrations") / f"{calibration.device}@{calibration.engine}.yaml"
    try:
        save_calibration(calibration, path)
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror or error}; name a file that can be written with --out.") from None
    return calibration, path


def calibrate_machine(
    scenario: Scenario,
    budget_s: float = 40.0,
    min_rounds: int = MIN_ROUNDS,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> CalibratedMachine:
    """Measures this machine on the scenario's model, in the range of shapes that it can produce; budget_s: wall seconds
    for the timed rounds, at least `min_rounds`; ranks: the processes that serve it."""
    times = time_together([ServedModel.of(scenario)], budget_s, min_rounds, progress, ranks)
    return CalibratedMachine(fitted(scenario.hardware, times, f"perfmodel validate executor {scenario.name}"), times[0])


def time_together(
    served: Sequence[ServedModel],
    budget_s: float,
    min_rounds: int = MIN_ROUNDS,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> list[StepTimes]:
    """Times the calibration grids of several models in turns, so that their times compare, on one thread of each of
    `ranks`; budget_s: wall seconds for the timed rounds, at least `min_rounds`."""
    for own in served:
        active = count_parameters(own.model).active
        if active > _MAX_PARAMETERS:  # one core computes a few steps a second, and a grid of steps needs thousands
            raise DoesNotFitError(
                f"{own.model.name} computes {active / 1e9:.1f} billion parameters per token; timing a grid of its "
                f"steps on one core would take hours. Calibrate on a model of at most {_MAX_PARAMETERS / 1e9:g} "
                f"billion."
            )
    torch.set_num_threads(1)  # barriers between threads wait for whole scheduler quanta on a shared machine
    alone = Ranks()
    times = [StepTimes(own, alone if own.engine.num_devices == 1 else ranks or alone) for own in served]
    copying = [part for part in times if part.served.engine.kv_offload is not None]
    groups: list[PairedCases[Any]] = [part.group for part in times]
    groups += [PairedCases(copy_cases(part.runner), part.group.reference, part.group.clock_ns) for part in copying]
    measured = measure_together(groups, min_rounds, budget_s, served[0].seed, progress=progress)
    for part, steps in zip(times, measured, strict=False):
        part.measured = steps
    for part, copies in zip(copying, measured[len(times) :], strict=True):
        part.copies = copies
    return times


def widest_pass(config: SpeculativeConfig, drafter: Drafter) -> int:
    """Tokens of a sequence in that of a round's passes which has most."""
    one = BatchShape(1, 1, num_decodes=1, decode_context=1, drafting=(1,) * config.depth)
    return max(own.queries for own in passes_of(config, drafter, one))


def fitted(hardware: HardwareSpec, times: Sequence[StepTimes], command: str) -> Calibration:
    """One fit to the steps of all, with where it comes from."""
    samples = [values for part in times for values in part.measured.samples.values()]
    fit = fit_steps(hardware, [row for part in times for row in part.rows], samples, ENGINE)
    sessions = "; ".join(
        f"{len(part.rows)} steps of {part.served.model.name} (reference {part.measured.reference_s * 1e3:.2f} ms, "
        f"median of {part.measured.num_rounds} rounds, p90/p10 {part.measured.spread:.0%} apart)"
        for part in times
    )
    error = fmean(map(abs, fit.errors))
    source = (
        f"thread CPU time of whole steps, paired with a reference step: {sessions}. Left-out steps are predicted "
        f"within {error:.1%} on average. Sums of operators are fitted, single fractions are not identified. "
        f"{platform.machine()}, torch {torch.__version__}, one thread; {measure_ceilings()}"
    )
    return fit.calibration.model_copy(update={"source": source, "date": date.today(), "command": command})

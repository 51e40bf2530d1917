"""Whole scenarios on the executed clock: execute one, or put it beside its simulation."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from perfmodel.cost import plan_memory, step_costs, usd_per_hour
from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.engine import Backend, Request, StepRecord
from perfmodel.errors import PerfmodelError, WorkloadError
from perfmodel.evidence.executed.compare import (
    ExecutorComparison,
    ShadowedBackend,
    StepPair,
    predictor_of,
    report_executor,
)
from perfmodel.evidence.report import ValidationReport
from perfmodel.ops.formats import served_model
from perfmodel.sim import Collector, DeviceTotals, RunResult, Workload, build_serve_loop, simulate, summarize
from perfmodel.sim.replica.pipeline import FlowLine
from perfmodel.sim.replica.serving import SecondTier, copied, second_tier
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.backend import ExecutedBackend
from perfmodel_executors.device import device_name, find_device, memory_as_a_sentence
from perfmodel_executors.driver import InStages, WallClock, arrivals_of, serve
from perfmodel_executors.kernels.tiles import choices
from perfmodel_executors.measure.calibrate import MIN_ROUNDS, Progress, StepTimes, calibrate_machine
from perfmodel_executors.measure.protocol import DriftMeter
from perfmodel_executors.models.support import CPU, check_engine
from perfmodel_executors.parallel.ranks import LeadingRunner, RankDiedError, open_ranks, open_runner
from perfmodel_executors.quality.tokenizer import text_of, tokenizer_of
from perfmodel_executors.runner import RunnerSetup, StepRunner
from perfmodel_executors.sampling import Draws, settings_of
from perfmodel_executors.speculation.build import build_speculator, check_speculation
from perfmodel_executors.speculation.measured import with_acceptance
from perfmodel_executors.speculation.speculator import Speculator


class TimeIsUpError(Exception):
    """Ends the serving of an executed run; the records so far are its result."""


class Ending:
    """When a run ends before its traffic does: `max_seconds` after it was made. on_answer: called with each request
    that was answered; is_cut: whether the end came"""

    def __init__(self, max_seconds: float | None, on_answer: Callable[[Request], None]) -> None:
        self.max_seconds, self.on_answer, self.is_cut = max_seconds, on_answer, False
        self._begun = time.monotonic()

    def look(self) -> None:
        """Raises TimeIsUpError once the time is up."""
        if self.max_seconds is not None and time.monotonic() - self._begun > self.max_seconds:
            self.is_cut = True
            raise TimeIsUpError


def execute_scenario(
    scenario: Scenario,
    progress: Progress | None = None,
    out: Path | None = None,
    live: bool = False,
    kernels: str | None = None,
    wrap: Callable[[Backend], Backend] = lambda backend: backend,
    drift: DriftMeter | None = None,
    max_seconds: float | None = None,
    on_text: Callable[[int, str, str], None] | None = None,
) -> RunResult:
    """Serves the scenario's traffic on this machine's CPU or GPUs. progress: called with each step's (tokens computed,
    tokens in all); max_seconds: of the wall's time, after which the run ends with the requests that were answered;
    on_text: called with each finished request's number, its prompt and its answer as text; out: folder for
    `requests.csv`, `steps.csv`, `acceptance.json` of drafts, `tiles.json`; live: take the wall's time, by default the
    clock is virtual; kernels: torch | triton; wrap: stands in front of the backend that executes; drift: restates
    durations at the speed that the machine had when the meter was set. Raises PerfmodelError for what is not executed
    yet, DoesNotFitError and WorkloadError as the simulator does."""
    torch.set_num_threads(1)
    scenario = as_executed(scenario)
    engine, model = scenario.engine, scenario.model
    if live and engine.pipeline_parallel_size > 1:
        raise PerfmodelError(
            f"{scenario.name} has pipeline stages, whose plans are executed one after another and overlap on the "
            f"virtual clock; leave out --live, or set pipeline_parallel_size to 1."
        )
    decode = None if on_text is None else tokenizer_of(model).decode
    ranks = num_ranks(scenario)
    device = find_device(scenario.hardware, ranks)
    num_blocks = plan_memory(model, scenario.hardware, engine).num_kv_blocks
    settings = settings_of(scenario.sampling, model)
    setup = RunnerSetup(model, engine, num_blocks, device, scenario.seed, kernels, settings, scenario.routing)
    with memory_as_a_sentence(device), open_runner(setup) as runner:
        leads = isinstance(runner, LeadingRunner)
        speculator = None if leads else build_speculator(runner, engine, seed=scenario.seed)
        backend = _backend(scenario, runner, speculator, drift)
        tier = second_tier(scenario, step_costs(scenario)) if engine.kv_offload is not None else None

        def on_answer(request: Request) -> None:
            if decode is not None and on_text is not None:
                tokens, begin = backend.tokens.of(request), request.num_prompt_tokens
                on_text(request.request_id, decode(tokens[:begin]), decode(tokens[begin:]))

        ending = Ending(max_seconds, on_answer)
        result = _run(scenario, wrap(backend), backend, progress, out, live, tier, ending)
        num_nan, clock = runner.decoder.chooser.num_nan, runner.new_clock().meaning
    where = device_name(device) if ranks == 1 else f"{ranks} ranks of {device_name(device)}"
    weights = "random weights"
    if model.weights_origin is not None:
        weights = f"{'changed from ' if model.changed_from else ''}the weights of {Path(model.weights_origin).name}"
    notes = [f"Executed on {where} with {setup.backend} kernels and {weights}; durations are {clock}."]
    if ending.is_cut:
        notes.append(f"Stopped after {max_seconds:g} s (--max-seconds): what was not answered by then is not counted.")
    if result.cut_short:
        notes.append(f"Cut short: {result.cut_short} What was answered until then is counted.")
    if settings is not None:
        notes.append(f"Tokens are drawn with {settings}, seed {_draw_seed(scenario)}.")
    if num_nan:
        notes.append(f"{num_nan:,} logits were no numbers and counted as the least there is: this text means nothing.")
    if backend.exits is not None:
        notes.append(backend.exits.in_words())
    if backend.acceptance is not None:
        notes.append(backend.acceptance.in_words())
        if out is not None:
            backend.acceptance.write(out / "acceptance.json")
    if out is not None and choices():
        (out / "tiles.json").write_text(json.dumps(choices(), indent=1) + "\n", encoding="utf-8", newline="\n")
    return replace(result, notes=(*result.notes, *notes))


def _backend(
    scenario: Scenario, runner: StepRunner, speculator: Speculator | None, drift: DriftMeter | None
) -> ExecutedBackend:
    is_drawn = settings_of(scenario.sampling, scenario.model) is not None
    text, around = text_of(scenario)
    return ExecutedBackend(
        *(runner, scenario.seed),
        drift=drift,
        speculator=speculator,
        text=text,
        around=around,
        draws=Draws(_draw_seed(scenario)) if is_drawn else None,
    )


def _draw_seed(scenario: Scenario) -> int:
    return scenario.seed if scenario.sampling.seed is None else scenario.sampling.seed


def validate_executor(
    scenario: Scenario,
    repeats: int = 1,
    progress: Progress | None = None,
    budget_s: float = 40.0,
    min_rounds: int = MIN_ROUNDS,
) -> ValidationReport:
    """Calibrates on a grid of steps, then simulates and executes the scenario `repeats` times and compares. Workload i
    is drawn with seed + i; none of its steps was used to calibrate. Executed durations are restated at the speed that
    the machine had while calibrating."""
    scenario = as_executed_on_cpu(scenario)
    with open_ranks(num_ranks(scenario), CPU) as ranks:
        machine = calibrate_machine(scenario, budget_s, min_rounds, progress, ranks)
        comparisons = []
        for number in range(repeats):
            workload = scenario.model_copy(update={"seed": scenario.seed + number})
            executed, steps = serve_calibrated(workload, machine.times, machine.calibration, progress)
            simulated = simulate(executed.scenario, calibration=machine.calibration, keep_steps=True)
            comparisons.append(ExecutorComparison(simulated, executed, steps))
    clock = machine.times.runner.new_clock().meaning
    notes = (
        f"Calibrated here and now: {machine.calibration.source}.",
        f"Executed durations are {clock}, restated at the speed of the machine while calibrating.",
    )
    return report_executor(comparisons, machine.calibration.step_residuals, notes)


def serve_calibrated(
    scenario: Scenario, times: StepTimes, calibration: Calibration, progress: Progress | None = None
) -> tuple[RunResult, list[StepPair]]:
    """Executes the workload with what was timed, at the speed the machine had then; each step beside its prediction."""
    scenario = times.with_link(scenario)
    costs = step_costs(scenario, calibration)
    tier = second_tier(scenario, costs)
    executed = _backend(scenario, times.runner, times.speculator, times.drift_meter())
    shadowed = ShadowedBackend(executed, predictor_of(scenario, costs, None if tier is None else tier.cost))
    return _run(scenario, shadowed, executed, progress, tier=tier), shadowed.pairs


def as_executed(scenario: Scenario) -> Scenario:
    """The scenario with its model in the formats, and its layers in the KV blocks, that it is executed in: memory is
    planned for those. Raises PerfmodelError for what its engine asks for and is not executed."""
    check_engine(scenario.engine)
    check_speculation(scenario.model, scenario.engine)
    if not scenario.engine.inference_mode:
        raise PerfmodelError(
            f"{scenario.name} asks for inference_mode=false, but the executor never keeps activations for gradients; "
            f"leave it out."
        )
    ours: dict[str, bool] = {"disable_hybrid_kv_cache_manager": True}  # one table for all layers
    if served_model(scenario.model, scenario.engine).has_states:
        ours["enable_prefix_caching"] = False  # a state of one sequence is of no use to another
    return scenario.model_copy(update={"engine": scenario.engine.model_copy(update=ours)})


def as_executed_on_cpu(scenario: Scenario) -> Scenario:
    """`as_executed`; raises PerfmodelError for what is not served by this machine's CPU, too."""
    if scenario.hardware.kind != "cpu":
        raise PerfmodelError(
            f"{scenario.name} is for {scenario.hardware.name}, but calibrations are compared with what was executed "
            f"on a CPU; use --set hardware=cpu."
        )
    num_ranks(scenario)
    return as_executed(scenario)


def num_ranks(scenario: Scenario) -> int:
    """Ranks of the one group that executes a scenario. Raises PerfmodelError where it takes another."""
    engine = scenario.engine
    if scenario.cluster.is_dynamic:
        raise PerfmodelError(
            f"{scenario.name} has a gateway, autoscaling, failures or shares of pools, which are simulated only; leave "
            f"them out to execute one replica."
        )
    if scenario.num_devices != engine.tensor_parallel_size * engine.pipeline_parallel_size:
        raise PerfmodelError(
            f"{scenario.name} asks for {scenario.num_devices} devices, but the executor runs one replica of one group "
            f"of ranks, or of pipeline stages; set data_parallel_size and cluster.replicas to 1."
        )
    return scenario.num_devices


def _num_tokens(scenario: Scenario) -> int:
    """Tokens of all prompts and answers of the scenario, but for each answer's last token, which no step reads."""
    workload = Workload(scenario)
    turns: Iterable[Request] = workload.requests()
    if scenario.traffic.has_conversations:
        turns = (turn for conversation in workload.conversations() for _, turn in conversation)
    return sum(turn.num_prompt_tokens + turn.max_output_tokens - 1 for turn in turns)


def _run(
    scenario: Scenario,
    backend: Backend,
    executed: ExecutedBackend,
    progress: Progress | None = None,
    out: Path | None = None,
    live: bool = False,
    tier: SecondTier | None = None,
    ending: Ending | None = None,
) -> RunResult:
    """Serve the scenario's workload with `backend`, which is `executed` or stands in front of it; `tier` as the
    scenario has it. The result's scenario has the acceptance that was measured, for whoever simulates it."""
    num_blocks = plan_memory(scenario.model, scenario.hardware, scenario.engine).num_kv_blocks
    host = None if tier is None else tier.blocks(has_tensors=True)
    loop = build_serve_loop(scenario, num_blocks, record_positions=True, host=host)
    workload = Workload(scenario)
    turns = scenario.traffic.has_conversations
    with Collector(out, has_token_times=scenario.needs_token_times, has_turns=turns) as collector:
        # Requests that finished with this step (the next plan may compute tokens of them), and with the one before.
        finishing: list[Request] = []
        ended: list[Request] = []
        num_computed, num_tokens = 0, _num_tokens(scenario) if progress is not None else 0

        def on_finished(request: Request) -> None:
            collector.add_request(request)
            finishing.append(request)
            if ending is not None:
                ending.on_answer(request)

        def on_step(record: StepRecord) -> None:
            nonlocal num_computed
            collector.add_step(record)
            for request in ended:
                executed.release(request)
            ended[:], finishing[:] = finishing, ()
            gaps = loop.scheduler.irregular_gaps
            while gaps:
                collector.add_gap(*gaps.pop())
            num_computed += record.num_tokens
            if progress is not None:
                progress(num_computed, max(num_tokens, num_computed))
            if ending is not None:
                ending.look()

        line = FlowLine(scenario.engine.pipeline_parallel_size)
        stages = InStages(line, lambda: executed.stage_ticks) if line.num_stages > 1 else None
        clock = WallClock() if live else None
        cut_short = ""
        try:
            serve(loop, backend, arrivals_of(workload), on_finished, on_step, clock, stages)
        except TimeIsUpError:
            pass  # `ending` knows
        except RankDiedError as error:
            if not collector.num_finished:
                raise
            cut_short = str(error)
    if not collector.num_finished and ending is not None and ending.is_cut:
        raise WorkloadError(
            f"{scenario.name}: no request was answered within --max-seconds {ending.max_seconds:g}; give more, or "
            f"shorter requests."
        )
    if not collector.num_finished:
        raise WorkloadError(f"{scenario.name}: the traffic has no requests; raise num_requests, duration_s or the rate")
    offload = None
    if tier is not None and host is not None:
        offload = copied([(host, num_ranks(scenario) * tier.cost.block_bytes)])
    totals = DeviceTotals(
        num_devices=scenario.num_devices,
        kv_cache_usage_peak=max(collector.used_blocks_peak.values(), default=0) / num_blocks,
        usd_per_hour=usd_per_hour(scenario.hardware, scenario.price),
        num_preemptions=loop.scheduler.num_preemptions,
        prefix_tokens_asked=loop.scheduler.num_prefix_tokens_asked,
        prefix_tokens_hit=loop.scheduler.num_prefix_tokens_hit,
        kv_offload=offload,
    )
    if executed.acceptance is not None:
        scenario = with_acceptance(scenario, executed.acceptance.acceptance())
    summary = summarize(scenario, collector, totals)
    records = collector.requests(), collector.steps()
    return RunResult(scenario, "executed", summary, *records, num_blocks, cut_short=cut_short)

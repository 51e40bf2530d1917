"""Whole scenarios on the executed clock: execute one, or compare it with its simulation."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from perfmodel.cost import plan_memory, step_costs, usd_per_hour
from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.engine import Request
from perfmodel.errors import PerfmodelError, WorkloadError
from perfmodel.evidence.executed import compare
from perfmodel.evidence.report import ValidationReport
from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.formats import served_model
from perfmodel.sim import Collector, DeviceTotals, RunResult, Workload, simulate, summarize
from perfmodel.sim.clock import TICKS_PER_S
from perfmodel.sim.driver import entrance_of, serve
from perfmodel.sim.fleet.cluster import Cluster
from perfmodel.sim.fleet.pool import remembered_basis
from perfmodel.sim.records.totals import kv_offloaded, kv_transferred, usage_peak
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.backend import ExecutedBackend
from perfmodel_executors.cluster import ExecutedCluster, RunMonitor, TimeIsUpError, Wrap
from perfmodel_executors.device import device_name, find_device, memory_as_a_sentence
from perfmodel_executors.kernels.tiles import choices
from perfmodel_executors.measure.calibrate import MIN_ROUNDS, Progress, StepTimes, calibrate_machine
from perfmodel_executors.measure.protocol import DriftMeter
from perfmodel_executors.models.support import CPU, check_engine
from perfmodel_executors.parallel.ranks import LeadingRunner, RankDiedError, Ranks, check_shared_out, open_ranks
from perfmodel_executors.quality.tokenizer import text_of, tokenizer_of
from perfmodel_executors.runner import RunnerSetup, StepRunner, StepTaker
from perfmodel_executors.sampling import Draws, settings_of
from perfmodel_executors.speculation.build import build_speculator, check_speculation
from perfmodel_executors.speculation.measured import with_acceptance
from perfmodel_executors.speculation.speculator import Speculator
from perfmodel_executors.tokens import TokenStore


def execute_scenario(
    scenario: Scenario,
    progress: Progress | None = None,
    out: Path | None = None,
    live: bool = False,
    kernels: str | None = None,
    wrap: Wrap = lambda backend, _: backend,
    drift: DriftMeter | None = None,
    max_seconds: float | None = None,
    on_text: Callable[[int, str, str], None] | None = None,
) -> RunResult:
    """Serves the scenario's traffic on this machine's CPU or GPUs. progress: called with each step's (tokens computed,
    tokens in all); max_seconds: of the wall's time, after which the run ends with the requests that were answered;
    on_text: called with each finished request's number, its prompt and its answer as text; out: folder for
    `requests.csv`, `steps.csv`, `acceptance.json` of drafts, `tiles.json`; live: take the wall's time, by default the
    clock is virtual; kernels: torch | triton; wrap: stands in front of each backend that executes, given its pool;
    drift: restates durations at the speed that the machine had when the meter was set. Raises PerfmodelError for what
    is not executed yet, DoesNotFitError and WorkloadError as the simulator does."""
    torch.set_num_threads(1)
    scenario = as_executed(scenario)
    engine = scenario.engine
    if live and (engine.pipeline_parallel_size > 1 or num_engines(scenario) > 1):
        raise PerfmodelError(
            f"{scenario.name} has pipeline stages or several engines, which are executed one after another and overlap "
            f"on the virtual clock; leave out --live, or execute one engine of one stage."
        )
    decode = None if on_text is None else tokenizer_of(scenario.model).decode
    count = num_ranks(scenario)
    device = find_device(scenario.hardware, count)
    settings, tokens = settings_of(scenario.sampling, scenario.model), _token_store(scenario)

    def setup_of(pool: Scenario) -> RunnerSetup:
        num_blocks = plan_memory(pool.model, pool.hardware, pool.engine).num_kv_blocks
        adapters = scenario.traffic.adapters
        shared = (kernels, settings, scenario.routing, 0 if adapters is None else adapters.count)
        return RunnerSetup(pool.model, pool.engine, num_blocks, device, scenario.seed, *shared)

    def on_answer(request: Request) -> None:
        if decode is not None and on_text is not None:
            ids, begin = tokens.of(request), request.num_prompt_tokens
            on_text(request.request_id, decode(ids[:begin]), decode(ids[begin:]))

    def make_backend(runner: StepTaker) -> ExecutedBackend:
        speculator = None
        if isinstance(runner, StepRunner) and not isinstance(runner, LeadingRunner):
            speculator = build_speculator(runner, engine, seed=scenario.seed)
        return _backend(scenario, runner, speculator, tokens, drift)

    if num_engines(scenario) == 1:  # before processes are started that would say it too
        check_shared_out(setup_of(scenario))
    with memory_as_a_sentence(device), open_ranks(count, device) as ranks:

        def runner_of(pool: Scenario, index: int) -> StepTaker:
            return ranks.runner(setup_of(pool)) if num_engines(scenario) == 1 else ranks.engine(setup_of(pool), index)

        num_tokens = _num_tokens(scenario) if progress is not None else 0
        monitor = RunMonitor(on_answer, progress, num_tokens, max_seconds)
        executed = ExecutedCluster(ranks, runner_of, make_backend, setup_of, wrap, monitor, live)
        result = _run(scenario, executed, monitor, out)
        num_nan = sum(backend.runner.count_nan() for backend in executed.backends) if not result.cut_short else 0
    where = device_name(device) if count == 1 else f"{count} ranks of {device_name(device)}"
    origin, weights = scenario.model.weights_origin, "random weights"
    if origin is not None:
        weights = f"{'changed from ' if scenario.model.changed_from else ''}the weights of {Path(origin).name}"
    how = f"Executed on {where} with {setup_of(scenario).backend} kernels and {weights}"
    if out is not None and executed.backends[0].acceptance is not None:
        executed.backends[0].acceptance.write(out / "acceptance.json")
    if out is not None and choices():
        (out / "tiles.json").write_text(json.dumps(choices(), indent=1) + "\n", encoding="utf-8", newline="\n")
    meaning = "wall time" if live else executed.clock.meaning
    notes = (f"{how}; durations are {meaning}.", *_notes(scenario, executed, monitor, num_nan))
    return replace(result, notes=(*result.notes, *notes))


def _notes(scenario: Scenario, executed: ExecutedCluster, monitor: RunMonitor, num_nan: int) -> Iterator[str]:
    settings = settings_of(scenario.sampling, scenario.model)
    if num_engines(scenario) > 1:
        engine = scenario.pools[0].engine
        note = f"{num_engines(scenario)} engines, each a process; on the clock they step at the same time."
        if engine.data_parallel_size > 1 and engine.enable_expert_parallel:
            note += " Tokens are sent to the ranks of their experts and back (all-to-all), whatever all2all_backend is."
        yield note + " KV blocks go from process to process, in the wall's time." * scenario.cluster.is_disaggregated
    if monitor.is_cut:
        limit = f"{monitor.max_seconds:g} s (--max-seconds)"
        yield f"Stopped after {limit}: what was not answered by then is not counted."
    if monitor.cut_short:
        yield f"Cut short: {monitor.cut_short} What was answered until then is counted."
    if settings is not None:
        yield f"Tokens are drawn with {settings}, seed {_draw_seed(scenario)}."
    if num_nan:
        yield f"{num_nan:,} logits were no numbers and counted as the least there is: this text means nothing."
    runners = [backend.runner for backend in executed.backends]
    substituted = {name for own in runners if isinstance(own, StepRunner) for name in own.decoder.kernels.substituted}
    if substituted:
        yield f"Operators without a Triton kernel, which ran in torch: {', '.join(sorted(substituted))}."
    for backend in executed.backends:
        yield from (own.in_words() for own in (backend.exits, backend.acceptance) if own is not None)


def _token_store(scenario: Scenario) -> TokenStore:
    text, around = text_of(scenario)
    ids, has_answers = (scenario.model.vocab_size, scenario.engine.kv_block_tokens), not scenario.traffic.has_sessions
    return TokenStore(*ids, scenario.seed, text, around, has_answers)


def _backend(
    scenario: Scenario, runner: StepTaker, speculator: Speculator | None, tokens: TokenStore, drift: DriftMeter | None
) -> ExecutedBackend:
    draws = None if settings_of(scenario.sampling, scenario.model) is None else Draws(_draw_seed(scenario))
    return ExecutedBackend(runner, scenario.seed, drift=drift, speculator=speculator, tokens=tokens, draws=draws)


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
    is drawn with seed + i, and no step of it calibrates; executed durations are restated at the calibration's speed."""
    scenario = as_executed_on_cpu(scenario)
    with open_ranks(num_ranks(scenario), CPU) as ranks:
        machine = calibrate_machine(scenario, budget_s, min_rounds, progress, ranks)
        comparisons = []
        for number in range(repeats):
            workload = scenario.model_copy(update={"seed": scenario.seed + number})
            executed, steps = serve_calibrated(workload, machine.times, machine.calibration, progress)
            simulated = simulate(executed.scenario, calibration=machine.calibration, keep_steps=True)
            comparisons.append(compare.ExecutorComparison(simulated, executed, steps))
    clock = machine.times.runner.new_clock().meaning
    notes = (
        f"Calibrated here and now: {machine.calibration.source}.",
        f"Executed durations are {clock}, restated at the speed of the machine while calibrating.",
    )
    return compare.report_executor(comparisons, machine.calibration.step_residuals, notes)


def serve_calibrated(
    scenario: Scenario, times: StepTimes, calibration: Calibration, progress: Progress | None = None
) -> tuple[RunResult, list[compare.StepPair]]:
    """Executes the workload with what was timed, at the speed the machine had then; each step beside its prediction."""
    scenario, pairs = times.with_link(scenario), list[compare.StepPair]()
    predictor = compare.predictor_of(scenario, step_costs(scenario, calibration))
    backend = _backend(scenario, times.runner, times.speculator, _token_store(scenario), times.drift_meter())
    monitor = RunMonitor(progress=progress, num_tokens=_num_tokens(scenario) if progress is not None else 0)
    executed = ExecutedCluster(
        Ranks(),
        runner_of=lambda *_: times.runner,
        backend_of=lambda _: backend,
        setup_of=lambda _: times.setup,
        wrap=lambda own, _: compare.ShadowedBackend(own, predictor, pairs),
        monitor=monitor,
    )
    return _run(scenario, executed, monitor, calibration=calibration), pairs


def as_executed(scenario: Scenario) -> Scenario:
    """The scenario with its model in the formats, and its layers in the KV blocks, that it is executed in: memory is
    planned for those. Raises PerfmodelError for what its engines ask for and is not executed."""
    model = scenario.model

    def executed(engine: EngineSpec) -> EngineSpec:
        check_engine(engine)
        check_speculation(model, engine)
        ours: dict[str, bool] = {"disable_hybrid_kv_cache_manager": True}  # one table for all layers
        if served_model(model, engine).has_states:
            ours["enable_prefix_caching"] = False  # a state of one sequence is of no use to another
        return engine.model_copy(update=ours)

    pools = tuple(pool.model_copy(update={"engine": executed(pool.engine)}) for pool in scenario.cluster.pools)
    update = {"engine": executed(scenario.engine), "cluster": scenario.cluster.model_copy(update={"pools": pools})}
    if not scenario.engine.inference_mode:
        raise PerfmodelError(
            f"{scenario.name} asks for inference_mode=false, but the executor never keeps activations for gradients; "
            f"leave it out."
        )
    for name in ("images", "structured_outputs"):
        if getattr(scenario.traffic, name) is not None:
            raise PerfmodelError(f"{scenario.name} has traffic.{name}, which are not executed; leave them out.")
    if scenario.traffic.beam_width > 1:
        raise PerfmodelError(f"{scenario.name} has traffic.beam_width, which is not executed; leave it out.")
    if scenario.hardware.host is not None:
        raise PerfmodelError(f"{scenario.name} has host.cores, and no executed server waits for them; leave it out.")
    return scenario.model_copy(update=update)


def as_executed_on_cpu(scenario: Scenario) -> Scenario:
    """`as_executed`; raises PerfmodelError for what is not served by this machine's CPU, too."""
    if scenario.hardware.kind != "cpu":
        raise PerfmodelError(
            f"{scenario.name} is for {scenario.hardware.name}, but calibrations are compared with what was executed "
            f"on a CPU; use --set hardware=cpu."
        )
    num_ranks(scenario)
    if num_engines(scenario) > 1:
        raise PerfmodelError(
            f"{scenario.name} has {num_engines(scenario)} engines, and steps are calibrated for one; use `perfmodel "
            f"execute`, whose table compares them, or set data_parallel_size and cluster.replicas to 1."
        )
    return as_executed(scenario)


def num_engines(scenario: Scenario) -> int:
    return sum(pool.replicas * pool.engine.data_parallel_size for pool in scenario.pools)


def num_ranks(scenario: Scenario) -> int:
    """Processes that execute a scenario: its engine's ranks, or engines. Raises PerfmodelError if simulated only."""
    count = num_engines(scenario)
    if scenario.cluster.is_dynamic:
        raise PerfmodelError(
            f"{scenario.name} has a gateway, autoscaling, failures or shares of pools, which are simulated only; leave "
            f"them out to execute it."
        )
    if count == 1:
        return scenario.num_devices
    transfer, engines = scenario.cluster.kv_transfer, [pool.engine for pool in scenario.pools]
    has_experts = any(isinstance(layer.ffn, MoEFFN) for layer, _ in scenario.model.layers)
    cases = {
        "one of its engines has several ranks": any(e.num_devices > e.data_parallel_size for e in engines),
        "drafts tokens (engine.speculative_config)": any(e.speculative_config is not None for e in engines),
        "is not for a CPU": scenario.hardware.kind != "cpu" or any(pool.hardware for pool in scenario.pools),
        "a pool has another model": any(pool.model is not None for pool in scenario.pools),
        "pools have KV blocks of unequal size": len({engine.kv_block_tokens for engine in engines}) > 1,
        "KV moves layer by layer, or over a shared fabric": transfer.layerwise or transfer.shared,
        "KV comes with states, or tokens kept beside its blocks": scenario.cluster.is_disaggregated
        and served_model(scenario.model, scenario.engine).has_states,
        "data-parallel ranks share experts by their width, or there are other engines": has_experts
        and any(engine.data_parallel_size > 1 for engine in engines)
        and not (len(engines) == 1 and scenario.pools[0].replicas == 1 and engines[0].enable_expert_parallel),
    }
    for reason, applies in cases.items():
        if applies:
            raise PerfmodelError(
                f"{scenario.name} has {count} engines, and {reason}: executed are several engines of one CPU rank and "
                f"one model, and data-parallel ranks with whole experts; simulate it, or set data_parallel_size and "
                f"cluster.replicas to 1."
            )
    return count


def _num_tokens(scenario: Scenario) -> int:
    """Tokens of all prompts and answers of the scenario, but for each answer's last token, which no step reads."""
    workload = Workload(scenario)
    turns: Iterable[Request] = workload.requests()
    if scenario.traffic.has_conversations or scenario.traffic.rollouts is not None:
        turns = (turn for conversation in workload.conversations() for _, turn, _ in conversation)
    return sum(turn.num_prompt_tokens + turn.max_output_tokens - 1 for turn in turns)


def _run(
    scenario: Scenario,
    executed: ExecutedCluster,
    monitor: RunMonitor,
    out: Path | None = None,
    calibration: Calibration | None = None,
) -> RunResult:
    """Serve the scenario's workload with `executed`. The result's scenario has the acceptance that was measured."""
    basis_of, entrance = remembered_basis(calibration, None), entrance_of(scenario)
    turns = scenario.traffic.has_conversations
    with Collector(out, has_token_times=scenario.needs_token_times, has_turns=turns) as collector:
        try:
            serve(scenario, Workload(entrance), basis_of, collector, can_leap=False, executed=executed)
        except TimeIsUpError:
            pass  # the monitor knows
        except RankDiedError as error:
            if not collector.num_finished:
                raise
            monitor.cut_short = str(error)
    if not collector.num_finished and monitor.is_cut:
        raise WorkloadError(
            f"{scenario.name}: no request was answered within --max-seconds {monitor.max_seconds:g}; give more, or "
            f"shorter requests."
        )
    if not collector.num_finished:
        raise WorkloadError(f"{scenario.name}: the traffic has no requests; raise num_requests, duration_s or the rate")
    acceptance = executed.backends[0].acceptance
    if acceptance is not None:
        scenario = with_acceptance(scenario, acceptance.acceptance())
    cluster = executed.cluster
    num_blocks = max(pool.memory.num_kv_blocks for pool in cluster.pools)
    summary = summarize(scenario, collector, _totals(scenario, cluster, collector))
    records = collector.requests(), collector.steps()
    return RunResult(scenario, "executed", summary, *records, num_blocks, cut_short=monitor.cut_short)


def _totals(scenario: Scenario, cluster: Cluster, collector: Collector) -> DeviceTotals:
    schedulers = [engine.loop.scheduler for engine in cluster.engines]
    price = usd_per_hour(scenario.hardware, scenario.price)  # of a device
    return DeviceTotals(
        num_devices=scenario.num_devices,
        kv_cache_usage_peak=max(usage_peak(pool, collector) for pool in cluster.pools),
        usd_per_hour=None if price is None else price * scenario.num_devices,
        num_preemptions=sum(own.num_preemptions for own in schedulers),
        prefix_tokens_asked=sum(own.num_prefix_tokens_asked for own in schedulers),
        prefix_tokens_hit=sum(own.num_prefix_tokens_hit for own in schedulers),
        kv_offload=kv_offloaded(cluster),
        kv_transfer=kv_transferred(cluster, collector.end_tick / TICKS_PER_S),
    )

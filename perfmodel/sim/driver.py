"""`simulate`: a scenario on the simulated clock."""

__all__ = ["simulate"]

from collections.abc import Callable
from pathlib import Path

from perfmodel.cost import (
    Calibration,
    EngineProfile,
    ServerFit,
    StepTimer,
    Usage,
    energy_j,
    load_calibration,
    load_engine_profile,
    plan_memory,
)
from perfmodel.engine import Request, StepRecord
from perfmodel.errors import WorkloadError
from perfmodel.sim.clients import ClosedLoopClient, OpenLoopClient
from perfmodel.sim.clock import TickEnvironment, to_ticks
from perfmodel.sim.collector import Collector
from perfmodel.sim.front_end import FrontEnd
from perfmodel.sim.replica import Replica, SimulatedBackend
from perfmodel.sim.result import RunResult
from perfmodel.sim.router import ROUTERS
from perfmodel.sim.serving import build_serve_loop
from perfmodel.sim.step_costs import step_tables_of
from perfmodel.sim.summary import DeviceTotals, summarize
from perfmodel.sim.workload import Workload
from perfmodel.specs.scenario import Scenario

Progress = Callable[[int, int | None], None]
_MOST_STEPS_KEPT = 300_000  # requests whose step records are kept in memory by default


def simulate(
    scenario: Scenario,
    *,
    calibration: Calibration | None = None,
    profile: EngineProfile | None = None,
    progress: Progress | None = None,
    out: Path | None = None,
    keep_steps: bool | None = None,
    can_leap: bool = True,
) -> RunResult:
    """Serve the scenario's traffic on the simulated clock.

    calibration: achieved fractions to use; by default what `engine.profile` names, or the datasheet
    profile:     host and server of the engine; by default the fitted one that `engine.profile` names
    progress:    called now and then with (requests finished, requests in all if known)
    out:         folder to stream `requests.csv` and `steps.csv` to
    keep_steps:  keep step records in memory; by default for up to 300,000 requests
    can_leap:    advance equal decode steps together; the answer is the same either way

    Raises DoesNotFitError for a model too large for the devices, WorkloadError for traffic that cannot be served.
    """
    profile = profile or load_engine_profile(scenario.engine.profile)
    calibration = calibration or load_calibration(scenario.hardware, scenario.engine.profile)
    calibration = profile.applied_to(calibration)
    memory = plan_memory(scenario.model, scenario.hardware, scenario.engine)
    timer = StepTimer(step_tables_of(scenario, calibration, profile))
    workload = Workload(scenario)
    if keep_steps is None:
        keep_steps = (workload.num_requests or 0) <= _MOST_STEPS_KEPT
    with Collector(out, keep_steps) as collector:
        replicas = _serve(scenario, workload, memory.num_kv_blocks, timer, profile, collector, progress, can_leap)
    if not collector.num_finished:
        raise WorkloadError(f"{scenario.name}: the traffic has no requests; raise num_requests, duration_s or the rate")
    totals = _totals(scenario, replicas, timer.usage(), collector)
    summary = summarize(scenario, collector, totals, calibration, profile)
    return RunResult(
        scenario,
        "simulated",
        summary,
        collector.requests(),
        collector.steps(),
        memory.num_kv_blocks,
        _notes(calibration),
    )


def _serve(
    scenario: Scenario,
    workload: Workload,
    num_blocks: int,
    timer: StepTimer,
    profile: EngineProfile,
    collector: Collector,
    progress: Progress | None,
    can_leap: bool,
) -> list[Replica]:
    """Run until the last request is answered; returns the replicas as they end."""
    env = TickEnvironment()
    client: OpenLoopClient | ClosedLoopClient
    report_every = max((workload.num_requests or 10_000) // 100, 1)

    def on_finished(replica: Replica, request: Request) -> None:
        collector.add_request(request, replica.index)
        client.on_finished(request)
        if progress is not None and collector.num_finished % report_every == 0:
            progress(collector.num_finished, workload.num_requests)

    def on_step(replica: Replica, record: StepRecord) -> None:
        collector.add_step(record, replica.index)
        gaps = replica.loop.scheduler.irregular_gaps
        while gaps:
            collector.add_gap(*gaps.pop())

    num_engines = scenario.cluster.replicas * scenario.engine.data_parallel_size
    backend = SimulatedBackend(timer)
    replicas = [
        Replica(
            env,
            index,
            build_serve_loop(scenario, num_blocks),
            backend,
            on_finished,
            on_step,
            can_leap,
            FrontEnd(profile.server) if profile.server != ServerFit() else None,
        )
        for index in range(num_engines)
    ]
    route = ROUTERS[scenario.cluster.router](replicas)
    if workload.concurrency is None:
        client = OpenLoopClient(env, workload.requests(), route)
    else:
        think = to_ticks(workload.think_time_s)
        client = ClosedLoopClient(env, workload.requests(), route, workload.concurrency, think)
    env.run()
    return replicas


def _totals(scenario: Scenario, replicas: list[Replica], usage: Usage, collector: Collector) -> DeviceTotals:
    """Totals of all devices; the timer has counted one device of each engine."""
    engine = scenario.engine
    devices_per_engine = engine.tensor_parallel_size * engine.pipeline_parallel_size
    num_devices = devices_per_engine * len(replicas)
    duration = collector.end_tick / 1e12
    device_s = duration * len(replicas)  # of the devices that the timer counted
    schedulers = [replica.loop.scheduler for replica in replicas]
    busy = usage.busy_s
    return DeviceTotals(
        num_blocks=schedulers[0].blocks.num_blocks,
        num_devices=num_devices,
        num_preemptions=sum(s.num_preemptions for s in schedulers),
        prefix_tokens_asked=sum(s.num_prefix_tokens_asked for s in schedulers),
        prefix_tokens_hit=sum(s.num_prefix_tokens_hit for s in schedulers),
        energy_j=energy_j(scenario.hardware, usage, device_s) * devices_per_engine,
        mfu=usage.peak_compute_s / device_s,
        mbu=usage.hbm_bytes / scenario.hardware.memory_bandwidth / device_s,
        bound_share={bound: seconds / busy for bound, seconds in usage.bound_s.items()},
    )


def _notes(calibration: Calibration) -> tuple[str, ...]:
    if calibration.origin == "datasheet":
        return (
            f"No calibration for {calibration.device}: times are the datasheet roofline with assumed launch overheads, "
            f"a lower bound that real kernels exceed, often by half or more.",
        )
    return ()

"""`simulate`: run a scenario on the simulated clock."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from simpy.events import URGENT

from perfmodel.cost import Calibration, EngineProfile
from perfmodel.cost.calibrations.draws import Scores
from perfmodel.engine import Request, StepRecord
from perfmodel.errors import WorkloadError
from perfmodel.sim.clock import TICKS_PER_S, Alarm, TickEnvironment, to_ticks
from perfmodel.sim.fleet.cluster import Cluster, ExecutedEngines
from perfmodel.sim.fleet.pool import BasisOf, remembered_basis
from perfmodel.sim.records.collector import Collector
from perfmodel.sim.records.columns import RequestColumns
from perfmodel.sim.records.ensemble import MOST, Ensemble, Serve, design, run_ensemble
from perfmodel.sim.records.result import RunResult, eager_notes, run_notes, workload_notes
from perfmodel.sim.records.summary import summarize
from perfmodel.sim.records.totals import device_totals, encoder_busy_share, images_processed
from perfmodel.sim.replica.beams import BeamSearch
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.clients import Compressor, Route, client_of
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs.scenario import Scenario

if TYPE_CHECKING:
    from perfmodel.sim.fleet.gateway import LostRequest
    from perfmodel.sim.records.whole_runs import WholeRuns

Progress = Callable[[int, int | None], None]
_MAX_STEPS_KEPT = 300_000  # requests whose step records are kept in memory by default
_REPORT_EVERY = 1000  # requests at most: a tenth of a second
_MAX_REPEATED = 50_000  # requests of a run that is simulated twice more for its intervals
_LIMITING = 0.9  # busy share above which a note calls a part the bottleneck


def simulate(
    scenario: Scenario,
    *,
    calibration: Calibration | None = None,
    profile: EngineProfile | None = None,
    progress: Progress | None = None,
    out: Path | None = None,
    keep_steps: bool | None = None,
    can_leap: bool = True,
    one_of: int = 1,
    intervals: bool = False,
    on_draw: Progress | None = None,
) -> RunResult:
    """Serve the scenario's traffic on the simulated clock.

    calibration: efficiency factors for all pools; default: those named by `engine.profile`, else the datasheet
    profile:     host and server costs of the engine; default: the fitted profile that `engine.profile` names
    progress:    callback (requests finished, total if known); of beams, parts of answers count
    out:         folder for `requests.csv` and `steps.csv`, streamed
    keep_steps:  keep step records in memory; default: for up to 300,000 requests
    can_leap:    batch equal decode steps; results are identical either way
    one_of:      simulate 1/n of the cluster: each pool's engines and the traffic are one slice. Slices share no load
    intervals:   also run an ensemble of shortened runs for 80 % prediction intervals of mean latencies
    on_draw:     callback (runs of the ensemble that are done, of how many), first of none

    Raises DoesNotFitError for a model too large for the devices, WorkloadError for traffic that cannot be served."""
    basis_of = remembered_basis(calibration, profile)
    entrance = entrance_of(scenario)
    workload = Workload(entrance)
    if keep_steps is None:
        keep_steps = (workload.num_requests or 0) <= _MAX_STEPS_KEPT
    with Collector(out, keep_steps, scenario.needs_token_times, scenario.traffic.has_conversations) as collector:
        cluster = serve(scenario, workload, basis_of, collector, progress, can_leap, one_of)
    if not (collector.num_finished or collector.lost):
        raise WorkloadError(f"{scenario.name}: the traffic has no requests; raise num_requests, duration_s or the rate")
    if not collector.num_steps:
        raise WorkloadError(
            f"{scenario.name}: no step ran: {collector.num_lost('failed')} requests failed and "
            f"{collector.num_lost('timed_out')} timed out before one; raise the limits of cluster.gateway, or "
            f"engine.max_model_len ({workload.num_refused} prompts are beyond it)"
        )
    used = basis_of(entrance).calibration
    requests = collector.requests()
    ensemble: Ensemble | WholeRuns | None = None
    if intervals and len(requests):
        ensemble = _intervals_of(scenario, requests, cluster, partial(_serve_drawn, basis_of, one_of), one_of, on_draw)
    summary = summarize(scenario, collector, device_totals(cluster, collector), used, ensemble)
    num_blocks = max(pool.memory.num_kv_blocks for pool in cluster.pools if pool.spec.role != "encode")
    mean_step_s = collector.busy_ticks / TICKS_PER_S / collector.num_steps
    notes = (*workload_notes(workload), *eager_notes(cluster.pools[-1].scenario, mean_step_s))
    notes = (
        *notes,
        *run_notes(scenario, used, requests, collector.num_steps),
        *_engine_notes(cluster, collector.end_tick),
    )
    if intervals and len(requests) and ensemble is None:
        notes = (
            *notes,
            f"No intervals: where replicas come and go they take two more runs, here of {len(requests):,} "
            f"requests; they are computed up to {_MAX_REPEATED:,}.",
        )
    steps = collector.steps()
    return RunResult(scenario, "simulated", summary, requests, steps, num_blocks, notes, ensemble, calibration, profile)


def _engine_notes(cluster: Cluster, end_tick: int) -> Iterator[str]:
    slots = [own for engine in cluster.engines if (own := engine.loop.scheduler.adapters) is not None]
    num_loads, from_disk = sum(own.num_loads for own in slots), sum(own.num_from_disk for own in slots)
    if num_loads:
        of_disk = f"{from_disk:,} of them from the disk; raise engine.max_loras or engine.max_cpu_loras for fewer."
        yield f"Steps waited for {num_loads:,} loads of LoRA adapters, {of_disk}"
    compilers = [engine.grammars for engine in cluster.engines if engine.grammars is not None]
    num_compiled, num_waits = sum(own.num_compiled for own in compilers), sum(own.num_waits for own in compilers)
    if num_compiled:
        yield f"{num_compiled:,} grammars of answers were compiled, for which {num_waits:,} requests waited."
    processed, busy = images_processed(cluster, end_tick), encoder_busy_share(cluster, end_tick)
    if processed is not None and processed["busy_share"] > _LIMITING:
        yield (
            f"API servers limit this run: threads that process images are busy {processed['busy_share']:.0%} of the "
            f"time; raise engine.api_server_count, or replicas."
        )
    if busy > _LIMITING:
        yield f"Encode replicas limit this run: they are busy {busy:.0%} of the time; give their pool more replicas."
    if cluster.transfers is not None:
        from perfmodel.sim.fleet.kv_transfer import pcie_of_slices

        if (pcie := pcie_of_slices(cluster.scenario)) is not None:
            cards = f"{pcie[0]} card{'s'[: pcie[0] - 1]}"
            yield (
                f"Slices of GPUs move KV through the host, over the PCIe of {cards}: at most {pcie[1] / 1e9:.3g} GB/s "
                f"one way; give kv_transfer.shared and its fabric_bandwidth_bytes_per_s for more."
            )


def entrance_of(scenario: Scenario) -> Scenario:
    """Scenario of the pool that receives requests first."""
    return scenario.of_pool(next(pool for pool in scenario.pools if pool.role not in ("decode", "encode")))


def serve(
    scenario: Scenario,
    workload: Workload,
    basis_of: BasisOf,
    collector: Collector,
    progress: Progress | None = None,
    can_leap: bool = True,
    one_of: int = 1,
    scores: Scores | None = None,
    executed: ExecutedEngines | None = None,
) -> Cluster:
    """Run `scenario` until the last request of `workload` is answered; return the final cluster. collector: gets the
    records; progress, can_leap, one_of: see `simulate`; basis_of, scores, executed: see `Cluster`. Executed prompts are
    compressed (`prompt_compression`) in no time."""
    env = TickEnvironment() if executed is None else executed.env
    expected = scenario.traffic.expected_requests  # of stages a mean: there may be a few more
    total = workload.num_requests if expected is None else round(expected)
    report_every = min(max((total or 10_000) // 100, 1), _REPORT_EVERY)
    num_reported = 0

    def report(num_done: int) -> None:
        nonlocal num_reported
        if progress is not None and num_done >= num_reported + report_every:
            num_reported = num_done
            progress(num_done, None if total is None else max(total, num_done))

    def on_finished(replica: EngineRank, request: Request) -> None:
        if beams is not None:
            answered = beams.on_finished(request)
            report(int(beams.num_answers + 1e-6))
            if answered is None:
                return
            request = answered
        collector.add_request(request, replica.index)
        client.on_finished(request)
        if executed is not None:
            executed.on_finished(replica.index, request)
        report(collector.num_finished)

    def on_lost(lost: "LostRequest") -> None:
        collector.lost.append((lost.request.request_id, lost.fate))
        client.on_finished(lost.request)

    def on_step(replica: EngineRank, record: StepRecord) -> None:
        collector.add_step(record, replica.index)
        gaps = replica.loop.scheduler.irregular_gaps
        while gaps:
            collector.add_gap(*gaps.pop())
        if executed is not None:
            executed.on_step(replica.index, record)

    cluster = Cluster(env, scenario, basis_of, on_finished, on_step, can_leap, one_of, scores, on_lost, executed)
    route: Route = cluster.route
    if (encoding := cluster.encoding) is not None:
        route = lambda _: encoding  # noqa: E731
    shortening = scenario.prompt_compression if executed is None else None
    if shortening is not None and shortening.model is not None:
        entrance = cluster.pools[0].scenario  # prefill pools come first
        basis = basis_of(entrance)
        compressor = Compressor.of(env, entrance, shortening.model, (basis.calibration, basis.profile), cluster.route)
        route = lambda _: compressor  # noqa: E731
    beams: BeamSearch | None = None
    if (width := scenario.traffic.beam_width) > 1:
        engine_of = cast("Callable[[Request], EngineRank]", cluster.route)  # of plain pools
        search = beams = BeamSearch(env, width, workload.block_size, scenario.seed, engine_of)
        route = lambda _: search  # noqa: E731
    if workload.traffic.trace is not None:  # prompts that leave no room for an answer: vLLM refuses these alone
        rejecting, accepted = _RejectingServer(env, on_lost), route
        route = lambda request: rejecting if workload.refuses(request) else accepted(request)  # noqa: E731
    client = client_of(env, workload, route)
    if cluster.dynamic is not None:
        cluster.dynamic.is_sent = lambda: client.is_done
    if executed is None:
        env.run_until_idle()
    else:
        executed.run(cluster)
    return cluster


class _RejectingServer:
    """Fails requests that the engine refuses, at once and without another client step in between."""

    def __init__(self, env: TickEnvironment, on_lost: "Callable[[LostRequest], None]") -> None:
        self._env, self._on_lost = env, on_lost

    def add(self, request: Request) -> None:
        from perfmodel.sim.fleet.gateway import LostRequest

        Alarm(self._env, 0, lambda _: self._on_lost(LostRequest(request, "failed", self._env.ticks)), URGENT)


def _intervals_of(
    scenario: Scenario,
    requests: RequestColumns,
    cluster: Cluster,
    serve_drawn: Serve,
    one_of: int,
    on_draw: Progress | None,
) -> "Ensemble | WholeRuns | None":
    """Whole runs where replicas vary, as a shorter run sees another load (None if too long); else an ensemble."""
    fleets = {} if cluster.dynamic is None else cluster.dynamic.fleets
    if fleets and len(requests) > _MAX_REPEATED:
        return None
    num_done, num_draws = 0, 2 * len(design()) + (2 if fleets and len(requests) > MOST else 0)
    if on_draw is not None:
        on_draw(0, num_draws)

    def serve(drawn: Scenario, scores: Scores | None) -> RequestColumns:
        nonlocal num_done
        answered = serve_drawn(drawn, scores)
        num_done += scores is not None
        if on_draw is not None and num_done:
            on_draw(num_done, num_draws)
        return answered

    if not fleets:
        return run_ensemble(scenario, requests, serve)
    from perfmodel.sim.records.whole_runs import simulate_whole_runs

    end = to_ticks(float(requests.finished_s.max()))
    used = {number: fleet.used_s(end) / max(end / TICKS_PER_S, 1e-9) for number, fleet in fleets.items()}
    sizes = {number: max(round(mean), 1) * one_of for number, mean in used.items()}
    return simulate_whole_runs(scenario, requests, sizes, serve)


def _serve_drawn(basis_of: BasisOf, one_of: int, scenario: Scenario, scores: Scores | None) -> RequestColumns:
    """Requests of `scenario` under a draw of scores, or without one."""
    with Collector(keep_steps=False) as collector:
        serve(scenario, Workload(entrance_of(scenario)), basis_of, collector, one_of=one_of, scores=scores)
    return collector.requests()

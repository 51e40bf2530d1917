"""`Cluster`: the pools of a scenario on the simulated clock, and a request's path through them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, gcd
from typing import TYPE_CHECKING, Protocol

from perfmodel.cost import Calibration, EngineProfile, Host, ServerFit, SpeculativeCostModel, StepCostModel
from perfmodel.cost.calibrations.draws import Draw, Scores, Uncertainty
from perfmodel.cost.calibrations.host_work import grammar_fit, host_images, load_host_work
from perfmodel.cost.memory.adapters import adapter_load
from perfmodel.engine import Request, StepRecord
from perfmodel.errors import SpecError
from perfmodel.sim.clock import TickEnvironment, to_ticks
from perfmodel.sim.fleet.deployed import Deployed
from perfmodel.sim.fleet.pool import BasisOf, FleetRouter, OnFinished, OnStep, Pool
from perfmodel.sim.replica.acceptance import SimulatedAcceptance
from perfmodel.sim.replica.backend import SimulatedBackend
from perfmodel.sim.replica.grammars import GrammarCompiler
from perfmodel.sim.replica.host_cores import HostCores, wanted_cores
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.pipeline import Pipeline
from perfmodel.sim.replica.replica import EngineRank, FrontEnd, ImageThreads, Replica
from perfmodel.sim.replica.serving import build_locksteps, build_serve_loop, cache_layout, scheduler_config, second_tier
from perfmodel.sim.replica.step_costs import shared_step_costs
from perfmodel.specs.cluster import PoolGroup, PoolSpec, deployments
from perfmodel.specs.engine.speculation import Acceptance
from perfmodel.specs.scenario import Scenario

if TYPE_CHECKING:  # what most clusters lack is loaded by those that have it
    from perfmodel.sim.fleet.disaggregated import DisaggregatedServer
    from perfmodel.sim.fleet.dynamic import DynamicCluster
    from perfmodel.sim.fleet.encoding import EncodingServer
    from perfmodel.sim.fleet.gateway import OnLost, RequestServer
    from perfmodel.sim.fleet.kv_tiers import ClusterTiers, EngineTiers
    from perfmodel.sim.fleet.kv_transfer import KvTransfers


class ExecutedEngines(Protocol):
    """Engines on the calendar `env` whose steps are executed, and so are `transfers` of KV between them."""

    env: TickEnvironment
    transfers: "KvTransfers"

    def locksteps(self, pool: Scenario, engines: range, num_ranks: int) -> Sequence[Lockstep]:
        """Clocks of a pool's `engines`, by index, `num_ranks` of which step together."""

    def run(self, cluster: "Cluster") -> None:
        """Turn the calendar until nothing is left on it."""

    def on_finished(self, engine: int, request: Request) -> None: ...

    def on_step(self, engine: int, record: StepRecord) -> None: ...


class Cluster:
    """Idle pools for `scenario`; `route` picks the replica for a request.

    basis_of: calibration and profile of a pool's scenario; can_leap: batch equal decode steps
    on_finished, on_step: callbacks (replica, request) per awaited answer, (replica, record) per step
    on_lost: callback for each request whose client gets no answer
    one_of: simulate 1/n of each pool's engines; scores: a draw of calibration errors, shared by all pools
    executed: steps are executed there, without the times of a server in front"""

    def __init__(
        self,
        env: TickEnvironment,
        scenario: Scenario,
        basis_of: BasisOf,
        on_finished: OnFinished,
        on_step: OnStep,
        can_leap: bool,
        one_of: int = 1,
        scores: Scores | None = None,
        on_lost: "OnLost" = lambda _: None,
        executed: ExecutedEngines | None = None,
    ) -> None:
        self.scenario, self._executed = scenario, executed
        self.pools: list[Pool] = []
        self.fronts: list[FrontEnd] = []
        self._server_of: dict[int, DisaggregatedServer] = {}  # by engine
        self.transfers: KvTransfers | None = None
        self.tiers: ClusterTiers | None = None
        self.dynamic: DynamicCluster | None = None
        self._env, self._basis_of, self._can_leap = env, basis_of, can_leap
        self._one_of, self._scores = one_of, scores
        if scenario.cluster.is_dynamic:
            from perfmodel.sim.fleet import dynamic

            self.dynamic = dynamic.DynamicCluster(env, scenario, on_finished, on_step, on_lost)
            on_finished = self.dynamic.on_finished
        if scenario.cluster.is_disaggregated:
            from perfmodel.sim.fleet.disaggregated import kv_transfers

            self.transfers = kv_transfers(env, scenario) if executed is None else executed.transfers
        self.encoding: EncodingServer | None = None
        if any(spec.role == "encode" for spec in scenario.pools):
            from perfmodel.sim.fleet import encoding

            self.encoding = server = encoding.EncodingServer(env, scenario, lambda request: self.route(request))
            for spec in scenario.pools:
                if spec.role == "encode":
                    server.join(self._pool(spec, server.on_encoded, on_step, front_end=True))
        groups = scenario.cluster.deployments or deployments(scenario.pools)  # equal replicas are one
        deployed = [self._deploy(group, on_finished, on_step) for group in groups]
        self.servers = [one.server for one in deployed if one.server is not None]
        self.route: Callable[[Request], RequestServer] = deployed[0].route
        if self.dynamic is not None:
            self.route = self.dynamic.over(deployed)

    @property
    def engines(self) -> list[EngineRank]:
        """Engines of all pools, by index."""
        return [engine for pool in self.pools for engine in pool.engines]

    def delay_out(self, engine: EngineRank, batch: int) -> int:
        """Ticks from the end of a step of `engine` that sampled for `batch` sequences until clients have the tokens."""
        return self._server_of.get(engine.index, engine).delay_out(batch)

    def _deploy(self, deployment: PoolGroup, on_finished: OnFinished, on_step: OnStep) -> Deployed:
        if deployment.is_shadow:
            assert self.dynamic is not None
            on_finished, on_step = self.dynamic.on_shadow_finished, self.dynamic.on_shadow_step
        specs = self.scenario.pools
        if deployment.is_disaggregated:
            return self._disaggregated(deployment, on_finished, on_step)
        pools = {n: self._pool(specs[n], on_finished, on_step, front_end=True) for n in deployment.pools}
        return Deployed(deployment, pools, FleetRouter.over(list(pools.values()), self.scenario), None)

    def _pool(self, spec: PoolSpec, on_finished: OnFinished, on_step: OnStep, front_end: bool) -> Pool:
        """Build `spec` with idle replicas, numbered after the existing ones."""
        own, env, executed = self.scenario.of_pool(spec), self._env, self._executed
        calibration, profile, memory = self._basis_of(own)
        exchanges_kv = spec.role in ("prefill", "decode")
        draw = self._draw(calibration, profile, exchanges_kv)
        server = _drawn_server(profile, draw) if front_end and executed is None else ServerFit()
        costs = shared_step_costs(own, calibration, profile)
        cost_model = costs.cost_model(draw)
        backend = backend_of(own, cost_model, is_split=draw is None, is_executed=executed is not None)
        num_ranks = own.engine.data_parallel_size
        num_engines = spec.most_replicas * num_ranks
        if num_engines % self._one_of:
            raise ValueError(f"{spec.most_replicas} x {num_ranks} engines cannot be cut in {self._one_of} equal slices")
        num_engines //= self._one_of
        together = gcd(num_ranks, num_engines)  # what is left of a replica in a slice
        first = len(self.engines)
        if executed is None:
            locksteps = build_locksteps(own.engine, num_engines, together, env, backend, costs.graph, self._can_leap)
        else:
            num_together = together if costs.graph.has_group else 1
            locksteps = list(executed.locksteps(own, range(first, first + num_engines), num_together))
        tier = second_tier(own, costs)
        backend.restore = tier.cost if tier is not None else None
        depths = cost_model if isinstance(cost_model, SpeculativeCostModel) else None
        config = scheduler_config(own, executed is not None, depths)
        if exchanges_kv:  # KV comes and goes by the rules of one scheduler, that of free blocks
            config = replace(config, defers_frees=own.engine.defers_frees, estimates=None)
        tiered = tier if own.engine.kv_offload is not None and own.engine.kv_offload.is_tiered else None
        if tiered is not None:
            from perfmodel.sim.fleet.kv_tiers import ClusterTiers

            config = replace(config, defers_frees=own.engine.defers_frees, estimates=None)
            self.tiers = self.tiers or ClusterTiers(env, 1 / self._one_of)
        shapes = grammar_fit(own)
        layout, count = cache_layout(own), own.engine.api_server_count
        # Of a replica's ranks together where their number is given, else one of each rank (vLLM).
        images = image_threads(own, 1.0 if draw is None else draw.server) if front_end and executed is None else None
        shared = (
            [_front_end(server, ceil(count * together / num_ranks), images) for _ in locksteps[::together]]
            if count
            else []
        )

        def engine(index: int, lockstep: Lockstep) -> EngineRank:
            tiers: EngineTiers | None = None
            host = tier.blocks(has_tensors=executed is not None) if tier is not None else None
            if tiered is not None and self.tiers is not None:
                tiers, host = self.tiers.of_engine(own, tiered, costs)
            loop = build_serve_loop(own, memory.num_kv_blocks, host=host, config=config, layout=layout)
            front = shared[(index - first) // together] if shared else _front_end(server, 1, images)
            rank = EngineRank(lockstep, index, loop, on_finished, on_step, front)
            if tiers is not None:
                tiers.serve(rank)
            if shapes is not None:
                rank.grammars = GrammarCompiler(shapes)
            return rank

        engines = [engine(index, lockstep) for index, lockstep in enumerate(locksteps, first)]
        self.fronts += dict.fromkeys(one.front_end for one in engines)
        replicas = tuple(Replica(engines[i : i + together]) for i in range(0, len(engines), together))
        if own.hardware.host is not None and executed is None:
            _share_cores(own, replicas, to_ticks(server.out_per_sequence_s), cost_model)
        route = FleetRouter.of(spec.router or self.scenario.cluster.router, replicas, self.scenario, spec)
        pipelines = tuple(dict.fromkeys(clock for clock in locksteps if isinstance(clock, Pipeline)))
        self.pools.append(Pool(spec, own, memory, cost_model, replicas, route, backend, pipelines))
        return self.pools[-1]

    def _draw(self, calibration: Calibration, profile: EngineProfile, is_disaggregated: bool) -> Draw | None:
        """The cluster's draw in the units of one pool's uncertainty."""
        if self._scores is None:
            return None
        is_closed_loop = self.scenario.traffic.arrivals.process == "closed_loop"
        return Uncertainty.of(calibration, profile, is_closed_loop, is_disaggregated).draw(self._scores)

    def _disaggregated(self, deployment: PoolGroup, on_finished: OnFinished, on_step: OnStep) -> Deployed:
        from perfmodel.sim.fleet.disaggregated import disaggregated_server

        assert self.transfers is not None
        pools, specs = dict[int, Pool](), self.scenario.pools
        ends: dict[str, OnFinished] = {  # of the server that joins the pools, which are there first
            "prefill": lambda replica, request: joined.on_prefilled(replica, request),
            "decode": lambda replica, request: joined.on_decoded(replica, request),
        }
        for number in sorted(deployment.pools, key=lambda number: specs[number].role != "prefill"):
            pools[number] = self._pool(specs[number], ends[specs[number].role], on_step, front_end=False)
        own = list(pools.values())
        calibration, profile, _ = self._basis_of(own[0].scenario)
        server, images = ServerFit(), None
        if self._executed is None:
            draw = self._draw(calibration, profile, is_disaggregated=True)
            server = _drawn_server(profile, draw)
            images = image_threads(own[0].scenario, 1.0 if draw is None else draw.server)
        # Each prefill replica's server has the prompt's text, which a router passes on, unless their number is given.
        engine, prefill = own[0].scenario.engine, own[0].spec
        processes = engine.api_server_count or max(prefill.replicas // self._one_of, 1)
        num_servers = prefill.most_replicas * (engine.api_server_count or engine.data_parallel_size)
        front = FrontEnd(server, processes, None if images is None else images(num_servers))
        self.fronts.append(front)
        joined = disaggregated_server(self._env, self.scenario, own, on_finished, front, self.transfers)
        self._server_of.update((engine.index, joined) for pool in own for engine in pool.engines)
        return Deployed(deployment, pools, None, joined)


def backend_of(
    scenario: Scenario, cost_model: StepCostModel, is_split: bool = False, is_executed: bool = False
) -> SimulatedBackend:
    """Times the plans of an engine of `scenario` by `cost_model`. is_split: prompts' share of time is counted;
    is_executed: it predicts for an engine that judges drafts itself"""
    config, samples_parts = scenario.engine.speculative_config, scenario.engine.rules.samples_parts
    if config is None:
        backend = SimulatedBackend(cost_model, is_split=is_split, samples_parts=samples_parts)
        backend.adapter_load = adapter_load(scenario)
        return backend
    if is_executed:
        config = config.model_copy(update={"acceptance": Acceptance(rate=0.0)})
    if config.acceptance is None:
        raise SpecError(
            f"{scenario.name}: engine.speculative_config has no acceptance, which a simulation needs: give a rate, or "
            f"the file that `perfmodel execute` has measured."
        )
    acceptance = SimulatedAcceptance(config, scenario.seed)
    backend = SimulatedBackend(cost_model, acceptance, config.ahead, is_split, samples_parts)
    backend.tree_ticks = to_ticks(load_host_work().suffix.prompt_token_s) if config.method == "suffix" else 0
    return backend


def _share_cores(scenario: Scenario, replicas: Sequence[Replica], sent: int, cost_model: StepCostModel) -> None:
    """Let the ranks of each of `replicas` and the API servers before them share the host's cores, where these are few.

    sent: ticks of an API server for a token that it sends"""
    (num_polling, share, _), num_cores, wanted = wanted_cores(scenario)
    host: Host | None = getattr(cost_model, "host", None)
    if host is None or wanted <= num_cores:
        return
    num_ranks = scenario.engine.data_parallel_size
    for ranks in (replica.ranks for replica in replicas):
        fronts, own = list(dict.fromkeys(rank.front_end for rank in ranks)), num_cores * len(ranks) / num_ranks
        num_servers, num_busy = sum([front.num_processes for front in fronts]), partial(_num_busy, fronts)
        threads = sum([front.images.num_threads for front in fronts if front.images is not None])
        cores = HostCores(own, num_polling // num_ranks, share, host, sent, num_servers, num_busy, threads)
        for front in fronts:
            front.cores = cores
        for clock in dict.fromkeys(rank.clock for rank in ranks):
            clock.share(cores)


def _num_busy(fronts: Sequence[FrontEnd], now: int) -> int:
    return sum([front.num_busy(now) for front in fronts])


def image_threads(scenario: Scenario, factor: float = 1.0) -> Callable[[int], ImageThreads] | None:
    """Threads for images of so many API servers of `scenario`, whose work takes `factor` times as long; None: none."""
    work, engine = host_images(scenario), scenario.engine
    if work is None:
        return None
    work, num_bytes = work.times(factor), engine.mm_processor_cache_gb * 2**30
    return partial(ImageThreads, work, engine.media_loading_threads, num_bytes)


def _front_end(server: ServerFit, count: int, images: Callable[[int], ImageThreads] | None) -> FrontEnd:
    return FrontEnd(server, count, None if images is None else images(count))


def _drawn_server(profile: EngineProfile, draw: Draw | None) -> ServerFit:
    return profile.server if draw is None else draw.of_server(profile.server)

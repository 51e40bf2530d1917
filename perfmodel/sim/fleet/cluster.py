"""`Cluster`: the pools of a scenario on the simulated clock, and the way of a request through them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from perfmodel.cost import Calibration, EngineProfile, ServerFit
from perfmodel.cost.calibrations.draws import Draw, Scores, Uncertainty
from perfmodel.engine import Request
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.fleet.deployed import Deployed
from perfmodel.sim.fleet.pool import BasisOf, FleetRouter, OnFinished, OnStep, Pool, build_pool
from perfmodel.sim.replica.replica import EngineRank, FrontEnd
from perfmodel.specs.cluster import PoolGroup, PoolSpec, deployments
from perfmodel.specs.scenario import Scenario

if TYPE_CHECKING:  # what most clusters lack is loaded by those that have it
    from perfmodel.sim.fleet.disaggregated import DisaggregatedServer
    from perfmodel.sim.fleet.dynamic import DynamicCluster
    from perfmodel.sim.fleet.gateway import LostRequest, RequestServer
    from perfmodel.sim.fleet.kv_transfer import KvTransfers


class Cluster:
    """Idle pools of replicas of `scenario`; `route` says which one takes a request.

    basis_of:    calibration and profile of a pool's scenario
    on_step:     called with (replica, record) for each step or leap that has ended
    can_leap:    whether runs of equal steps are advanced together
    on_finished: called with (replica, request) for each answer that is complete, and that a client waits for
    on_lost:     called for each request whose client gets no answer
    one_of:      the pools have one of so many of their engines
    scores:      of a draw of what the costs leave unexplained, the same in all pools
    """

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
        on_lost: "Callable[[LostRequest], None]" = lambda _: None,
    ) -> None:
        self.scenario = scenario
        self.pools: list[Pool] = []
        self._server_of: dict[int, DisaggregatedServer] = {}  # by engine
        self.transfers: KvTransfers | None = None
        self.dynamic: DynamicCluster | None = None
        self._env, self._basis_of, self._can_leap = env, basis_of, can_leap
        self._one_of, self._scores = one_of, scores
        if scenario.cluster.is_dynamic:
            self.dynamic = dynamic = _dynamic_cluster(env, scenario, on_finished, on_step, on_lost)
            on_finished = dynamic.on_finished
        if scenario.cluster.is_disaggregated:
            from perfmodel.sim.fleet.disaggregated import kv_transfers

            self.transfers = kv_transfers(env, scenario)
        deployed = [self._deploy(deployment, on_finished, on_step) for deployment in _deployments(scenario)]
        self.servers = [each.server for each in deployed if each.server is not None]
        self.route: Callable[[Request], RequestServer] = deployed[0].route
        if self.dynamic is not None:
            self.route = self.dynamic.over(deployed)

    @property
    def engines(self) -> list[EngineRank]:
        """Replicas of all pools, by their numbers."""
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
        mine = self.scenario.of_pool(spec)
        calibration, profile, memory = self._basis_of(mine)
        draw = self._draw(calibration, profile, spec.role != "unified")
        server = _drawn_server(profile, draw) if front_end else ServerFit()
        pool = build_pool(
            self._env,
            self.scenario,
            spec,
            memory,
            calibration,
            profile,
            len(self.engines),
            on_finished,
            on_step,
            self._can_leap,
            self._one_of,
            lambda: None if server == ServerFit() else FrontEnd(server),
            draw,
        )
        self.pools.append(pool)
        return pool

    def _draw(self, calibration: Calibration, profile: EngineProfile, is_disaggregated: bool) -> Draw | None:
        """The cluster's draw, in the units of one pool's uncertainty."""
        if self._scores is None:
            return None
        is_closed_loop = self.scenario.traffic.arrivals.process == "closed_loop"
        return Uncertainty.of(calibration, profile, is_closed_loop, is_disaggregated).draw(self._scores)

    def _disaggregated(self, deployment: PoolGroup, on_finished: OnFinished, on_step: OnStep) -> Deployed:
        """Prefill pools come first."""
        from perfmodel.sim.fleet.disaggregated import PrefillDecode

        assert self.transfers is not None
        stages, pools, specs = PrefillDecode(), dict[int, Pool](), self.scenario.pools
        for number in sorted(deployment.pools, key=lambda number: specs[number].role != "prefill"):
            is_prefill = specs[number].role == "prefill"
            ends = stages.on_prefilled if is_prefill else stages.on_decoded
            pools[number] = self._pool(specs[number], ends, on_step, front_end=False)
        mine = list(pools.values())
        calibration, profile, _ = self._basis_of(mine[0].scenario)
        server = _drawn_server(profile, self._draw(calibration, profile, is_disaggregated=True))
        front_end = FrontEnd(server) if server != ServerFit() else None
        joined = stages.join(self._env, self.scenario, mine, on_finished, front_end, self.transfers)
        self._server_of.update((engine.index, joined) for pool in mine for engine in pool.engines)
        return Deployed(deployment, pools, None, joined)


def _deployments(scenario: Scenario) -> tuple[PoolGroup, ...]:
    """The cluster's deployments; equal replicas are one."""
    return scenario.cluster.deployments or deployments(scenario.pools)


def _dynamic_cluster(
    env: TickEnvironment,
    scenario: Scenario,
    on_finished: OnFinished,
    on_step: OnStep,
    on_lost: "Callable[[LostRequest], None]",
) -> "DynamicCluster":
    from perfmodel.sim.fleet.dynamic import DynamicCluster

    return DynamicCluster(env, scenario, on_finished, on_step, on_lost)


def _drawn_server(profile: EngineProfile, draw: Draw | None) -> ServerFit:
    return profile.server if draw is None else draw.of_server(profile.server)

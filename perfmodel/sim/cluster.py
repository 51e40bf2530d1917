"""`Cluster`: the pools of a scenario on the simulated clock, and the way of a request through them."""

__all__ = ["Cluster"]

from collections.abc import Callable
from functools import cache

from perfmodel.cost import Calibration, EngineProfile, ServerFit
from perfmodel.cost.draws import Draw, Scores, Uncertainty
from perfmodel.engine import Request, StepRecord
from perfmodel.sim.clients import Server
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.disaggregated import DisaggregatedServer
from perfmodel.sim.front_end import FrontEnd
from perfmodel.sim.gateway import Gateway, LostRequest, RequestServer
from perfmodel.sim.kv_transfer import TransferCost, transfer_cost
from perfmodel.sim.pool import FleetRouter, OnFinished, OnStep, Pool, build_pool
from perfmodel.sim.pool_basis import BasisOf
from perfmodel.sim.replica import Replica
from perfmodel.specs.cluster import PoolSpec
from perfmodel.specs.scenario import Scenario


class Cluster:
    """Idle pools of replicas; `route` says who takes a request.

    on_finished: called with (replica, request) for each answer that is complete, and that a client waits for
    on_lost:     called for each request whose client gets no answer
    one_of: the pools have one of so many of their engines
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
        on_lost: Callable[[LostRequest], None] = lambda _: None,
    ) -> None:
        self.scenario = scenario
        self.pools: list[Pool] = []
        self.disaggregated: DisaggregatedServer | None = None
        self._env, self._basis_of, self._can_leap = env, basis_of, can_leap
        self._one_of, self._scores = one_of, scores
        self._on_answer, self._on_step = on_finished, on_step
        on_finished = self._on_finished
        if scenario.cluster.is_disaggregated:
            self._build_disaggregated()
        else:
            for spec in scenario.pools:
                self.pools.append(self._pool(spec, on_finished, on_step, front_end=True))
        self.gateway: Gateway | None = None
        self.route: Callable[[Request], Server] = self._route()
        if scenario.cluster.gateway is not None:
            self.gateway = gateway = Gateway(env, scenario.cluster.gateway, scenario.seed, self.route, on_lost)
            self.route = lambda _: gateway

    @property
    def engines(self) -> list[Replica]:
        """Of all pools, by their numbers."""
        return [engine for pool in self.pools for engine in pool.engines]

    def _on_finished(self, replica: Replica, request: Request) -> None:
        gateway = self.gateway
        if gateway is None:
            self._on_answer(replica, request)
            return
        is_awaited = gateway.answer(request)
        gateway.look_again()
        if is_awaited:
            self._on_answer(replica, request)

    def with_role(self, role: str) -> list[Pool]:
        return [pool for pool in self.pools if pool.spec.role == role]

    def _pool(self, spec: PoolSpec, on_finished: OnFinished, on_step: OnStep, front_end: bool) -> Pool:
        mine = self.scenario.of_pool(spec)
        calibration, profile, memory = self._basis_of(mine)
        draw = self._draw(calibration, profile)
        server = _drawn_server(profile, draw) if front_end else ServerFit()
        return build_pool(
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

    def _draw(self, calibration: Calibration, profile: EngineProfile) -> Draw | None:
        """The cluster's draw, in the units of one pool's uncertainty."""
        if self._scores is None:
            return None
        is_closed_loop = self.scenario.traffic.arrivals.process == "closed_loop"
        is_disaggregated = self.scenario.cluster.is_disaggregated
        return Uncertainty.of(calibration, profile, is_closed_loop, is_disaggregated).draw(self._scores)

    def _route(self) -> Callable[[Request], RequestServer]:
        if self.disaggregated is not None:
            server = self.disaggregated
            return lambda request: server
        return self._among(self.pools)

    def _among(self, pools: list[Pool]) -> Callable[[Request], Replica]:
        """The router over the replicas of some pools: their own if there is but one pool."""
        if len(pools) == 1:
            return pools[0].route
        replicas = [ranks for pool in pools for ranks in pool.ranks]
        return FleetRouter(self.scenario.cluster.router, replicas, self.scenario.seed)

    def _build_disaggregated(self) -> None:
        def on_prefilled(replica: Replica, request: Request) -> None:
            server.on_prefilled(replica, request)

        def on_decoded(replica: Replica, request: Request) -> None:
            server.on_decoded(replica, request)

        def on_decode_step(replica: Replica, record: StepRecord) -> None:
            server.fetch(replica)  # blocks may have gone free
            self._on_step(replica, record)

        scenario = self.scenario
        for spec in sorted(scenario.pools, key=lambda spec: spec.role != "prefill"):
            is_prefill = spec.role == "prefill"
            on_finished = on_prefilled if is_prefill else on_decoded
            on_step = self._on_step if is_prefill else on_decode_step
            self.pools.append(self._pool(spec, on_finished, on_step, front_end=False))
        prefill, decode = self.with_role("prefill"), self.with_role("decode")
        calibration, profile, _ = self._basis_of(prefill[0].scenario)
        front_end = _drawn_server(profile, self._draw(calibration, profile))
        self.disaggregated = server = DisaggregatedServer(
            self._env,
            self._among(prefill),
            self._among(decode),
            self._transfer_costs(),
            self._on_finished,
            FrontEnd(front_end) if front_end != ServerFit() else None,
        )

    def _transfer_costs(self) -> Callable[[int, int], TransferCost]:
        pool_of = [number for number, pool in enumerate(self.pools) for _ in pool.engines]
        spec = self.scenario.cluster.kv_transfer

        @cache
        def between(source: int, target: int) -> TransferCost:
            a, b = self.pools[source].scenario, self.pools[target].scenario
            return transfer_cost(a, b, spec.link_of(a.hardware), spec.link_of(b.hardware))

        return lambda source, target: between(pool_of[source], pool_of[target])


def _drawn_server(profile: EngineProfile, draw: Draw | None) -> ServerFit:
    return profile.server if draw is None else draw.of_server(profile.server)

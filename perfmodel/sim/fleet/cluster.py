"""`Cluster`: the pools of a scenario on the simulated clock, and the way of a request through them."""

__all__ = ["Cluster"]

from collections.abc import Callable

from perfmodel.cost import Calibration, EngineProfile, ServerFit
from perfmodel.cost.draws import Draw, Scores, Uncertainty
from perfmodel.engine import Request
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.fleet.disaggregated import DisaggregatedServer
from perfmodel.sim.fleet.dynamic import DynamicCluster
from perfmodel.sim.fleet.gateway import LostRequest
from perfmodel.sim.fleet.pool import FleetRouter, OnFinished, OnStep, Pool, build_pool
from perfmodel.sim.fleet.pool_basis import BasisOf
from perfmodel.sim.fleet.prefill_decode import PrefillDecode
from perfmodel.sim.replica.front_end import FrontEnd
from perfmodel.sim.replica.replica import Replica
from perfmodel.sim.traffic.clients import Server
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
        self.dynamic: DynamicCluster | None = None
        self._env, self._basis_of, self._can_leap = env, basis_of, can_leap
        self._one_of, self._scores = one_of, scores
        if scenario.cluster.is_dynamic:
            self.dynamic = dynamic = DynamicCluster(env, scenario, on_finished, on_step, on_lost)
            on_finished = dynamic.on_finished
        if scenario.cluster.is_disaggregated:
            self._build_disaggregated(on_finished, on_step)
        else:
            for spec in scenario.pools:
                self.pools.append(self._pool(spec, on_finished, on_step, front_end=True))
        self.route: Callable[[Request], Server] = self._route()
        if self.dynamic is not None:
            self.route = self.dynamic.over(self.pools, self.disaggregated)

    @property
    def engines(self) -> list[Replica]:
        """Of all pools, by their numbers."""
        return [engine for pool in self.pools for engine in pool.engines]

    def _pool(self, spec: PoolSpec, on_finished: OnFinished, on_step: OnStep, front_end: bool) -> Pool:
        if spec.shadow:
            assert self.dynamic is not None
            on_finished, on_step = self.dynamic.on_shadow_finished, self.dynamic.on_shadow_step
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

    def _route(self) -> Callable[[Request], Server]:
        if self.disaggregated is not None:
            server = self.disaggregated
            return lambda request: server
        return FleetRouter.over(self.pools, self.scenario)

    def _build_disaggregated(self, on_finished: OnFinished, on_step: OnStep) -> None:
        stages = PrefillDecode(on_step)
        for spec in sorted(self.scenario.pools, key=lambda spec: spec.role != "prefill"):
            is_prefill = spec.role == "prefill"
            ends = stages.on_prefilled if is_prefill else stages.on_decoded
            self.pools.append(self._pool(spec, ends, on_step if is_prefill else stages.on_decode_step, front_end=False))
        calibration, profile, _ = self._basis_of(self.pools[0].scenario)  # prefill pools come first
        server = _drawn_server(profile, self._draw(calibration, profile))
        front_end = FrontEnd(server) if server != ServerFit() else None
        self.disaggregated = stages.join(self._env, self.scenario, self.pools, on_finished, front_end)


def _drawn_server(profile: EngineProfile, draw: Draw | None) -> ServerFit:
    return profile.server if draw is None else draw.of_server(profile.server)

"""`DynamicCluster`: a gateway before pools whose replicas come and go, and traffic split between pools."""

__all__ = ["DynamicCluster"]

from collections import Counter
from collections.abc import Callable, Sequence

from perfmodel.engine import Request, StepRecord
from perfmodel.sim.clock import TickEnvironment, to_ticks
from perfmodel.sim.fleet.autoscaler import Autoscaler, Failures, add_stragglers
from perfmodel.sim.fleet.deployed import Deployed
from perfmodel.sim.fleet.fleet import Fleet
from perfmodel.sim.fleet.gateway import Entrance, Gateway, LostRequest, RequestServer
from perfmodel.sim.fleet.pool import OnFinished, OnStep, Pool
from perfmodel.sim.replica.replica import EngineRank, Replica
from perfmodel.sim.traffic.hashed import Shares
from perfmodel.specs.cluster import GatewaySpec
from perfmodel.specs.scenario import Scenario

OnFailed = Callable[[Replica], None]


class DynamicCluster:
    """What a cluster of `scenario` has beside its engines. Its callbacks stand between these and the driver.

    on_step:   called with (replica, record) for each step or leap that has ended
    on_answer: called with (replica, request) for each answer that a client waits for
    on_lost:   called for each request whose client gets no answer
    is_sent:   whether the clients have sent all they will; the driver sets it
    """

    def __init__(
        self,
        env: TickEnvironment,
        scenario: Scenario,
        on_answer: OnFinished,
        on_step: OnStep,
        on_lost: Callable[[LostRequest], None],
    ) -> None:
        spec = scenario.cluster.gateway or GatewaySpec()
        self.gateway = Gateway(env, spec, scenario.seed, self._route, on_lost)
        self.fleets: dict[int, Fleet] = {}  # by the position of their pool in the scenario
        self.shadowed: Counter[int] = Counter()  # answers of shadow pools, by engine
        self.is_sent: Callable[[], bool] = lambda: False
        self._env, self._scenario, self._on_answer, self._on_step = env, scenario, on_answer, on_step
        self._pinned: EngineRank | None = None
        self._ways_in: list[Callable[[Request], RequestServer]] = []
        self._shares = Shares([], scenario.seed, "models")
        self._shadows: list[tuple[Shares, Callable[[Request], RequestServer]]] = []

    # ---------------------------------------------------------------- what engines call

    def on_finished(self, replica: EngineRank, request: Request) -> None:
        """An answer is complete: those that waited for its place go first, then its client goes on."""
        is_awaited = self.gateway.answer(request)
        self.gateway.look_again()
        if is_awaited:
            self._on_answer(replica, request)

    def on_shadow_finished(self, replica: EngineRank, request: Request) -> None:
        """Nobody waits for it."""
        self.shadowed[replica.index] += 1

    def on_shadow_step(self, replica: EngineRank, record: StepRecord) -> None:
        """A step like any other, but the gaps between its tokens are not recorded."""
        replica.loop.scheduler.irregular_gaps.clear()
        self._on_step(replica, record._replace(num_gaps=0))

    # ---------------------------------------------------------------- the way in

    def over(self, deployed: Sequence[Deployed]) -> Callable[[Request], "DynamicCluster"]:
        """Stand before these; returns where a request goes."""
        served = [each for each in deployed if not each.spec.is_shadow]
        shares = [each.spec.share for each in served if each.spec.share is not None]
        self._shares = Shares(shares, self._scenario.seed, "models")
        self._ways_in = [self._way_in(each) for each in served]
        for each in deployed:
            if each.spec.is_shadow:
                assert each.spec.share is not None
                purpose = f"shadow{each.spec.pools[0]}"
                self._shadows.append((Shares([each.spec.share], self._scenario.seed, purpose), self._way_in(each)))
        self._add_failures()
        return lambda _: self

    def add(self, request: Request) -> None:
        """A client sends `request` now; shadow pools get copies."""
        for shares, way_in in self._shadows:
            if shares.of(request.request_id) == 0:
                copy = request.afresh()
                way_in(copy).add(copy)
        self.gateway.add(request)

    def send_to(self, engine: EngineRank, request: Request) -> None:
        """As `add`, for a client that has chosen the engine itself. Only without limits of the gateway's."""
        self._pinned = engine
        try:
            self.gateway.add(request)
        finally:
            self._pinned = None

    def abort(self, request: Request) -> bool:
        """Its client has gone; shadow pools go on with their copies."""
        self.gateway.abort(request.request_id)
        return True

    def _route(self, request: Request) -> RequestServer:
        if self._pinned is not None:
            return self._pinned
        kind = self._shares.of(request.request_id) if len(self._ways_in) > 1 else 0
        return self._ways_in[kind](request)

    def _way_in(self, deployed: Deployed) -> Callable[[Request], RequestServer]:
        """What takes the requests of a deployment, whose replicas may come and go from now on."""
        server, router, gateway = deployed.server, deployed.router, self.gateway
        if server is not None:
            for number, pool in deployed.pools.items():
                entrance = server.prefill_entrance if pool.spec.role == "prefill" else server.decode_entrance
                self._add_fleet(
                    number,
                    pool,
                    entrance,
                    lambda replica: gateway.fail(server.fail(replica.ranks)),
                    lambda replica: server.sever(replica.ranks),
                )
            return lambda _: server
        assert router is not None
        is_shadow = deployed.spec.is_shadow
        entrance = Entrance(router, (lambda request, replica: replica.add(request)) if is_shadow else gateway.hand_over)
        for number, pool in deployed.pools.items():
            self._add_fleet(number, pool, entrance, lambda replica: gateway.fail(gateway.outstanding_at(replica.ranks)))
        return entrance

    def fleet_of(self, pool: Pool) -> Fleet | None:
        """The replicas of `pool`, if they come and go."""
        return next((fleet for fleet in self.fleets.values() if fleet.pool is pool), None)

    def _add_fleet(
        self,
        number: int,
        pool: Pool,
        entrance: Entrance,
        on_lost: OnFailed,
        on_dead: OnFailed = lambda _: None,
    ) -> None:
        """Adds the fleet of `pool`, number `number`, if its replicas can come or go: each of them is then watched.

        entrance: where its requests wait; on_lost, on_dead: as of a `Fleet`
        """
        spec = pool.spec.autoscaling
        if spec is None and (self._scenario.cluster.failures is None or pool.spec.shadow):
            return
        weight_bytes = pool.weight_bytes_per_replica
        failures = self._scenario.cluster.failures
        start_s = spec.start_s(weight_bytes) if spec is not None else failures.start_s if failures is not None else 0.0
        dead = to_ticks(failures.detection_s) if failures is not None else 0
        fleet = Fleet(self._env, pool, entrance, pool.spec.replicas, to_ticks(start_s), on_lost, dead, on_dead)
        self.fleets[number] = fleet
        if spec is not None:
            Autoscaler(self._env, spec, fleet, self._is_over)

    def _add_failures(self) -> None:
        failures = self._scenario.cluster.failures
        if failures is not None:
            fleets = {n: self.fleets[n] for n in sorted(self.fleets) if not self.fleets[n].pool.spec.shadow}
            Failures(self._env, failures, fleets, self._scenario.seed, self._is_over)
            add_stragglers(self._env, failures.slowdowns, fleets)

    def _is_over(self) -> bool:
        return self.is_sent() and not self.gateway.has_requests

"""`DynamicCluster`: a gateway before pools whose replicas come and go, and traffic split between pools."""

__all__ = ["DynamicCluster"]

from collections import Counter
from collections.abc import Callable, Sequence

from perfmodel.engine import Request, StepRecord
from perfmodel.sim.clock import TickEnvironment, to_ticks
from perfmodel.sim.fleet.autoscaler import Autoscaler, Failures
from perfmodel.sim.fleet.disaggregated import DisaggregatedServer
from perfmodel.sim.fleet.entrance import Entrance
from perfmodel.sim.fleet.fleet import Fleet
from perfmodel.sim.fleet.gateway import Gateway, LostRequest, RequestServer
from perfmodel.sim.fleet.pool import FleetRouter, OnFinished, OnStep, Pool
from perfmodel.sim.replica.replica import Replica
from perfmodel.sim.traffic.shares import Shares
from perfmodel.specs.gateway import GatewaySpec
from perfmodel.specs.scenario import Scenario


class DynamicCluster:
    """What a cluster has beside its engines. Its callbacks stand between these and the driver.

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
        self.fleets: dict[int, Fleet] = {}  # by the number of their pool
        self.shadowed: Counter[int] = Counter()  # answers of shadow pools, by engine
        self.is_sent: Callable[[], bool] = lambda: False
        self._env, self._scenario, self._on_answer, self._on_step = env, scenario, on_answer, on_step
        self._entrances: list[Callable[[Request], RequestServer]] = []
        self._shares = Shares([], scenario.seed, "models")
        self._shadows: list[tuple[Shares, Entrance]] = []

    # ---------------------------------------------------------------- what engines call

    def on_finished(self, replica: Replica, request: Request) -> None:
        """An answer is complete: those that waited for its place go first, then its client goes on."""
        is_awaited = self.gateway.answer(request)
        self.gateway.look_again()
        if is_awaited:
            self._on_answer(replica, request)

    def on_shadow_finished(self, replica: Replica, request: Request) -> None:
        """Nobody waits for it."""
        self.shadowed[replica.index] += 1

    def on_shadow_step(self, replica: Replica, record: StepRecord) -> None:
        """A step like any other, but the gaps between its tokens are nobody's."""
        replica.loop.scheduler.irregular_gaps.clear()
        self._on_step(replica, record._replace(num_gaps=0))

    # ---------------------------------------------------------------- the way in

    def over(
        self, pools: Sequence[Pool], disaggregated: DisaggregatedServer | None
    ) -> Callable[[Request], "DynamicCluster"]:
        """Stand before `pools`, or before what joins them; returns where a request goes."""
        if disaggregated is not None:
            self._entrances.append(lambda _: disaggregated)
        else:
            self._divide(pools)
            self._add_failures(pools)
        return lambda _: self

    def add(self, request: Request) -> None:
        """A client sends `request` now; shadow pools get copies."""
        for shares, entrance in self._shadows:
            if shares.of(request.request_id) == 0:
                copy = request.afresh()
                entrance(copy).add(copy)
        self.gateway.add(request)

    def _route(self, request: Request) -> RequestServer:
        kind = self._shares.of(request.request_id) if len(self._entrances) > 1 else 0
        return self._entrances[kind](request)

    def _divide(self, pools: Sequence[Pool]) -> None:
        """An entrance for each pool with a share of its own, or one for all."""
        served = [(number, pool) for number, pool in enumerate(pools) if not pool.spec.shadow]
        shares = [pool.spec.share for _, pool in served if pool.spec.share is not None]
        groups = [[one] for one in served] if shares else [served]
        self._shares = Shares(shares, self._scenario.seed, "models")
        for group in groups:
            router = FleetRouter.over([pool for _, pool in group], self._scenario)
            entrance = Entrance(router, self.gateway.hand_over)
            self._entrances.append(entrance)
            for number, pool in group:
                self._add_fleet(number, pool, entrance)
        for number, pool in enumerate(pools):
            if pool.spec.shadow:
                assert pool.spec.share is not None
                entrance = Entrance(pool.route, lambda request, replica: replica.add(request))
                self._shadows.append((Shares([pool.spec.share], self._scenario.seed, f"shadow{number}"), entrance))
                self._add_fleet(number, pool, entrance)

    def _add_fleet(self, number: int, pool: Pool, entrance: Entrance) -> None:
        """Only where replicas can come or go: it has each of them watched."""
        spec = pool.spec.autoscaling
        if spec is None and (self._scenario.cluster.failures is None or pool.spec.shadow):
            return
        num_ranks = len(pool.ranks[0])
        weight_bytes = pool.memory.weight_bytes * pool.devices_per_engine * num_ranks
        failures = self._scenario.cluster.failures
        start_s = spec.start_s(weight_bytes) if spec is not None else failures.start_s if failures is not None else 0.0
        fleet = Fleet(self._env, pool, entrance, pool.spec.replicas, to_ticks(start_s), self._lose)
        self.fleets[number] = fleet
        if spec is not None:
            Autoscaler(self._env, spec, fleet, self._is_over)

    def _add_failures(self, pools: Sequence[Pool]) -> None:
        failures = self._scenario.cluster.failures
        if failures is not None:
            fleets = {n: fleet for n, fleet in self.fleets.items() if not pools[n].spec.shadow}
            Failures(self._env, failures, fleets, self._scenario.seed, self._is_over)

    def _lose(self, ranks: tuple[Replica, ...]) -> None:
        self.gateway.fail(self.gateway.outstanding_at(ranks))

    def _is_over(self) -> bool:
        return self.is_sent() and not self.gateway.has_requests

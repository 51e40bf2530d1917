"""`DynamicCluster`: gateway, scaled pools and traffic splits.

Replicas come, go or slow down by `Autoscaler` (load), failures (random or scheduled) and stragglers."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import log, prod

from simpy.events import Event

from perfmodel.engine import Request, StepRecord
from perfmodel.engine.admission import VirtualTokenCounters
from perfmodel.errors import WorkloadError
from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment, to_ticks
from perfmodel.sim.fleet.autoscalers import MAX_EVENTS, Autoscaler
from perfmodel.sim.fleet.deployed import Deployed
from perfmodel.sim.fleet.fleet import Fleet
from perfmodel.sim.fleet.gateway import Entrance, Gateway, HandOver, OnLost, RequestServer
from perfmodel.sim.fleet.pool import OnFinished, OnStep, Pool
from perfmodel.sim.replica.replica import EngineRank, Replica
from perfmodel.sim.traffic.distributions import Shares, class_shares, hashed
from perfmodel.specs.cluster import FailuresSpec, GatewaySpec, Slowdown
from perfmodel.specs.scenario import Scenario


def add_failures(
    env: TickEnvironment, spec: FailuresSpec, fleets: Mapping[int, Fleet], seed: int, is_over: Callable[[], bool]
) -> None:
    """Inject failures per `spec` into `fleets` (by pool number) until `is_over`. seed: of times between failures."""
    num_draws = 0

    def fail(fleet: Fleet, number: int, down_s: float, _: Event | None = None) -> None:
        if not is_over():
            fleet.fail(number, to_ticks(down_s))

    def draw_failure(fleet: Fleet, number: int) -> None:
        """Times to failure are memoryless, so a draining replica may draw a new one."""
        nonlocal num_draws
        assert spec.mtbf_s is not None
        num_draws += 1
        if num_draws > MAX_EVENTS and not env.is_paced:
            raise WorkloadError(
                f"replicas have failed {MAX_EVENTS:,} times in {env.ticks / TICKS_PER_S:.4g} simulated s; "
                f"raise mtbf_s ({spec.mtbf_s:g}), or give traffic that ends sooner"
            )
        u = (hashed(seed, num_draws) + 1) / 2**64
        fleet.later(number, to_ticks(-log(u) * spec.mtbf_s), partial(fail, fleet, number, spec.repair_s))

    for event in spec.events:
        down_s = spec.repair_s if event.down_s is None else event.down_s
        Alarm(env, to_ticks(event.at_s), partial(fail, fleets[event.pool], event.replica, down_s), ARRIVAL_PRIORITY)
    for fleet in fleets.values() if spec.mtbf_s is not None else ():
        fleet.on_up.append(partial(draw_failure, fleet))
        for number in range(len(fleet.pool.replicas)):
            if fleet.is_up(number):
                draw_failure(fleet, number)


def add_stragglers(env: TickEnvironment, slowdowns: Sequence[Slowdown], fleets: Mapping[int, Fleet]) -> None:
    """Apply `slowdowns` to replicas of `fleets` (by pool number); overlapping slowdowns multiply."""
    factors: defaultdict[tuple[int, int], list[float]] = defaultdict(list)

    def change(slowdown: Slowdown, is_over: bool, _: Event) -> None:
        present = factors[slowdown.pool, slowdown.replica]
        (present.remove if is_over else present.append)(slowdown.factor)
        for rank in fleets[slowdown.pool].pool.replicas[slowdown.replica].ranks:
            rank.slow_down(prod(sorted(present)))

    for slowdown in slowdowns:
        begin = to_ticks(slowdown.at_s)
        Alarm(env, begin, partial(change, slowdown, False), ARRIVAL_PRIORITY)
        if slowdown.for_s is not None:
            Alarm(env, begin + to_ticks(slowdown.for_s), partial(change, slowdown, True), ARRIVAL_PRIORITY)


class DynamicCluster:
    """Gateway, fleets and traffic splits of `scenario`. Wraps the callbacks `on_step`, `on_answer` and `on_lost`.

    is_sent: whether clients have sent their last request; the driver sets it"""

    def __init__(
        self, env: TickEnvironment, scenario: Scenario, on_answer: OnFinished, on_step: OnStep, on_lost: OnLost
    ) -> None:
        spec, counters, tenants = scenario.cluster.gateway or GatewaySpec(), None, class_shares(scenario)
        if spec.scheduling_policy == "vtc":
            weights = [tenant.weight for tenant in scenario.traffic.classes]
            counters = VirtualTokenCounters(weights, spec.vtc.input_weight, spec.vtc.output_weight)
        self.gateway = Gateway(
            env, spec, scenario.seed, self._route, on_lost, tenants.of if counters else lambda _: 0, counters
        )
        self.fleets: dict[int, Fleet] = {}  # by the position of their pool in the scenario
        self.shadowed: Counter[int] = Counter()  # answers of shadow pools, by engine
        self.is_sent: Callable[[], bool] = lambda: False
        self._env, self._scenario, self._on_answer, self._on_step = env, scenario, on_answer, on_step
        self._pinned: EngineRank | None = None
        self._entry_routers: list[Callable[[Request], RequestServer]] = []
        self._shares = Shares([], scenario.seed, "models")
        self._shadows: list[tuple[Shares, Callable[[Request], RequestServer]]] = []

    def on_finished(self, replica: EngineRank, request: Request) -> None:
        """Admit requests that waited for this answer's slot, then notify the client."""
        is_awaited = self.gateway.answer(request)
        self.gateway.reschedule()
        if is_awaited:
            self._on_answer(replica, request)

    def on_shadow_finished(self, replica: EngineRank, request: Request) -> None:
        """Drop the answer: no client waits for it."""
        self.shadowed[replica.index] += 1

    def on_shadow_step(self, replica: EngineRank, record: StepRecord) -> None:
        """Record the step, without its inter-token gaps."""
        replica.loop.scheduler.irregular_gaps.clear()
        self._on_step(replica, record._replace(num_gaps=0))

    def over(self, deployed: Sequence[Deployed]) -> Callable[[Request], "DynamicCluster"]:
        """Install in front of `deployed`; return the router of requests."""
        spec, seed = self._scenario.cluster.failures, self._scenario.seed
        served = [one for one in deployed if not one.spec.is_shadow]
        self._shares = Shares([one.spec.share for one in served if one.spec.share is not None], seed, "models")
        self._entry_routers = [self._entry_router(one) for one in served]
        for one in deployed:
            if one.spec.is_shadow:
                assert one.spec.share is not None
                shares = Shares([one.spec.share], seed, f"shadow{one.spec.pools[0]}")
                self._shadows.append((shares, self._entry_router(one)))
        if spec is not None:
            fleets = {n: self.fleets[n] for n in sorted(self.fleets) if not self.fleets[n].pool.spec.shadow}
            add_failures(self._env, spec, fleets, seed, self._is_over)
            add_stragglers(self._env, spec.slowdowns, fleets)
        return lambda _: self

    def add(self, request: Request) -> None:
        """Send a client's `request` now; shadow pools get copies."""
        for shares, router in self._shadows:
            if shares.of(request.request_id) == 0:
                copy = request.afresh()
                router(copy).add(copy)
        self.gateway.add(request)

    def send_to(self, engine: EngineRank, request: Request) -> None:
        """As `add`, to an engine that the client chose. Only without gateway limits."""
        self._pinned = engine
        try:
            self.gateway.add(request)
        finally:
            self._pinned = None

    def abort(self, request: Request) -> bool:
        """Abort at the client's request; shadow copies continue."""
        self.gateway.abort(request.request_id)
        return True

    def _route(self, request: Request) -> RequestServer:
        if self._pinned is not None:
            return self._pinned
        kind = self._shares.of(request.request_id) if len(self._entry_routers) > 1 else 0
        return self._entry_routers[kind](request)

    def _entry_router(self, deployed: Deployed) -> Callable[[Request], RequestServer]:
        """Router into a deployment whose replicas may now come and go."""
        server, gateway = deployed.server, self.gateway
        if server is not None:
            for number, pool in deployed.pools.items():
                entrance = server.prefill_entrance if pool.spec.role == "prefill" else server.decode_entrance
                self._add_fleet(number, pool, entrance, server.fail, lambda replica: server.sever(replica.ranks))
            return lambda _: server
        assert deployed.router is not None
        is_shadow = deployed.spec.is_shadow
        hand_over: HandOver = (lambda request, rank: rank.add(request)) if is_shadow else gateway.hand_over
        entrance = Entrance(deployed.router, hand_over)
        for number, pool in deployed.pools.items():
            self._add_fleet(number, pool, entrance, gateway.outstanding_at)
        return entrance

    def fleet_of(self, pool: Pool) -> Fleet | None:
        """Fleet of `pool`; None if its size is fixed."""
        return next((fleet for fleet in self.fleets.values() if fleet.pool is pool), None)

    def _add_fleet(
        self,
        number: int,
        pool: Pool,
        entrance: Entrance,
        lost_with: Callable[[Sequence[EngineRank]], list[Request]],
        on_dead: Callable[[Replica], None] = lambda _: None,
    ) -> None:
        """Add a fleet for `pool` if its replicas can come or go; `lost_with`: requests that fail with these ranks."""
        spec, failures = pool.spec.autoscaling, self._scenario.cluster.failures
        if spec is None and (failures is None or pool.spec.shadow):
            return
        start_s = failures.start_s if failures is not None else 0.0
        if spec is not None:
            start_s = spec.start_s(pool.weight_bytes_per_replica, pool.spec.engine.num_graphs)
        dead = to_ticks(failures.detection_s) if failures is not None else 0

        def on_lost(replica: Replica) -> None:
            self.gateway.fail(lost_with(replica.ranks))

        fleet = Fleet(self._env, pool, entrance, pool.spec.replicas, to_ticks(start_s), on_lost, dead, on_dead)
        self.fleets[number] = fleet
        if spec is not None:
            Autoscaler(self._env, spec, fleet, self._is_over)

    def _is_over(self) -> bool:
        return self.is_sent() and not self.gateway.has_requests

"""`DynamicCluster`: a gateway before pools whose replicas come and go, and traffic split between pools.

What makes replicas come, go or slow down: `Autoscaler` by load, `Failures` by chance or by order, stragglers.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil, log, prod

from perfmodel.engine import Request, StepRecord
from perfmodel.errors import WorkloadError
from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment, to_ticks
from perfmodel.sim.fleet.deployed import Deployed
from perfmodel.sim.fleet.fleet import Fleet
from perfmodel.sim.fleet.gateway import Entrance, Gateway, LostRequest, RequestServer
from perfmodel.sim.fleet.pool import OnFinished, OnStep, Pool
from perfmodel.sim.replica.replica import EngineRank, Replica
from perfmodel.sim.traffic.distributions import Shares, hashed
from perfmodel.specs.cluster import AutoscalingSpec, FailuresSpec, GatewaySpec, Slowdown
from perfmodel.specs.scenario import Scenario

_MOST_EVENTS = 1_000_000  # looks or failures of one run: seven seconds. A week of looks every second has 600,000


class Autoscaler:
    """Looks at the load of `fleet` every `spec.interval_s` seconds, until `is_over`, and sets its size."""

    def __init__(self, env: TickEnvironment, spec: AutoscalingSpec, fleet: Fleet, is_over: Callable[[], bool]) -> None:
        self._env, self._spec, self._fleet, self._is_over = env, spec, fleet, is_over
        self._interval = to_ticks(spec.interval_s)
        self._delay = to_ticks(spec.scale_down_delay_s)
        self._wanted: deque[tuple[int, int]] = deque()  # (tick, replicas) of late, each less than those before it
        self._num_looks = 0
        fleet.entrance.on_waiting.append(self._wake)
        self._wait()

    def _wait(self) -> None:
        Alarm(self._env, self._interval, lambda _: self._look(), ARRIVAL_PRIORITY)

    def _wake(self) -> None:
        """A request waits and no replica can take it: it does not wait until the next look."""
        if not self._fleet.num("starting", "failed"):
            self._fleet.start()

    def _look(self) -> None:
        if self._is_over():
            return
        self._num_looks += 1
        if self._num_looks > _MOST_EVENTS and not self._env.is_paced:
            raise WorkloadError(
                f"autoscaling has looked at the load {_MOST_EVENTS:,} times in {self._env.ticks / TICKS_PER_S:.4g} "
                f"simulated seconds; raise its interval_s ({self._spec.interval_s:g}), or give traffic that ends sooner"
            )
        self._resize()
        self._wait()

    def _resize(self) -> None:
        fleet, now = self._fleet, self._env.ticks
        size, wanted = fleet.num("up", "starting", "dead"), self._desired()
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self._delay:
            self._wanted.popleft()
        for _ in range(wanted - size):
            fleet.start()
        least = self._wanted[0][1]
        for _ in range(min(size - least, fleet.num("up"))):
            fleet.drain()

    def _desired(self) -> int:
        spec, fleet = self._spec, self._fleet
        held = fleet.entrance.num_waiting
        if spec.metric == "concurrency":
            wanted = ceil((fleet.num_outstanding + held) / spec.target)
        elif spec.metric == "kv_cache_usage":
            wanted = max(ceil(fleet.kv_load / spec.target), 1 if held or fleet.num_outstanding else 0)
        else:
            waiting, size = fleet.num_waiting + held, fleet.num("up", "starting", "dead")
            is_idle = not (waiting or fleet.num_outstanding)
            wanted = max(ceil(waiting / spec.target), 0 if is_idle else 1, size - 1 if not waiting else size)
        return min(max(wanted, spec.min_replicas), spec.max_replicas)


class Failures:
    """Makes replicas of `fleets`, by the numbers of their pools, fail as `spec` says, until `is_over`.

    seed: of the times between failures
    """

    def __init__(
        self,
        env: TickEnvironment,
        spec: FailuresSpec,
        fleets: Mapping[int, Fleet],
        seed: int,
        is_over: Callable[[], bool],
    ) -> None:
        self._env, self._spec, self._seed, self._is_over = env, spec, seed, is_over
        self._num_draws = 0
        for event in spec.events:
            down_s = spec.repair_s if event.down_s is None else event.down_s
            self._at(to_ticks(event.at_s), fleets[event.pool], event.replica, to_ticks(down_s))
        if spec.mtbf_s is not None:
            for fleet in fleets.values():
                fleet.on_up.append(lambda number, fleet=fleet: self._live(fleet, number))  # type: ignore[misc]
                for number in range(len(fleet.pool.replicas)):
                    if fleet.is_up(number):
                        self._live(fleet, number)

    def _live(self, fleet: Fleet, number: int) -> None:
        """Draw when the replica fails. Times to failure have no memory, so a draining one may be given a new one."""
        assert self._spec.mtbf_s is not None
        self._num_draws += 1
        if self._num_draws > _MOST_EVENTS and not self._env.is_paced:
            raise WorkloadError(
                f"replicas have failed {_MOST_EVENTS:,} times in {self._env.ticks / TICKS_PER_S:.4g} simulated s; "
                f"raise mtbf_s ({self._spec.mtbf_s:g}), or give traffic that ends sooner"
            )
        u = (hashed(self._seed, self._num_draws) + 1) / 2**64
        turn = fleet.turn(number)
        delay = to_ticks(-log(u) * self._spec.mtbf_s)
        repair = to_ticks(self._spec.repair_s)

        def end() -> None:
            if fleet.is_current(number, turn) and not self._is_over():
                fleet.fail(number, repair)

        Alarm(self._env, delay, lambda _: end(), ARRIVAL_PRIORITY)

    def _at(self, tick: int, fleet: Fleet, number: int, down_ticks: int) -> None:
        def end() -> None:
            if not self._is_over():
                fleet.fail(number, down_ticks)

        Alarm(self._env, tick, lambda _: end(), ARRIVAL_PRIORITY)


def add_stragglers(env: TickEnvironment, slowdowns: Sequence[Slowdown], fleets: Mapping[int, Fleet]) -> None:
    """Let replicas of `fleets`, by the numbers of their pools, be as slow as `slowdowns` say; several multiply."""
    factors: defaultdict[tuple[int, int], list[float]] = defaultdict(list)

    def change(slowdown: Slowdown, is_over: bool) -> None:
        mine = factors[slowdown.pool, slowdown.replica]
        (mine.remove if is_over else mine.append)(slowdown.factor)
        for rank in fleets[slowdown.pool].pool.replicas[slowdown.replica].ranks:
            rank.slow_down(prod(sorted(mine)))

    for each in slowdowns:
        begin = to_ticks(each.at_s)
        Alarm(env, begin, lambda _, each=each: change(each, is_over=False), ARRIVAL_PRIORITY)  # type: ignore[misc]
        if each.for_s is not None:
            end = begin + to_ticks(each.for_s)
            Alarm(env, end, lambda _, each=each: change(each, is_over=True), ARRIVAL_PRIORITY)  # type: ignore[misc]


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

"""What makes replicas come, go or slow down: `Autoscaler` by load, `Failures` by chance or by order, stragglers."""

__all__ = ["Autoscaler", "Failures", "add_stragglers"]

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil, log, prod

from perfmodel.errors import WorkloadError
from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment, to_ticks
from perfmodel.sim.fleet.fleet import Fleet
from perfmodel.sim.traffic.hashed import hashed
from perfmodel.specs.cluster import AutoscalingSpec, FailuresSpec, Slowdown

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

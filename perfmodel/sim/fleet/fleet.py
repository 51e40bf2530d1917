"""`Fleet`: which replicas of a pool are there. They start cold, serve, drain, stop, and fail."""

from collections.abc import Callable
from typing import Literal

from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment
from perfmodel.sim.fleet.gateway import Entrance
from perfmodel.sim.fleet.pool import Pool
from perfmodel.sim.replica.replica import Replica

State = Literal["off", "starting", "up", "draining", "dead", "failed"]  # dead: failed, not yet detected
_IN_USE: tuple[State, ...] = ("starting", "up", "draining")


class Fleet:
    """The replicas of `pool`, of which the first `num_up` are up from the beginning; `entrance`: where requests wait.

    start_ticks: until a replica that is started takes requests; dead_ticks: until a failure is noticed
    on_lost, on_dead: called with a replica whose failure is noticed, or is not yet
    on_up:       called with the number of a replica that takes requests from now on

    A replica is in use, and paid for, from the beginning of its start until it stops or fails.
    """

    def __init__(
        self,
        env: TickEnvironment,
        pool: Pool,
        entrance: Entrance,
        num_up: int,
        start_ticks: int,
        on_lost: Callable[[Replica], None],
        dead_ticks: int = 0,
        on_dead: Callable[[Replica], None] = lambda _: None,
    ) -> None:
        self.pool, self.entrance = pool, entrance
        self.num_started = self.num_failed = 0
        self.most_in_use = num_up
        self.counts = [(0, num_up, num_up)]  # (tick, replicas that serve, those in use), each time that they change
        self.failed_at: list[int] = []  # ticks
        self.on_up: list[Callable[[int], None]] = []
        self._env, self._start_ticks, self._on_lost = env, start_ticks, on_lost
        self._dead_ticks, self._on_dead = dead_ticks, on_dead
        self._states: list[State] = ["up" if i < num_up else "off" for i in range(len(pool.replicas))]
        self._turns = [0] * len(pool.replicas)  # changes of state: an alarm of an earlier one is out of date
        self._since = [0] * len(pool.replicas)
        self._used_ticks = 0
        for number, replica in enumerate(pool.replicas):
            if number >= num_up:
                entrance.router.leave(replica)
            for rank in replica.ranks:
                rank.watch(lambda _, number=number: self._stop_if_drained(number))  # type: ignore[misc]

    def num(self, *states: State) -> int:
        """Replicas in one of these states."""
        return sum(state in states for state in self._states)

    @property
    def num_outstanding(self) -> int:
        """Requests that wait or run in the pool."""
        return sum(engine.num_outstanding for engine in self.pool.engines)

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the pool's engines, or for their KV to come."""
        if self.pool.spec.role == "decode":
            return self.num_outstanding - sum(engine.loop.scheduler.num_running for engine in self.pool.engines)
        return sum(engine.loop.scheduler.num_waiting for engine in self.pool.engines)

    @property
    def kv_load(self) -> float:
        """KV blocks in use, in those that a replica has."""
        used = sum(engine.num_used_blocks for engine in self.pool.engines)
        return used / (self.pool.memory.num_kv_blocks * len(self.pool.replicas[0].ranks))

    def used_s(self, end: int) -> float:
        """Seconds that replicas were in use until the tick `end`, summed."""
        ticks = self._used_ticks
        for state, since in zip(self._states, self._since, strict=True):
            if state in _IN_USE:
                ticks += max(end - since, 0)
        return ticks / TICKS_PER_S

    def is_current(self, number: int, turn: int) -> bool:
        """Whether the replica `number` is still in the state that it was in at `turn`."""
        return self._turns[number] == turn

    def turn(self, number: int) -> int:
        """Number of the replica's present state among all that it has been in."""
        return self._turns[number]

    def is_up(self, number: int) -> bool:
        return self._states[number] in ("up", "draining")

    def start(self) -> bool:
        """One more: a replica that drains goes on, or one that is off starts. False if there is none."""
        if "draining" in self._states:
            self._serve(self._states.index("draining"))
        elif "off" in self._states:
            self._begin(self._states.index("off"))
        else:
            return False
        return True

    def drain(self) -> None:
        """One less: the last that is up takes no more requests and stops when it has none."""
        number = max(i for i, state in enumerate(self._states) if state == "up")
        self.entrance.router.leave(self.pool.replicas[number])
        self._enter(number, "draining")
        self._stop_if_drained(number)

    def fail(self, number: int, down_ticks: int) -> None:
        """The replica fails, if it is in use, and starts again after `down_ticks`."""
        state = self._states[number]
        if state not in _IN_USE:
            return
        replica, unknown = self.pool.replicas[number], min(self._dead_ticks, down_ticks)
        self._enter(number, "dead")
        self.num_failed += 1
        self.failed_at.append(self._env.ticks)
        if not unknown:
            self._notice(number, state == "up", down_ticks)
            return
        for rank in replica.ranks:
            rank.die()
        self._on_dead(replica)
        self._later(number, unknown, lambda: self._notice(number, state == "up", down_ticks - unknown))

    def _notice(self, number: int, was_up: bool, down_ticks: int) -> None:
        replica = self.pool.replicas[number]
        if was_up:
            self.entrance.router.leave(replica)
        self._enter(number, "failed")
        self._on_lost(replica)
        for rank in replica.ranks:
            rank.is_dead = False
        _forget_kv(replica)
        self._later(number, down_ticks, lambda: self._begin(number))

    def _begin(self, number: int) -> None:
        self._enter(number, "starting")
        self.num_started += 1
        self._later(number, self._start_ticks, lambda: self._serve(number))

    def _serve(self, number: int) -> None:
        self._enter(number, "up")
        self.entrance.router.join(self.pool.replicas[number])
        for call in self.on_up:
            call(number)
        self.entrance.look_again()

    def _stop_if_drained(self, number: int) -> None:
        replica = self.pool.replicas[number]
        if self._states[number] == "draining" and all(rank.is_idle for rank in replica.ranks):
            self._enter(number, "off")
            _forget_kv(replica)

    def _later(self, number: int, delay: int, then: Callable[[], None]) -> None:
        turn = self._turns[number]
        Alarm(self._env, delay, lambda _: then() if self._turns[number] == turn else None, ARRIVAL_PRIORITY)

    def _enter(self, number: int, state: State) -> None:
        was, now = self._states[number], self._env.ticks
        if was in _IN_USE and state not in _IN_USE:
            self._used_ticks += now - self._since[number]
        elif was not in _IN_USE and state in _IN_USE:
            self._since[number] = now
        self._states[number] = state
        self._turns[number] += 1
        in_use = self.num(*_IN_USE)
        self.most_in_use = max(self.most_in_use, in_use)
        if self.counts[-1][0] == now:
            self.counts.pop()
        self.counts.append((now, self.num("up", "draining"), in_use))


def _forget_kv(replica: Replica) -> None:
    """What a replica has cached is gone with it."""
    for rank in replica.ranks:
        rank.loop.scheduler.blocks.forget_all()

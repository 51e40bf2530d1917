"""`Fleet`: lifecycle of a pool's replicas: cold start, serving, draining, off, failed."""

from collections.abc import Callable
from typing import Literal

from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment
from perfmodel.sim.fleet.gateway import Entrance
from perfmodel.sim.fleet.pool import Pool
from perfmodel.sim.replica.replica import Replica

State = Literal["off", "starting", "up", "draining", "dead", "failed"]  # dead: failed, not yet detected
_IN_USE: tuple[State, ...] = ("starting", "up", "draining")


class Fleet:
    """Replicas of `pool`, the first `num_up` initially up; `entrance`: queue of their requests.

    start_ticks: cold start; dead_ticks: failure detection delay
    on_lost, on_dead: callback (replica) once a failure is detected, or while it is undetected
    on_up: callback with the number of a replica that starts to take requests

    A replica is in use, and billed, from the beginning of its start until it stops or fails."""

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
        """Number of replicas in any of `states`."""
        return sum(state in states for state in self._states)

    @property
    def num_outstanding(self) -> int:
        """Requests waiting or running in the pool."""
        return sum(engine.num_outstanding for engine in self.pool.engines)

    @property
    def num_waiting(self) -> int:
        """Requests waiting in the engines, or for their KV."""
        if self.pool.spec.role == "decode":
            return self.num_outstanding - sum(engine.loop.scheduler.num_running for engine in self.pool.engines)
        return sum(engine.loop.scheduler.num_waiting for engine in self.pool.engines)

    @property
    def kv_load(self) -> float:
        """KV blocks in use, in units of one replica's blocks."""
        used = sum(engine.num_used_blocks for engine in self.pool.engines)
        return used / (self.pool.memory.num_kv_blocks * len(self.pool.replicas[0].ranks))

    def used_s(self, end: int) -> float:
        """Replica-seconds in use until tick `end`."""
        ticks = self._used_ticks
        for state, since in zip(self._states, self._since, strict=True):
            if state in _IN_USE:
                ticks += max(end - since, 0)
        return ticks / TICKS_PER_S

    def is_up(self, number: int) -> bool:
        return self._states[number] in ("up", "draining")

    def readings(self, metric: str) -> dict[int, float]:
        """What each replica that serves and stays says of `metric`, by its number.

        metric: one of autoscaling; kv_demand: KV in use and prompts that wait, in sizes of the cache; queued_tokens:
                prompts that wait, in lengths of the longest context"""
        replicas = enumerate(self.pool.replicas)
        return {n: self._reading(replica, metric) for n, replica in replicas if self._states[n] == "up"}

    def _reading(self, replica: Replica, metric: str) -> float:
        schedulers = [rank.loop.scheduler for rank in replica.ranks]
        running = sum(scheduler.num_running for scheduler in schedulers)
        if metric == "concurrency":
            return replica.num_outstanding
        if metric == "running":
            return running
        if metric == "queue":
            is_decode = self.pool.spec.role == "decode"
            return replica.num_outstanding - running if is_decode else sum(one.num_waiting for one in schedulers)
        capacity = self.pool.memory.num_kv_blocks * len(replica.ranks)
        if metric == "kv_cache_usage":
            return sum(rank.num_used_blocks for rank in replica.ranks) / capacity
        tokens = sum(request.num_prompt_tokens for scheduler in schedulers for request in scheduler.waiting)
        if metric == "queued_tokens":
            return tokens / (self.pool.spec.engine.max_model_len or 1)
        return self._reading(replica, "kv_cache_usage") + tokens / (capacity * replica.block_size)

    def start(self, is_new: bool = False) -> bool:
        """Undrain a replica, else start one that is off; the other way round for `is_new`. False if there is none."""
        if "draining" in self._states and not (is_new and "off" in self._states):
            self._serve(self._states.index("draining"))
        elif "off" in self._states:
            self._begin(self._states.index("off"))
        else:
            return False
        return True

    def drain(self) -> None:
        """Drain the last replica that is up: it takes no more requests and stops when empty."""
        number = max(i for i, state in enumerate(self._states) if state == "up")
        self.entrance.router.leave(self.pool.replicas[number])
        self._enter(number, "draining")
        self._stop_if_drained(number)

    def stop(self) -> None:
        """Stop the replica that started last and does not serve yet, else drain one that does, if there is any."""
        starting = [number for number, state in enumerate(self._states) if state == "starting"]
        if starting:
            self._enter(max(starting, key=lambda number: (self._since[number], number)), "off")
        elif "up" in self._states:
            self.drain()

    def fail(self, number: int, down_ticks: int) -> None:
        """Fail the replica if it is in use; it restarts after `down_ticks`."""
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
        self.later(number, unknown, lambda: self._notice(number, state == "up", down_ticks - unknown))

    def _notice(self, number: int, was_up: bool, down_ticks: int) -> None:
        replica = self.pool.replicas[number]
        if was_up:
            self.entrance.router.leave(replica)
        self._enter(number, "failed")
        self._on_lost(replica)
        for rank in replica.ranks:
            rank.is_dead = False
        _forget_all(replica)
        self.later(number, down_ticks, lambda: self._begin(number))

    def _begin(self, number: int) -> None:
        self._enter(number, "starting")
        self.num_started += 1
        self.later(number, self._start_ticks, lambda: self._serve(number))

    def _serve(self, number: int) -> None:
        self._enter(number, "up")
        self.entrance.router.join(self.pool.replicas[number])
        for call in self.on_up:
            call(number)
        self.entrance.reschedule()

    def _stop_if_drained(self, number: int) -> None:
        replica = self.pool.replicas[number]
        if self._states[number] == "draining" and all(rank.is_idle for rank in replica.ranks):
            self._enter(number, "off")
            _forget_all(replica)

    def later(self, number: int, delay: int, then: Callable[[], None]) -> None:
        """Call `then` after `delay` ticks if the replica is still in its present state."""
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


def _forget_all(replica: Replica) -> None:
    for rank in replica.ranks:
        rank.loop.scheduler.forget_all()

"""A fleet second by second, on stub replicas: which replicas serve, which are billed, and which drain first."""

from types import SimpleNamespace

import pytest

from perfmodel.cost import Usage
from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment
from perfmodel.sim.fleet.fleet import Fleet
from perfmodel.sim.fleet.pool import Pool
from perfmodel.sim.replica.replica import Replica
from perfmodel.specs.engine.spec import EngineSpec

START_S = 10


class StubRank:
    def __init__(self, number: int) -> None:
        self.number, self.is_idle, self.is_dead, self.num_forgotten = number, True, False, 0
        self.num_outstanding = self.num_used_blocks = self.num_running = self.num_waiting = 0
        scheduler = SimpleNamespace(forget_all=self.forget, num_running=0, num_waiting=0)
        self.loop = SimpleNamespace(scheduler=scheduler)

    def forget(self) -> None:
        self.num_forgotten += 1

    def watch(self, call) -> None:
        self.on_less = call

    def die(self) -> None:
        self.is_dead = True


class StubRouter:
    def __init__(self, replicas) -> None:
        self.replicas = list(replicas)

    def join(self, replica) -> None:
        self.replicas.append(replica)

    def leave(self, replica) -> None:
        self.replicas.remove(replica)


class World:
    """Four replicas of two ranks each, of which `num_up` serve; a test schedules events at given seconds."""

    def __init__(self, num_up: int, dead_s: int = 0, role: str = "unified") -> None:
        self.env, self.lost, self.dead = TickEnvironment(), [], []
        self.replicas = [SimpleNamespace(ranks=[StubRank(2 * n), StubRank(2 * n + 1)]) for n in range(4)]
        engines = [rank for replica in self.replicas for rank in replica.ranks]
        memory = SimpleNamespace(num_kv_blocks=100)
        self.pool = SimpleNamespace(
            replicas=self.replicas, engines=engines, memory=memory, spec=SimpleNamespace(role=role)
        )
        self.router = StubRouter(self.replicas)
        entrance = SimpleNamespace(router=self.router, reschedule=lambda: None)
        self.fleet = Fleet(
            *(self.env, self.pool, entrance, num_up, START_S * TICKS_PER_S, self._lose),  # type: ignore[arg-type]
            *(dead_s * TICKS_PER_S, self.dead.append),  # type: ignore[arg-type]
        )

    def _lose(self, replica) -> None:
        self.lost.append((self.replicas.index(replica), self.env.ticks / TICKS_PER_S))

    def at(self, second: float, call) -> None:
        Alarm(self.env, round(second * TICKS_PER_S), lambda _: call(), ARRIVAL_PRIORITY)

    def end(self) -> list[tuple[float, int, int]]:
        """(second, serving replicas, billed replicas) at every change."""
        self.env.run_until_idle()
        return [(tick / TICKS_PER_S, *counts) for tick, *counts in self.fleet.counts]


def test_a_replica_is_billed_from_its_start_and_serves_once_it_is_up() -> None:
    world = World(1)
    world.at(5, world.fleet.start)
    assert world.end() == [(0, 1, 1), (5, 1, 2), (15, 2, 2)]
    assert world.router.replicas == world.replicas[:2]
    assert world.fleet.used_s(20 * TICKS_PER_S) == pytest.approx(20 + 15)
    assert (world.fleet.num_started, world.fleet.most_in_use) == (1, 2)


def test_starts_and_the_peak_number_of_replicas_are_counted() -> None:
    """Two replicas start, at 1 and 2 s; an idle one drains at 30 s and starts again at 40 s."""
    world = World(1)
    for second, call in ((1, "start"), (2, "start"), (30, "drain"), (40, "start")):
        world.at(second, getattr(world.fleet, call))
    assert world.end()[-1] == (50, 3, 3)
    assert (world.fleet.num_started, world.fleet.most_in_use) == (3, 3)
    world.at(60, world.fleet.drain)
    assert world.end()[-1][1:] == (2, 2)
    assert world.fleet.most_in_use == 3
    assert not any(World(4).fleet.start() for _ in range(2))


def test_the_last_replica_drains_first_and_stops_idle_with_an_empty_cache() -> None:
    """The third of three replicas drains at 2 s and stops at 6 s, when both of its ranks are idle."""
    world = World(3)
    first, second = world.replicas[2].ranks
    first.is_idle = second.is_idle = False

    def done(rank: StubRank) -> None:
        rank.is_idle = True
        rank.on_less(rank.number)

    world.at(2, world.fleet.drain)
    world.at(4, lambda: done(first))
    world.at(6, lambda: done(second))
    assert world.end() == [(0, 3, 3), (2, 3, 3), (6, 2, 2)]
    assert world.router.replicas == world.replicas[:2]
    assert [rank.num_forgotten for rank in world.pool.engines] == [0, 0, 0, 0, 1, 1, 0, 0]
    assert world.fleet.used_s(10 * TICKS_PER_S) == pytest.approx(10 + 10 + 6)


def test_a_draining_replica_is_reused_before_a_cold_start() -> None:
    world = World(2)
    world.replicas[1].ranks[0].is_idle = False
    world.at(1, world.fleet.drain)
    world.at(3, world.fleet.start)
    assert world.end() == [(0, 2, 2), (1, 2, 2), (3, 2, 2)]
    assert world.router.replicas == world.replicas[:2]
    assert world.fleet.num_started == 0


@pytest.mark.parametrize(("dead_s", "noticed"), [(0, 5), (3, 8), (30, 25)])
def test_a_failure_is_detected_late_and_repaired_on_time(dead_s: int, noticed: int) -> None:
    """Down for 20 s from 5 s: the replica starts at 25 s, serves from 35 s, and is not billed in between."""
    world = World(2, dead_s)
    world.at(5, lambda: world.fleet.fail(0, 20 * TICKS_PER_S))
    then = [(noticed, 1, 1)] * (5 < noticed < 25)
    assert world.end() == [(0, 2, 2), (5, 1, 1), *then, (25, 1, 2), (35, 2, 2)]
    assert world.lost == [(0, noticed)]
    assert len(world.dead) == (dead_s > 0)
    assert world.fleet.used_s(40 * TICKS_PER_S) == pytest.approx(40 + 5 + 15)
    assert [tick / TICKS_PER_S for tick in world.fleet.failed_at] == [5]


def test_a_stopped_or_failed_replica_cannot_fail() -> None:
    world = World(1)
    for second, number in ((1, 3), (2, 0), (4, 0)):
        world.at(second, lambda number=number: world.fleet.fail(number, 9 * TICKS_PER_S))
    world.end()
    assert world.fleet.num_failed == 1
    assert world.lost == [(0, 2)]


@pytest.mark.parametrize(("role", "waiting"), [("unified", 3), ("prefill", 3), ("decode", 20 - 12)])
def test_fleet_loads_sum_over_all_ranks(role: str, waiting: int) -> None:
    """Of 20 requests 12 run and 3 wait in engines; the rest of a decode pool wait for their KV. 350 blocks are in
    use; a replica of two ranks has 200."""
    world = World(4, role=role)
    for rank, outstanding, running, held, blocks in zip(
        world.pool.engines, (9, 11), (5, 7), (1, 2), (100, 250), strict=False
    ):
        rank.num_outstanding, rank.num_used_blocks = outstanding, blocks
        rank.loop.scheduler.num_running, rank.loop.scheduler.num_waiting = running, held
    assert world.fleet.num_outstanding == 20
    assert world.fleet.num_waiting == waiting
    assert world.fleet.kv_load == pytest.approx(350 / 200)


def test_devices_weights_and_time_of_a_pool_sum_over_its_engines() -> None:
    """Three replicas of two ranks with 2 x 4 devices each; the pipeline of each rank is occupied for 5 s."""
    engine = EngineSpec(tensor_parallel_size=2, pipeline_parallel_size=4)
    replicas = tuple(SimpleNamespace(ranks=[StubRank(0), StubRank(1)]) for _ in range(3))
    clocks = tuple(SimpleNamespace(ticks_under_way=5 * TICKS_PER_S, num_ranks=2) for _ in range(3))
    usage = Usage(bound_s={"memory": 12.0})
    memory, cost_model = SimpleNamespace(weight_bytes=7.0), SimpleNamespace(usage=lambda: usage)
    parts = (SimpleNamespace(engine=engine), None, memory, cost_model, replicas, None, None, clocks)
    pool = Pool(*parts)  # type: ignore[arg-type]
    assert (len(pool.engines), pool.devices_per_engine, pool.num_devices) == (6, 8, 48)
    assert pool.weight_bytes_per_replica == 7.0 * 8 * 2
    assert pool.under_way_s == pytest.approx(3 * 5 * 2 * 8)
    assert pool.bubble_s == pytest.approx(3 * 5 * 2 * 8 - 12 * 8)


def test_the_loads_of_a_replica_sum_over_its_ranks() -> None:
    ranks = [StubRank(4), StubRank(5)]
    for rank, outstanding, blocks in zip(ranks, (3, 5), (10, 20), strict=True):
        rank.index, rank.block_size = rank.number, 16
        rank.num_outstanding, rank.num_prompt_blocks = outstanding, blocks
    replica, calls = Replica(ranks), []  # type: ignore[arg-type]
    assert (replica.index, replica.block_size) == (4, 16)
    assert (replica.num_outstanding, replica.num_prompt_blocks) == (8, 30)
    replica.watch(calls.append)
    for rank in ranks:
        rank.on_less(rank.number)
    assert calls == [4, 4]

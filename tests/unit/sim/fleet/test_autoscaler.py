"""The autoscaler's rule on a stub fleet: ceil(load / target) replicas, scaling down only after a delay."""

from collections.abc import Callable
from math import ceil, sqrt
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment
from perfmodel.sim.fleet.autoscalers import Autoscaler
from perfmodel.sim.fleet.dynamic import add_failures, add_stragglers
from perfmodel.specs.autoscaling import AutoscalingSpec
from perfmodel.specs.cluster import FailuresSpec, Slowdown


class Entrance:
    def __init__(self) -> None:
        self.num_waiting = 0
        self.on_waiting: list[Callable[[], None]] = []


class StubFleet:
    """Replicas start and stop at once; the test sets the load. `num_starting` of the replicas do not serve."""

    def __init__(self, size: int) -> None:
        self.entrance = Entrance()
        self.size, self.num_starting, self.num_failed = size, 0, 0
        self.num_outstanding = self.num_waiting = 0
        self.kv_load = 0.0

    def num(self, *states: str) -> int:
        counts = {"up": self.size - self.num_starting, "starting": self.num_starting, "failed": self.num_failed}
        return sum(counts.get(state, 0) for state in states)

    def start(self) -> bool:
        self.size += 1
        return True

    def drain(self) -> None:
        self.size -= 1


def sizes(fleet: StubFleet, loads: list[dict[str, float]], **fields: object) -> list[int]:
    """Fleet size after each interval of one second. The fleet gets the next of `loads` before each decision."""
    env, fleet_sizes = TickEnvironment(), []
    spec = AutoscalingSpec(**({"interval_s": 1.0, "target": 4, "max_replicas": 20, "min_replicas": 0} | fields))

    def apply_load(number: int) -> None:
        if number:
            fleet_sizes.append(fleet.size)
        for name, value in loads[number].items() if number < len(loads) else ():
            setattr(fleet.entrance if name == "queued" else fleet, {"queued": "num_waiting"}.get(name, name), value)

    for number in range(len(loads) + 1):
        Alarm(env, round((number + 0.5) * TICKS_PER_S), lambda _, n=number: apply_load(n), ARRIVAL_PRIORITY)
    Autoscaler(env, spec, fleet, lambda: env.ticks > (len(loads) + 0.5) * TICKS_PER_S)  # type: ignore[arg-type]
    env.run_until_idle()
    return fleet_sizes


@given(load=st.integers(0, 100), queued=st.integers(0, 20), target=st.integers(1, 9), size=st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_a_constant_load_needs_ceil_of_load_over_target_replicas_within_the_limits(load, queued, target, size) -> None:
    fleet_sizes = sizes(
        StubFleet(size),
        [{"num_outstanding": load, "queued": queued}] * 2,
        target=target,
        min_replicas=2,
        max_replicas=15,
        scale_down_delay_s=0,
    )
    assert fleet_sizes[-1] == min(max(ceil((load + queued) / target), 2), 15)


def test_scale_up_is_immediate_and_scale_down_waits_for_the_delay() -> None:
    """Loads of 40, 12, 20, 4, 4 ... at target 4: 10 replicas until the 40 is 3 s ago, then 5 for the 20."""
    loads = [{"num_outstanding": n} for n in (40, 12, 20, 4, 4, 4, 4, 4)]
    assert sizes(StubFleet(1), loads, scale_down_delay_s=3) == [10, 10, 10, 10, 5, 5, 1, 1]


def test_starting_replicas_count_towards_the_target_size() -> None:
    fleet = StubFleet(3)
    fleet.num_starting = 2
    assert sizes(fleet, [{"num_outstanding": 20}]) == [5]


def test_a_starting_replica_cannot_drain() -> None:
    fleet = StubFleet(5)
    fleet.num_starting = 4
    assert sizes(fleet, [{"num_outstanding": 1}], scale_down_delay_s=0) == [4]


def test_the_queue_metric_removes_one_replica_at_a_time_and_only_with_an_empty_queue() -> None:
    rows = [(3, 9), (12, 20), (1, 9), (0, 9), (0, 9), (0, 0), (0, 0)]
    loads = [{"num_waiting": waiting, "num_outstanding": outstanding} for waiting, outstanding in rows]
    fleet_sizes = sizes(StubFleet(2), loads, metric="queue", scale_down_delay_s=0)
    assert fleet_sizes == [2, 3, 3, 2, 1, 0, 0]


def test_the_kv_metric_keeps_the_last_replica_while_requests_are_outstanding() -> None:
    rows = [(1.9, 5), (0.7, 5), (0.0, 5), (0.0, 0)]
    loads = [{"kv_load": kv, "num_outstanding": outstanding} for kv, outstanding in rows]
    assert sizes(StubFleet(1), loads, metric="kv_cache_usage", target=0.5, scale_down_delay_s=0) == [4, 2, 1, 0]


@pytest.mark.parametrize(("num_starting", "num_failed", "size"), [(0, 0, 1), (1, 0, 1), (0, 1, 0)])
def test_a_request_without_a_replica_starts_one_unless_one_is_starting(num_starting, num_failed, size) -> None:
    """A failed replica restarts by itself."""
    fleet, env = StubFleet(num_starting), TickEnvironment()
    fleet.num_starting, fleet.num_failed = num_starting, num_failed
    Autoscaler(env, AutoscalingSpec(target=1, min_replicas=0, max_replicas=2), fleet, lambda: True)  # type: ignore[arg-type]
    for call in fleet.entrance.on_waiting:
        call()
    assert fleet.size == size


class FailingFleet:
    """One replica that recovers at once."""

    def __init__(self, env: TickEnvironment) -> None:
        self.env, self.failed_at, self.numbers, self.downs, self.on_up = env, [], [], [], []
        self.pool = type("Pool", (), {"replicas": [None]})()

    def is_up(self, number: int) -> bool:
        return True

    def later(self, number: int, delay: int, then: Callable[[], None]) -> None:
        count = len(self.failed_at)
        Alarm(self.env, delay, lambda _: then() if count == len(self.failed_at) else None)

    def fail(self, number: int, down_ticks: int) -> None:
        self.failed_at.append(self.env.ticks / TICKS_PER_S)
        self.numbers.append(number)
        self.downs.append(down_ticks / TICKS_PER_S)
        for call in self.on_up:
            call(number)


def test_lifetimes_are_exponential_with_the_given_mean() -> None:
    """2,000 lifetimes: mean and deviation are the mtbf within 3 standard errors, and half end before mtbf ln 2."""
    env, count = TickEnvironment(), 2000
    fleet = FailingFleet(env)
    add_failures(env, FailuresSpec(mtbf_s=50, repair_s=7), {0: fleet}, 1, lambda: len(fleet.failed_at) >= count)  # type: ignore[dict-item]
    env.run_until_idle()
    lifetimes = [end - start for start, end in zip([0.0, *fleet.failed_at], fleet.failed_at, strict=False)]
    mean = sum(lifetimes) / len(lifetimes)
    assert mean == pytest.approx(50, rel=3 / sqrt(count))
    assert sqrt(sum((lifetime - mean) ** 2 for lifetime in lifetimes) / len(lifetimes)) == pytest.approx(
        50, rel=6 / sqrt(count)
    )
    assert sum(lifetime < 50 * 0.6931 for lifetime in lifetimes) / count == pytest.approx(0.5, abs=1.5 / sqrt(count))
    assert set(fleet.downs) == {7.0}


def test_a_failure_event_sets_the_replica_the_time_and_the_downtime() -> None:
    env = TickEnvironment()
    fleets = {0: FailingFleet(env), 4: FailingFleet(env)}
    events = ({"at_s": 3, "down_s": 5, "pool": 4, "replica": 2}, {"at_s": 9}, {"at_s": 11, "pool": 4})
    add_failures(env, FailuresSpec(repair_s=60, events=events), fleets, 0, lambda: env.ticks >= 11 * TICKS_PER_S)  # type: ignore[arg-type]
    env.run_until_idle()
    assert (fleets[0].failed_at, fleets[0].numbers, fleets[0].downs) == ([9.0], [0], [60.0])
    assert (fleets[4].failed_at, fleets[4].numbers, fleets[4].downs) == ([3.0], [2], [5.0])


def test_overlapping_slowdowns_multiply() -> None:
    env, seen = TickEnvironment(), []
    rank = type("Rank", (), {"slow_down": lambda self, factor: seen.append((env.ticks / TICKS_PER_S, factor))})()
    pool = type("Pool", (), {"replicas": [type("Replica", (), {"ranks": [rank]})()]})()
    fleet = type("Fleet", (), {"pool": pool})()
    slowdowns = [Slowdown(factor=2, at_s=1, for_s=10), Slowdown(factor=3, at_s=4, for_s=2), Slowdown(factor=5, at_s=20)]
    add_stragglers(env, slowdowns, {0: fleet})  # type: ignore[dict-item]
    env.run_until_idle()
    assert seen == [(1, 2), (4, 6), (6, 2), (11, 1), (20, 5)]


def test_a_slowdown_applies_to_one_replica_of_one_pool() -> None:
    env, seen = TickEnvironment(), []

    class Rank:
        def __init__(self, *place: int) -> None:
            self.place = place

        def slow_down(self, factor: float) -> None:
            seen.append((*self.place, factor))

    def fleet(number: int) -> SimpleNamespace:
        replicas = [SimpleNamespace(ranks=[Rank(number, replica)]) for replica in range(2)]
        return SimpleNamespace(pool=SimpleNamespace(replicas=replicas))

    slowdowns = [
        Slowdown(factor=2 + 2 * pool + replica, pool=pool, replica=replica, at_s=2 * pool + replica)
        for pool in range(2)
        for replica in range(2)
    ]
    add_stragglers(env, slowdowns, {0: fleet(0), 1: fleet(1)})  # type: ignore[dict-item]
    env.run_until_idle()
    assert seen == [(0, 0, 2), (0, 1, 3), (1, 0, 4), (1, 1, 5)]

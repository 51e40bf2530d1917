"""The autoscaler's rule, by hand, on a fleet that does as it is told: ceil(load / target), down only after a delay."""

from collections.abc import Callable
from math import ceil, sqrt
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment
from perfmodel.sim.fleet.autoscaler import Autoscaler, Failures, add_stragglers
from perfmodel.specs.pools import AutoscalingSpec, FailuresSpec, Slowdown


class Entrance:
    def __init__(self) -> None:
        self.num_waiting = 0
        self.on_waiting: list[Callable[[], None]] = []


class StubFleet:
    """Replicas that start and stop at once; a load that the test sets. `num_starting` of its replicas do not serve."""

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
    """Replicas after each look, one second apart; before each the fleet gets the next of `loads`."""
    env, found = TickEnvironment(), []
    spec = AutoscalingSpec(**({"interval_s": 1.0, "target": 4, "max_replicas": 20, "min_replicas": 0} | fields))

    def load(number: int) -> None:
        if number:
            found.append(fleet.size)
        for name, value in loads[number].items() if number < len(loads) else ():
            setattr(fleet.entrance if name == "held" else fleet, {"held": "num_waiting"}.get(name, name), value)

    for number in range(len(loads) + 1):
        Alarm(env, round((number + 0.5) * TICKS_PER_S), lambda _, n=number: load(n), ARRIVAL_PRIORITY)
    Autoscaler(env, spec, fleet, lambda: env.ticks > (len(loads) + 0.5) * TICKS_PER_S)  # type: ignore[arg-type]
    env.run_dry()
    return found


@given(load=st.integers(0, 100), held=st.integers(0, 20), target=st.integers(1, 9), size=st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_a_constant_load_has_as_many_replicas_as_it_fills_within_the_limits(load, held, target, size) -> None:
    found = sizes(
        StubFleet(size),
        [{"num_outstanding": load, "held": held}] * 2,
        target=target,
        min_replicas=2,
        max_replicas=15,
        scale_down_delay_s=0,
    )
    assert found[-1] == min(max(ceil((load + held) / target), 2), 15)


def test_more_come_at_once_and_fewer_only_when_fewer_would_have_done_for_the_delay() -> None:
    """Loads of 40, 12, 20, 4, 4 ... at target 4: 10 replicas until the 10 of 40 is 3 s ago, then 5 for the 20."""
    loads = [{"num_outstanding": n} for n in (40, 12, 20, 4, 4, 4, 4, 4)]
    assert sizes(StubFleet(1), loads, scale_down_delay_s=3) == [10, 10, 10, 10, 5, 5, 1, 1]


def test_replicas_that_start_are_not_started_again() -> None:
    fleet = StubFleet(3)
    fleet.num_starting = 2
    assert sizes(fleet, [{"num_outstanding": 20}]) == [5]


def test_those_that_are_not_up_yet_cannot_drain() -> None:
    fleet = StubFleet(5)
    fleet.num_starting = 4
    assert sizes(fleet, [{"num_outstanding": 1}], scale_down_delay_s=0) == [4]


def test_a_queue_takes_replicas_away_one_at_a_time_and_only_while_nobody_waits() -> None:
    rows = [(3, 9), (12, 20), (1, 9), (0, 9), (0, 9), (0, 0), (0, 0)]
    loads = [{"num_waiting": waiting, "num_outstanding": there} for waiting, there in rows]
    found = sizes(StubFleet(2), loads, metric="queue", scale_down_delay_s=0)
    assert found == [2, 3, 3, 2, 1, 0, 0]


def test_kv_in_use_is_spread_to_its_target_and_the_last_replica_stays_while_anything_is_there() -> None:
    rows = [(1.9, 5), (0.7, 5), (0.0, 5), (0.0, 0)]
    loads = [{"kv_load": kv, "num_outstanding": there} for kv, there in rows]
    assert sizes(StubFleet(1), loads, metric="kv_cache_usage", target=0.5, scale_down_delay_s=0) == [4, 2, 1, 0]


@pytest.mark.parametrize(("num_starting", "num_failed", "size"), [(0, 0, 1), (1, 0, 1), (0, 1, 0)])
def test_a_request_that_finds_no_replica_starts_one_unless_one_is_on_its_way(num_starting, num_failed, size) -> None:
    """One that has failed starts by itself."""
    fleet, env = StubFleet(num_starting), TickEnvironment()
    fleet.num_starting, fleet.num_failed = num_starting, num_failed
    Autoscaler(env, AutoscalingSpec(target=1, min_replicas=0, max_replicas=2), fleet, lambda: True)  # type: ignore[arg-type]
    for call in fleet.entrance.on_waiting:
        call()
    assert fleet.size == size


class MortalFleet:
    """One replica that is back as soon as it has failed."""

    def __init__(self, env: TickEnvironment) -> None:
        self.env, self.failed_at, self.numbers, self.downs, self.on_up = env, [], [], [], []
        self.pool = type("Pool", (), {"replicas": [None]})()

    def is_up(self, number: int) -> bool:
        return True

    def turn(self, number: int) -> int:
        return len(self.failed_at)

    def is_current(self, number: int, turn: int) -> bool:
        return turn == len(self.failed_at)

    def fail(self, number: int, down_ticks: int) -> None:
        self.failed_at.append(self.env.ticks / TICKS_PER_S)
        self.numbers.append(number)
        self.downs.append(down_ticks / TICKS_PER_S)
        for call in self.on_up:
            call(number)


def test_lives_are_exponential_with_the_mean_that_is_given() -> None:
    """2,000 lives: mean and standard deviation are the mtbf within 3 standard errors, and half end before mtbf ln 2."""
    env, count = TickEnvironment(), 2000
    fleet = MortalFleet(env)
    Failures(env, FailuresSpec(mtbf_s=50, repair_s=7), {0: fleet}, 1, lambda: len(fleet.failed_at) >= count)  # type: ignore[dict-item]
    env.run_dry()
    lives = [end - start for start, end in zip([0.0, *fleet.failed_at], fleet.failed_at, strict=False)]
    mean = sum(lives) / len(lives)
    assert mean == pytest.approx(50, rel=3 / sqrt(count))
    assert sqrt(sum((life - mean) ** 2 for life in lives) / len(lives)) == pytest.approx(50, rel=6 / sqrt(count))
    assert sum(life < 50 * 0.6931 for life in lives) / count == pytest.approx(0.5, abs=1.5 / sqrt(count))
    assert set(fleet.downs) == {7.0}


def test_an_event_fails_the_replica_that_it_names_when_it_says_for_as_long_as_it_says() -> None:
    env = TickEnvironment()
    fleets = {0: MortalFleet(env), 4: MortalFleet(env)}
    events = ({"at_s": 3, "down_s": 5, "pool": 4, "replica": 2}, {"at_s": 9}, {"at_s": 11, "pool": 4})
    Failures(env, FailuresSpec(repair_s=60, events=events), fleets, 0, lambda: env.ticks >= 11 * TICKS_PER_S)  # type: ignore[arg-type]
    env.run_dry()
    assert (fleets[0].failed_at, fleets[0].numbers, fleets[0].downs) == ([9.0], [0], [60.0])
    assert (fleets[4].failed_at, fleets[4].numbers, fleets[4].downs) == ([3.0], [2], [5.0])


def test_slowdowns_multiply_while_they_last() -> None:
    env, seen = TickEnvironment(), []
    rank = type("Rank", (), {"slow_down": lambda self, factor: seen.append((env.ticks / TICKS_PER_S, factor))})()
    pool = type("Pool", (), {"replicas": [type("Replica", (), {"ranks": [rank]})()]})()
    fleet = type("Fleet", (), {"pool": pool})()
    slowdowns = [Slowdown(factor=2, at_s=1, for_s=10), Slowdown(factor=3, at_s=4, for_s=2), Slowdown(factor=5, at_s=20)]
    add_stragglers(env, slowdowns, {0: fleet})  # type: ignore[dict-item]
    env.run_dry()
    assert seen == [(1, 2), (4, 6), (6, 2), (11, 1), (20, 5)]


def test_a_slowdown_is_of_its_own_replica_of_its_own_pool() -> None:
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
    env.run_dry()
    assert seen == [(0, 0, 2), (0, 1, 3), (1, 0, 4), (1, 1, 5)]

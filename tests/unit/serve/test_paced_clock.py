"""The wall clock: events at their place on an absolute schedule, whoever is late."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import run

from perfmodel.serve import PacedClock
from perfmodel.serve.paced_clock import ClockStoppedError
from perfmodel.sim.clock import Alarm, PacedEnvironment, to_ticks


def started(**options):
    env = PacedEnvironment()
    clock = PacedClock(env, **options)
    clock.start()
    return env, clock


def at(env, seconds, happened):
    loop = asyncio.get_running_loop()
    Alarm(env, to_ticks(seconds) - env.ticks, lambda _: happened.append((env.ticks / 1e12, loop.time())))


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=20), st.sampled_from([0.5, 1.0, 60.0]))
@settings(max_examples=30, deadline=None)
def test_events_happen_when_they_are_due_at_any_speed(milliseconds, speed):
    async def main():
        env, clock = started(speed=speed)
        happened = []
        for each in milliseconds:
            at(env, each / 1e3, happened)
        clock.reschedule()
        await asyncio.sleep(11 / speed)
        return happened

    happened = run(main())
    assert [tick for tick, _ in happened] == [each / 1e3 for each in sorted(milliseconds)]
    for tick, wall in happened:
        assert wall == pytest.approx(tick / speed, abs=2e-3)  # a selector waits whole milliseconds


def test_what_comes_late_does_not_make_late_what_follows():
    async def main():
        late, happened = [], []
        env, clock = started(on_late=late.append)
        for each in range(100):
            at(env, each / 10, happened)
        clock.reschedule()
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5.05)
        loop.now += 0.2  # something held the process up, over two events
        await asyncio.sleep(10)
        return late, happened, clock.slowed_s

    late, happened, slowed_s = run(main())
    assert len(happened) == 100
    assert slowed_s == 0
    assert sum(each > 0.01 for each in late) == 2
    assert happened[-1][1] == pytest.approx(9.9, abs=2e-3)


def test_what_comes_too_late_slows_the_clock_and_says_so():
    async def main():
        slowed, happened = [], []
        env, clock = started(most_late_s=0.25, on_slowed=slowed.append)
        for each in range(10):
            at(env, each, happened)
        clock.reschedule()
        await asyncio.sleep(4.5)
        asyncio.get_running_loop().now += 1.5
        await asyncio.sleep(10)
        return slowed, happened, clock.slowed_s

    slowed, happened, slowed_s = run(main())
    assert slowed == [pytest.approx(1.0, abs=5e-3)]  # the event of second 5 came at 6
    assert slowed_s == sum(slowed)
    assert happened[-1] == (9.0, pytest.approx(10.0, abs=5e-3))  # a second late for ever, and none of it in silence
    assert [tick for tick, _ in happened] == list(range(10))


def test_something_that_arrives_finds_all_done_that_was_due():
    async def main():
        env, clock = started()
        happened = []
        at(env, 1.0, happened)
        clock.reschedule()
        asyncio.get_running_loop().now += 1.2  # the timer could not go off
        tick = clock.catch_up()
        return happened, tick

    happened, tick = run(main())
    assert len(happened) == 1
    assert tick == pytest.approx(1.2e12, rel=1e-6)


def test_a_stopped_clock_stands_still():
    async def main():
        env, clock = started()
        happened = []
        at(env, 1.0, happened)
        clock.reschedule()
        clock.stop()
        await asyncio.sleep(5)
        return happened

    assert run(main()) == []


@pytest.mark.parametrize(("due_s", "tick_s"), [(1.0, 1.1), (1.15, 1.1)])
def test_what_arrived_a_moment_ago_finds_done_what_was_due_before_it_and_no_more(due_s, tick_s):
    async def main():
        env, clock = started()
        happened = []
        at(env, due_s, happened)
        clock.reschedule()
        loop = asyncio.get_running_loop()
        loop.now += 1.2  # it took a tenth to read
        tick = clock.catch_up(1.1)
        early = list(happened)
        await asyncio.sleep(1)
        return tick, early, happened, env.ticks

    tick, early, happened, last = run(main())
    assert tick == pytest.approx(tick_s * 1e12)
    assert len(early) == (due_s < tick_s)
    assert [each for each, _ in happened] == [pytest.approx(due_s)]
    assert last >= tick


def test_what_an_event_raises_is_told_and_stops_the_clock():
    async def main():
        env, told = PacedEnvironment(), []
        clock = PacedClock(env, on_error=told.append)
        clock.start()
        Alarm(env, 10**12, lambda _: 1 / 0)
        asyncio.get_running_loop().now += 2
        with pytest.raises(ClockStoppedError):
            clock.catch_up()
        with pytest.raises(ClockStoppedError):
            clock.catch_up()
        return told

    assert [type(each) for each in run(main())] == [ZeroDivisionError]


@pytest.mark.parametrize("num_looks", range(8))
def test_an_event_that_becomes_due_between_two_looks_at_the_clock_is_not_passed(num_looks):
    """What is due is let happen, and then it is asked what time it is: time goes on between. Here each look takes a
    tenth of a millisecond, and the event is due within one of the first eight: the tick is then the event's, which
    still has to happen."""

    async def main():
        loop = asyncio.get_running_loop()
        env, clock = started()
        happened = []
        at(env, 1.0, happened)
        seconds = [1 + (each - num_looks + 0.5) / 1e4 for each in range(1000)]
        loop.time = iter(seconds).__next__
        tick, early = clock.catch_up(), list(happened)
        del loop.time
        loop.now = 1.1
        clock.reschedule()
        await asyncio.sleep(1)
        return tick, early, happened

    tick, early, happened = run(main())
    assert [each for each, _ in happened] == [1.0]
    assert tick == 1e12 or (tick > 1e12) == bool(early)
    assert tick == pytest.approx(1e12, abs=1e9)

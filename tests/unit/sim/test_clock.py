"""Simulated time: seconds are rounded to the nearest tick, and events of one tick have an order."""

import pytest

from perfmodel.sim.clock import ARRIVAL_PRIORITY, STEP_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment, to_ticks


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.1, 1 / 3, 12.345678, 86_400.0])
def test_seconds_become_the_nearest_tick(seconds: float) -> None:
    assert abs(to_ticks(seconds) - seconds * TICKS_PER_S) <= 0.5


def test_a_tick_is_a_picosecond() -> None:
    assert to_ticks(1.5e-12) in (1, 2)
    assert TICKS_PER_S == 10**12


def test_arrivals_precede_step_ends_of_the_same_tick() -> None:
    env, seen = TickEnvironment(), []
    for delay, name, priority in (
        (5, "end", STEP_PRIORITY),
        (5, "arrival", ARRIVAL_PRIORITY),
        (3, "first", STEP_PRIORITY),
    ):
        Alarm(env, delay, lambda _, name=name: seen.append((env.ticks, name)), priority)  # type: ignore[misc]
    env.run_until_idle()
    assert seen == [(3, "first"), (5, "arrival"), (5, "end")]

"""What is left over waits: queues that begin empty and are asked for more than they serve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.evidence.kinds.runs import mean_backlog_wait_s


@given(rate=st.integers(1, 40), capacity=st.integers(1, 40), duration=st.integers(10, 400))
def test_the_mean_wait_is_that_of_each_arrival(rate: int, capacity: int, duration: int) -> None:
    """Arrival by arrival: number n comes at n / rate and starts when n have been served, n / capacity."""
    waits = [max(n / capacity - n / rate, 0.0) for n in range(rate * duration)]
    mean = sum(waits) / len(waits)
    assert mean_backlog_wait_s(rate, capacity, duration) == pytest.approx(mean, rel=0.11, abs=1e-9)


def test_a_tenth_of_the_capacity_is_half_of_the_wait() -> None:
    """4 requests/s of which 3.3 are served: 0.21 of the time; with a tenth more capacity, 3.63, it is 0.10."""
    assert mean_backlog_wait_s(4, 3.3, 1200) == pytest.approx(127.3, abs=0.1)
    assert mean_backlog_wait_s(4, 3.63, 1200) / mean_backlog_wait_s(4, 3.3, 1200) == pytest.approx(0.48, abs=0.01)

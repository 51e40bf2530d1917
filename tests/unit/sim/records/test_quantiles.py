"""Quantiles are those of numpy (Hyndman and Fan's definition 7), without what numpy loads for them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.sim.records.columns import quantiles

SECONDS = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=60)


@given(values=SECONDS, shares=st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_quantiles_are_those_of_numpy_bit_for_bit(values: list[float], shares: list[float]) -> None:
    expected = np.quantile(np.array(values), shares)
    assert quantiles(np.array(values), shares) == expected.tolist()


def test_quantiles_lie_on_a_line_between_order_statistics() -> None:
    """Of 0, 10, .. 100 the share q lies below 100 q; a share of two values is one of the way."""
    tens = np.arange(0.0, 101.0, 10.0)[::-1].copy()
    assert quantiles(tens, (0.0, 0.25, 0.5, 1.0)) == [0.0, 25.0, 50.0, 100.0]
    assert quantiles(np.array([10.0, 0.0]), (0.9,)) == pytest.approx([9.0])

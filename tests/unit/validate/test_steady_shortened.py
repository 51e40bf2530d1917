"""Shortened rows: means of a whole run from four of its rounds."""

import numpy as np
import pytest

from perfmodel.sim.result import RequestColumns
from perfmodel.validate.steady_shortened import continued_means

SLOTS = 5


def columns(ttft_s: list[float]) -> RequestColumns:
    """Rounds of requests, all of a round alike; TPOT is a tenth of TTFT."""
    ttft = np.repeat(np.array(ttft_s), SLOTS)
    n = len(ttft)
    ids, zeros, outputs = np.arange(n), np.zeros(n), np.full(n, 11)
    return RequestColumns(ids, zeros, zeros, ttft, 2 * ttft, outputs, outputs, 0 * ids, 0 * ids, 0 * ids)


def test_the_means_are_those_of_the_whole_run_where_its_middle_is_steady() -> None:
    whole = columns([9.0, 4.0, *[2.0] * 7, 1.0])
    ttft_s, tpot_s = continued_means(columns([9.0, 4.0, 2.0, 1.0]), SLOTS, 10)
    assert ttft_s == pytest.approx(whole.ttft_s.mean())
    assert tpot_s == pytest.approx(whole.tpot_s.mean())

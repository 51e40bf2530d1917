"""Shortened closed loops: means of a whole run from some of its rounds."""

import numpy as np
import pytest

from perfmodel.evidence.predict.recorded import weighted_means
from perfmodel.sim import RequestColumns

SLOTS = 5


def columns(ttft_s: list[float]) -> RequestColumns:
    """Rounds of requests, all of a round alike; TPOT is a tenth of TTFT."""
    ttft = np.repeat(np.array(ttft_s), SLOTS)
    n = len(ttft)
    ids, zeros, outputs = np.arange(n), np.zeros(n), np.full(n, 11)
    return RequestColumns(ids, zeros, zeros, ttft, 2 * ttft, outputs, outputs, 0 * ids, 0 * ids, 0 * ids)


@pytest.mark.parametrize("kept", [1, 2, 8])
def test_the_means_are_those_of_the_whole_run_where_its_middle_is_steady(kept: int) -> None:
    whole = columns([9.0, *[2.0] * 8, 1.0])
    ttft_s, tpot_s = weighted_means(columns([9.0, *[2.0] * kept, 1.0]), SLOTS, 10 * SLOTS)
    assert ttft_s == pytest.approx(whole.ttft_s.mean())
    assert tpot_s == pytest.approx(whole.tpot_s.mean())

"""Percentiles are what they are called: as many requests, and gaps between tokens, lie below as the name says."""

import numpy as np
import pytest

from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

SHARES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def test_as_many_requests_are_below_a_percentile_as_its_name_says() -> None:
    """Of 400 different latencies 20 lie above p95, 40 above p90, give or take the one next to it."""
    result = simulate(load_scenario("llama-3.1-8b-a100", ["traffic.num_requests=400", "traffic.arrivals.rate=6"]))
    requests, summary = result.requests, result.summary
    assert requests is not None
    for name, seconds in (("ttft", requests.ttft_s), ("tpot", requests.tpot_s), ("e2el", requests.e2el_s)):
        known = seconds[np.isfinite(seconds)]
        assert len(np.unique(known)) > 390
        for percentile, share in SHARES.items():
            num_below = (known * 1e3 <= summary[f"{percentile}_{name}_ms"]).sum()
            assert num_below == pytest.approx(share * len(known), abs=1), (name, percentile)


def test_gaps_that_grow_evenly_have_percentiles_on_a_line() -> None:
    """One request alone decodes 8,000 tokens, and each step reads one token more: the gaps lie on a line, and so do
    their percentiles, to the width of a bin, 0.2 %. The whole growth is a third."""
    lengths = [
        f"traffic.{name}_tokens={{distribution: fixed, value: {n}}}" for name, n in (("input", 1), ("output", 8000))
    ]
    alone = ["model=qwen3-0.6b", "traffic.num_requests=1", *lengths]
    summary = simulate(load_scenario("llama-3.1-8b-a100", alone)).summary
    median, p90, p95, p99 = (summary[f"{name}_itl_ms"] for name in SHARES)
    assert p99 > 1.1 * median
    per_share = (p99 - median) / 0.49
    assert p90 == pytest.approx(median + 0.40 * per_share, rel=0.003)
    assert p95 == pytest.approx(median + 0.45 * per_share, rel=0.003)

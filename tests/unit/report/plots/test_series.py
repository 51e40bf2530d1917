"""Curves made from records: areas and shares are conserved by binning and thinning."""

from types import SimpleNamespace

import numpy as np
import pytest

from perfmodel.report.plots.run import (
    MAX_BINS,
    MAX_POINTS,
    TimeBins,
    envelope,
    quantile_curve,
    rate,
    summed,
    time_bins,
)


def test_binning_conserves_tokens(result):
    steps = result.steps
    bins = time_bins(steps)
    tokens_per_s = rate(steps, steps.num_tokens, bins)
    assert len(tokens_per_s) <= MAX_BINS
    assert tokens_per_s.sum() * bins.width_s == pytest.approx((steps.num_tokens * steps.num_steps).sum(), rel=1e-9)


def test_binned_mean_weighs_by_time_and_counts_idle_time_as_zero(result):
    steps = result.steps
    bins = time_bins(steps)
    ones = summed(steps, np.ones(len(steps)), bins)
    assert ones == pytest.approx(np.ones(len(ones)))


def test_an_envelope_has_the_extremes_of_its_bins():
    """Two replicas by hand: 3 from 0 to 4 s, 5 from 1 to 1.1 s, nothing after 4 s."""
    steps = SimpleNamespace(start_s=np.array([0.0, 1.0]), end_s=np.array([4.0, 1.1]), replica=np.array([0, 1]))
    low, high = envelope(steps, np.array([3.0, 5.0]), TimeBins(np.array([0.0, 2.0, 4.0, 6.0])))
    assert low.tolist() == [3, 3, 0]
    assert high.tolist() == [8, 3, 0]


def test_means_lie_within_their_envelope(result):
    steps = result.steps
    bins, values = time_bins(steps), steps.num_running.astype(float)
    low, high = envelope(steps, values, bins)
    means = summed(steps, values, bins)
    assert (low <= means + 1e-9).all()
    assert (means <= high + 1e-9).all()
    assert high.max() == steps.num_running.max()


def test_quantile_curve_keeps_the_extremes_and_ends_at_one():
    values = np.random.default_rng(0).exponential(1.0, 100_000)
    x, share = quantile_curve(values)
    assert len(x) == MAX_POINTS
    assert (x[0], x[-1], share[-1]) == (values.min(), values.max(), 1.0)
    assert share == pytest.approx([np.mean(values <= v) for v in x])


def test_quantile_curve_passes_over_missing_values():
    x, share = quantile_curve(np.array([np.nan, 2.0, 1.0]))
    assert x.tolist() == [1.0, 2.0]
    assert share.tolist() == [0.5, 1.0]

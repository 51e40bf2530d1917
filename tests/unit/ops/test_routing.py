"""Expected loads against simulated routing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.routing import (
    TILE_ROWS,
    expected_tiles,
    skewed_routing,
    slowest_uniform_routing,
)
from perfmodel.specs import ExpertRouting

BLOCK = MoEFFN(64, 6, 1408)


def recorded(popularity):
    return ExpertRouting(distribution="recorded", popularity=tuple(popularity))


def simulated(num_tokens, ranks, runs=400):
    """(distinct, assignments, tiles) of the rank with most assignments, mean over runs."""
    rng, found = np.random.default_rng(3), []
    for _ in range(runs):
        chosen = rng.random((num_tokens, BLOCK.num_experts)).argsort(axis=1)[:, : BLOCK.top_k]
        counts = np.bincount(chosen.ravel(), minlength=BLOCK.num_experts).reshape(ranks, -1)
        counts = counts[counts.sum(axis=1).argmax()]
        found.append([(counts > 0).sum(), counts.sum(), *(np.ceil(counts / t).sum() for t in TILE_ROWS)])
    return np.mean(found, axis=0)


@pytest.mark.parametrize("num_tokens", [1, 5, 40, 300])
def test_uniform_loads_match_simulated_routing(num_tokens):
    load = slowest_uniform_routing(BLOCK, num_tokens, 1)
    np.testing.assert_allclose([load.distinct, load.assignments, *load.tiles], simulated(num_tokens, 1), rtol=0.02)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("num_tokens", [8, 64, 512])
def test_slowest_loads_match_simulated_routing(num_tokens, ranks):
    load = slowest_uniform_routing(BLOCK, num_tokens, ranks)
    np.testing.assert_allclose([load.distinct, load.assignments, *load.tiles], simulated(num_tokens, ranks), rtol=0.12)


@settings(deadline=None)
@given(st.integers(1, 100000), st.floats(0.001, 1.0))
def test_tiles_hold_all_rows_and_at_least_one_per_expert_hit(num_tokens, probability):
    tiles = expected_tiles(num_tokens, probability)
    hit = 1 - (1 - probability) ** num_tokens
    rows = num_tokens * probability
    for t, count in zip(TILE_ROWS, tiles, strict=True):
        assert max(rows / t * 0.99, hit * 0.999) <= count <= hit + rows / t + 1e-6
    assert (np.diff(tiles) <= 1e-9).all()


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.2])
@pytest.mark.parametrize("num_tokens", [16, 1000])
def test_power_laws_load_the_slowest_rank_more(exponent, num_tokens):
    route = skewed_routing(ExpertRouting(distribution="power_law", alpha=exponent))
    skewed, even = route(BLOCK, num_tokens, 8), slowest_uniform_routing(BLOCK, num_tokens, 8)
    assert skewed.assignments > even.assignments
    assert skewed.distinct <= 8
    whole = route(BLOCK, num_tokens, 1)
    assert whole.assignments == pytest.approx(num_tokens * BLOCK.top_k, rel=0.1)
    assert whole.distinct <= slowest_uniform_routing(BLOCK, num_tokens, 1).distinct * 1.02
    assert route(BLOCK, num_tokens, 8) == skewed  # seeded


def test_an_expert_never_gets_more_tokens_than_there_are():
    load = skewed_routing(ExpertRouting(distribution="power_law", alpha=1.2))(MoEFFN(4, 3, 1024), 10, 1)
    assert load.distinct <= 4
    assert load.assignments <= 40


def test_a_record_of_equal_counts_is_uniform_routing():
    load = skewed_routing(recorded([7] * BLOCK.num_experts), num_draws=200)(BLOCK, 64, 1)
    even = slowest_uniform_routing(BLOCK, 64, 1)
    assert load.distinct == pytest.approx(even.distinct, rel=0.01)
    assert load.tiles == pytest.approx(even.tiles, rel=0.02)


def test_a_record_with_idle_experts_reads_no_more_than_the_busy_ones():
    busy = [1.0] * 16 + [0.0] * 48
    load = skewed_routing(recorded(busy))(BLOCK, 500, 1)
    assert load.distinct == 16
    assert load.assignments == pytest.approx(500 * BLOCK.top_k, rel=0.02)


@pytest.mark.parametrize("probability", [1e-12, 0.5, 0.99999, 1 - 2**-53])
def test_expected_tiles_are_numbers_for_any_probability(probability):
    """One rank's expert: not fewer than the mean fills, not more than one a token."""
    for num_tokens in (1, 7, 40):
        tiles = expected_tiles(num_tokens, probability)
        least = num_tokens * probability / np.asarray(TILE_ROWS)
        assert np.all(np.isfinite(tiles))
        assert np.all(tiles >= least - 1e-9)
        assert np.all(tiles <= num_tokens)

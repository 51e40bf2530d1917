"""Loads under popularity of a beta distribution: against draws of it, and against uniform routing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.routing import TILE_ROWS, dispersed_routing, dispersed_tiles, slowest_uniform_routing

BLOCK = MoEFFN(128, 8, 1408)
BLOCKS = st.builds(MoEFFN, st.sampled_from([8, 60, 128, 256]), st.integers(1, 8), st.just(1408))
DISPERSIONS = st.floats(0.01, 3.0)


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 500, 2000, 8000])
@pytest.mark.parametrize(("probability", "dispersion"), [(0.25, 0.5), (4 / 128, 1.0), (8 / 256, 0.3)])
def test_tiles_are_those_of_drawn_experts(num_tokens, probability, dispersion):
    rng = np.random.default_rng(1)
    total = (1 - probability) / (dispersion * probability) - 1
    chances = rng.beta(probability * total, (1 - probability) * total, 100_000)
    rows = rng.binomial(num_tokens, chances)
    chance, tiles = dispersed_tiles(num_tokens, probability, dispersion)
    assert chance == pytest.approx((rows > 0).mean(), abs=0.005)
    assert tiles == pytest.approx([np.ceil(rows / t).mean() for t in TILE_ROWS], rel=0.015, abs=0.002)


@given(BLOCKS, DISPERSIONS)
def test_one_token_has_exactly_its_experts(block, dispersion):
    load = dispersed_routing(dispersion)(block, 1, 1)
    assert load.distinct == pytest.approx(block.top_k)
    assert load.assignments == pytest.approx(block.top_k)


@given(BLOCKS, DISPERSIONS, st.integers(1, 4096))
def test_unequal_popularity_reads_no_more_experts_and_multiplies_as_many_rows(block, dispersion, num_tokens):
    even, load = slowest_uniform_routing(block, num_tokens, 1), dispersed_routing(dispersion)(block, num_tokens, 1)
    assert load.distinct <= even.distinct * (1 + 1e-6)
    assert load.assignments == pytest.approx(even.assignments)


@given(BLOCKS, st.integers(1, 2000))
def test_none_is_uniform_routing(block, num_tokens):
    even = slowest_uniform_routing(block, num_tokens, 1)
    nearly = dispersed_routing(1e-4)(block, num_tokens, 1)
    assert dispersed_routing(0.0)(block, num_tokens, 1) == even
    assert nearly.distinct == pytest.approx(even.distinct, rel=2e-3)


@given(DISPERSIONS, st.integers(2, 4096), st.sampled_from([2, 4, 8]))
def test_the_rank_that_gets_most_gets_more_than_its_share_and_less_than_all(dispersion, num_tokens, ranks):
    load = dispersed_routing(dispersion)(BLOCK, num_tokens, ranks)
    assert num_tokens * BLOCK.top_k / ranks < load.assignments <= num_tokens * BLOCK.top_k
    even = slowest_uniform_routing(BLOCK, num_tokens, ranks)
    assert load.assignments >= even.assignments * (1 - 1e-9)


def test_the_heaviest_of_drawn_ranks():
    rng, ranks, num_tokens, dispersion = np.random.default_rng(2), 8, 512, 1.0
    probability = BLOCK.top_k / BLOCK.num_experts
    total = (1 - probability) / (dispersion * probability) - 1
    chances = rng.beta(probability * total, (1 - probability) * total, (4000, BLOCK.num_experts))
    chances *= BLOCK.top_k / chances.sum(axis=1, keepdims=True)
    rows = rng.binomial(num_tokens, np.minimum(chances, 1)).reshape(4000, ranks, -1).sum(axis=2).max(axis=1)
    assert dispersed_routing(dispersion)(BLOCK, num_tokens, ranks).assignments == pytest.approx(rows.mean(), rel=0.04)

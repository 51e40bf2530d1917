"""Experts placed by popularity, copied, or cut to a capacity: conservation, balance, and what it cannot do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost import plan_memory
from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.routing import (
    TILE_ROWS,
    capacity_rows,
    dropped_share,
    place_experts,
    popularity_of,
    skewed_routing,
    slowest_uniform_routing,
    with_capacity,
)
from perfmodel.specs import EngineSpec, ExpertRouting, load_hardware, load_model

BLOCK = MoEFFN(64, 6, 1408)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 1000), min_size=4, max_size=40), st.integers(1, 8), st.integers(0, 9))
def test_every_token_is_in_one_place(counts, num_ranks, num_redundant):
    """Slots hold each expert as often as it has copies, and the rows of its copies add up to its tokens."""
    counts = np.array(counts)
    placed = place_experts(counts.astype(float) + 0.5, num_ranks, num_redundant)
    assert placed.copies.sum() == len(counts) + num_redundant
    held = placed.expert[placed.expert >= 0]
    assert (np.bincount(held, minlength=len(counts)) == placed.copies).all()
    rows = placed.rows(counts)
    assert rows.sum() == counts.sum()
    for expert, count in enumerate(counts):
        assert rows[placed.expert == expert].sum() == count
        assert np.ptp(rows[placed.expert == expert]) <= 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.1, 100.0), min_size=4, max_size=32), st.integers(1, 40))
def test_no_copy_would_do_more_for_another_expert(loads, num_redundant):
    """Removing a copy of a replicated expert would load its others at least as much as the most loaded copy."""
    loads = np.array(loads)
    copies = place_experts(loads, 4, num_redundant).copies
    copied = copies > 1
    assert (loads[copied] / (copies[copied] - 1) >= (loads / copies).max() * (1 - 1e-9)).all()


@pytest.mark.parametrize(
    "routing",
    [
        ExpertRouting(),
        ExpertRouting(distribution="power_law", alpha=1.5),
        ExpertRouting(distribution="recorded", popularity=tuple(float(i**3) for i in range(1, 65))),
    ],
)
@pytest.mark.parametrize("top_k", [1, 6, 40, 64])
def test_a_token_chooses_top_k_distinct_experts(routing, top_k):
    """Also if proportional shares would choose the most popular expert more than once."""
    chances = popularity_of(routing)(64, top_k)
    assert chances.sum(axis=1) == pytest.approx(np.full(len(chances), top_k))
    assert (chances >= 0).all()
    assert (chances <= 1 + 1e-9).all()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.1, 100.0), min_size=8, max_size=32), st.sampled_from([2, 4, 8]))
def test_the_most_popular_experts_are_apart(loads, num_ranks):
    placed = place_experts(np.array(loads), num_ranks)
    most = np.argsort(-np.array(loads), kind="stable")[:num_ranks]
    assert len({int(np.argwhere(placed.expert == expert)[0, 0]) for expert in most}) == num_ranks


@pytest.mark.parametrize("num_redundant", [0, 8])
def test_equal_experts_are_shared_out_evenly(num_redundant):
    placed = place_experts(np.ones(64), 8, num_redundant)
    assert ((placed.expert >= 0).sum(axis=1) == (64 + num_redundant) // 8).all()


@pytest.mark.parametrize("num_tokens", [64, 4096])
def test_balancing_lowers_the_slowest_rank_towards_the_mean_and_copies_more_so(num_tokens):
    mean, skewed = num_tokens * BLOCK.top_k / 8, ExpertRouting(distribution="power_law", alpha=1.2)
    plain, placed, copied = (
        skewed_routing(skewed, copies)(BLOCK, num_tokens, 8).assignments for copies in (None, 0, 16)
    )
    assert mean * 0.98 <= copied < placed < plain
    if num_tokens > 1000:  # beyond the noise of single steps
        assert copied / mean < 1.15 < plain / mean


def test_copies_take_memory_on_every_rank():
    model, hardware = load_model("qwen3-30b-a3b"), load_hardware("h100-sxm-80gb")
    engine = EngineSpec(tensor_parallel_size=4, enable_expert_parallel=True)
    copied = EngineSpec(
        tensor_parallel_size=4, enable_expert_parallel=True, enable_eplb=True, eplb_config={"num_redundant_experts": 32}
    )
    one, other = (plan_memory(model, hardware, e).weights["experts"] for e in (engine, copied))
    assert other == pytest.approx(one * (128 + 32) / 128)


def test_experts_are_balanced_only_where_they_are_whole():
    with pytest.raises(ValueError, match="enable_expert_parallel"):
        EngineSpec(enable_eplb=True)
    with pytest.raises(ValueError, match="without enable_eplb"):
        EngineSpec(enable_expert_parallel=True, eplb_config={"num_redundant_experts": 4})


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 2.0])
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_a_capacity_is_what_every_expert_multiplies(factor, num_ranks):
    rows = capacity_rows(BLOCK, 640, factor)
    assert rows == 60 * factor  # 640 * 6 / 64 each
    load = with_capacity(factor)(BLOCK, 640, num_ranks)
    assert load.assignments == rows * 64 / num_ranks
    assert load.distinct == 64 / num_ranks
    assert load.tiles[TILE_ROWS.index(64)] == -(-rows // 64) * 64 / num_ranks


def test_a_large_capacity_pads_every_expert_to_all_tokens_and_drops_nothing():
    assert with_capacity(100.0)(BLOCK, 10, 1).assignments == 64 * 10
    assert dropped_share(BLOCK, 10, 100.0, popularity_of(ExpertRouting())(64, 6)) == 0.0
    assert with_capacity(1.0)(BLOCK, 640, 1).assignments == slowest_uniform_routing(BLOCK, 640, 1).assignments


def test_skew_drops_more_and_room_drops_less():
    even = popularity_of(ExpertRouting())(64, 6)
    skewed = popularity_of(ExpertRouting(distribution="power_law", alpha=1.2))(64, 6)
    shares = [dropped_share(BLOCK, 640, factor, even) for factor in (1.0, 1.25, 2.0)]
    assert shares == sorted(shares, reverse=True)
    # Binomial(640, 6/64) about its mean of 60: E max(X - 60, 0) = sd / sqrt(2 pi) = 7.37 * 0.399.
    assert shares[0] == pytest.approx(7.37 * 0.399 / 60, rel=0.1)
    assert dropped_share(BLOCK, 640, 1.0, skewed) > 3 * shares[0]


def test_a_recorded_popularity_is_interpolated_between_expert_centers():
    """8, 4, 2 and 2 of 16 tokens. With twice as many experts, the outermost keep the recorded values and the others are
    interpolated: 8, 7, 5, 3.5, 2.5, 2, 2, 2 of 32."""
    recorded = popularity_of(ExpertRouting(distribution="recorded", popularity=(2.0, 8.0, 4.0, 2.0)))
    for count, shares in ((4, (8, 4, 2, 2)), (8, (8, 7, 5, 3.5, 2.5, 2, 2, 2))):
        chances = -np.sort(-recorded(count, 1), axis=1)
        assert chances == pytest.approx(np.tile(np.array(shares) / sum(shares), (len(chances), 1)))

"""The rank that a step waits for: against drawn routing, a published table, and what holds for any router."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.routing import dispersed_routing, place_experts, slowest_uniform_routing

DEEPSEEK = MoEFFN(256, 8, 2048, num_groups=8, top_k_groups=4)
BLOCKS = st.sampled_from([MoEFFN(64, 6, 1408), MoEFFN(128, 4, 768), MoEFFN(256, 8, 2048)])
DISPERSIONS, RANKS = st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.sampled_from([2, 4, 8, 16, 32])
COPIES = st.sampled_from([None, 0, 32])
# DeepSeek-R1, 1,024 assignments a rank, by rank: (max - mean) / mean. TensorRT-LLM's tech blog "Scaling Expert
# Parallelism in TensorRT-LLM, part 1", table 1: ranks, copies, imbalance. Without EPLB experts vary by 164.1 of 128.
PUBLISHED = [(32, 32, 0.109), (36, 32, 0.115)]
DEEPSEEK_R1 = (164.1 / 128) ** 2 - 1 / 128


def imbalance(block, num_tokens, num_ranks, dispersion=1.0, copies=None, per_node=None):
    """The most loaded rank's assignments over the mean."""
    load = dispersed_routing(dispersion, copies, per_node)(block, num_tokens, num_ranks)
    return load.assignments * num_ranks / (num_tokens * block.top_k)


def drawn_popularity(block, dispersion, num_runs, rng):
    """(runs, experts): chances to be among a token's k, beta-distributed, k in sum."""
    mean = block.top_k / block.num_experts
    total = (1 - mean) / (dispersion * mean) - 1
    chances = rng.beta(mean * total, (1 - mean) * total, (num_runs, block.num_experts))
    return np.minimum(chances * block.top_k / chances.sum(axis=1, keepdims=True), 1)


@given(BLOCKS, DISPERSIONS, COPIES, st.integers(1, 10_000))
def test_one_rank_waits_for_nobody(block, dispersion, copies, num_tokens):
    assert imbalance(block, num_tokens, 1, dispersion, copies) == pytest.approx(1)


@settings(deadline=None)
@given(BLOCKS, DISPERSIONS, COPIES, RANKS, st.integers(1, 100_000))
def test_the_most_loaded_rank_has_the_mean_at_least_and_every_token_at_most(
    block, dispersion, copies, num_ranks, num_tokens
):
    load = dispersed_routing(dispersion, copies)(block, num_tokens, num_ranks)
    slots = -(-(block.num_experts + (copies or 0)) // num_ranks)
    assert num_tokens * block.top_k / num_ranks * 0.99 <= load.assignments
    assert load.assignments <= num_tokens * min(block.top_k, slots) * (1 + 1e-9)
    assert load.distinct <= min(slots, load.assignments) * (1 + 1e-9)


@pytest.mark.parametrize("num_ranks", [2, 8, 32])
@pytest.mark.parametrize("num_tokens", [64, 1000])
@pytest.mark.parametrize("block", [MoEFFN(64, 6, 1408), MoEFFN(64, 16, 1408)])
def test_even_routers_load_ranks_as_drawn_choices_do(block, num_tokens, num_ranks):
    """Each token's k experts are distinct, so that a rank's tokens vary less than k times as many choices of one."""
    rng = np.random.default_rng(5)
    shares = []
    for _ in range(200):
        chosen = rng.random((num_tokens, block.num_experts)).argsort(axis=1)[:, : block.top_k]
        rows = np.bincount(chosen.ravel() * num_ranks // block.num_experts, minlength=num_ranks)
        shares.append(rows.max() / rows.mean())
    load = slowest_uniform_routing(block, num_tokens, num_ranks)
    assert load.assignments * num_ranks / (num_tokens * block.top_k) - 1 == pytest.approx(
        np.mean(shares) - 1, rel=0.12, abs=0.005
    )


@pytest.mark.parametrize("num_ranks", [2, 8, 32, 64])
@pytest.mark.parametrize("num_tokens", [32, 256, 8192])
@pytest.mark.parametrize(("block", "dispersion"), [(DEEPSEEK, 1.0), (DEEPSEEK, 0.2), (MoEFFN(128, 8, 1408), 0.5)])
def test_unplaced_experts_load_ranks_as_drawn_popularity_does(block, dispersion, num_tokens, num_ranks):
    rng = np.random.default_rng(6)
    rows = rng.binomial(num_tokens, drawn_popularity(block, dispersion, 2000, rng)).reshape(2000, num_ranks, -1)
    drawn = rows.sum(axis=2).max(axis=1).mean() / rows.sum(axis=2).mean()
    assert imbalance(block, num_tokens, num_ranks, dispersion) == pytest.approx(drawn, rel=0.05)


@pytest.mark.parametrize(
    ("num_ranks", "copies", "per_node", "num_tokens"),
    [(8, 0, None, 128), (8, 32, None, 4096), (32, 32, 8, 100_000), (32, 32, None, 512), (72, 32, 8, 18_432)],
)
def test_placed_experts_load_ranks_as_drawn_popularity_does(num_ranks, copies, per_node, num_tokens):
    """With popularity that moves, from when experts were placed to the step, by 0.6 % of its variance."""
    rng, moves, loads = np.random.default_rng(7), 0.0099 / DEEPSEEK_R1, []
    nodes = 1 if per_node is None else num_ranks // per_node
    for chances in drawn_popularity(DEEPSEEK, 1.0, 60, rng):
        placed = place_experts(chances, num_ranks, copies, DEEPSEEK.num_groups, nodes)
        slots = np.where(placed.expert < 0, 0, (chances / placed.copies)[placed.expert])
        moved = slots * rng.gamma(1 / moves, moves, (20, *slots.shape))
        rows = rng.poisson(num_tokens * moved).sum(axis=2)
        loads.append((rows.max(axis=1) / rows.mean(axis=1)).mean())
    assert imbalance(DEEPSEEK, num_tokens, num_ranks, 1.0, copies, per_node) == pytest.approx(np.mean(loads), rel=0.03)


@pytest.mark.parametrize(("num_ranks", "copies", "published"), PUBLISHED)
def test_deepseek_r1_as_published(num_ranks, copies, published):
    share = imbalance(DEEPSEEK, 128 * num_ranks, num_ranks, DEEPSEEK_R1, copies) - 1
    assert share == pytest.approx(published, abs=0.006)
    assert imbalance(DEEPSEEK, 128 * num_ranks, num_ranks, DEEPSEEK_R1) > 1 + 5 * published


def test_independent_tokens_do_not_explain_what_was_published():
    assert imbalance(DEEPSEEK, 128 * 32, 32, 0.0) - 1 < 0.7 * PUBLISHED[0][-1]


@pytest.mark.parametrize("per_node", [None, 8])
@pytest.mark.parametrize("num_ranks", [8, 16, 32, 64])
@pytest.mark.parametrize("num_tokens", [64, 4096, 1_000_000])
def test_more_copies_never_load_the_slowest_rank_more(num_ranks, num_tokens, per_node):
    loads = [imbalance(DEEPSEEK, num_tokens, num_ranks, 1.0, num_ranks * i, per_node) for i in range(5)]
    assert all(more <= fewer * 1.002 for fewer, more in pairwise(loads))
    assert loads[0] < imbalance(DEEPSEEK, num_tokens, num_ranks)


@pytest.mark.parametrize("copies", [None, 0, 32])
def test_large_batches_leave_what_placement_leaves(copies):
    """The noise of independent tokens falls as one over the root of the batch, down to popularity alone."""
    sizes = [16, 64, 256, 4096, 10**6, 10**8]
    loads = [imbalance(DEEPSEEK, size, 32, 1.0, copies) for size in sizes]
    assert all(large < small for small, large in pairwise(loads))
    assert loads[-1] == pytest.approx(loads[-2], rel=2e-3)
    assert loads[0] > 1.3 * loads[-1]


def test_an_even_router_needs_no_large_batch_to_be_even_in_prompts():
    """Relative noise of the mean load A is sqrt((1 - k / E) / A): 16 decodes a rank wait, prompts do not."""
    noise = [imbalance(DEEPSEEK, 32 * size, 32, 0.0) - 1 for size in (16, 16384)]
    assert noise[0] / noise[1] == pytest.approx(32, rel=0.1)
    assert noise[1] < 0.01 < 0.15 < noise[0]


def test_copies_are_read_and_share_the_mean_load():
    """288 slots on 72 ranks: four each, of 256 / 72 experts' load."""
    load = dispersed_routing(1.0, 32, 8)(DEEPSEEK, 72 * 256, 72)
    assert load.distinct == pytest.approx(4, rel=0.01)
    assert 256 * 8 < load.assignments < 1.2 * 256 * 8

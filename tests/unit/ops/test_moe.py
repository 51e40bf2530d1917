"""Expert loads against simulated routing, and conservation over ranks."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.feedforward import experts
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.messages import distinct_ranks
from perfmodel.ops.routing import distinct_experts, uniform_routing

BF16 = LinearFormat("bf16", 2.0, 2.0, 2.0)
MIXTRAL = MoEFFN(8, 2, 14336)


def routed(num_experts, top_k, rng, groups=1, top_groups=1):
    """One token's experts: `top_groups` random groups, then `top_k` random experts of them."""
    size = num_experts // groups
    chosen = rng.sample(range(groups), top_groups)
    return rng.sample([g * size + i for g in chosen for i in range(size)], top_k)


@pytest.mark.parametrize(("num_experts", "top_k", "groups", "top_groups"), [(8, 2, 1, 1), (64, 6, 1, 1), (64, 8, 8, 4)])
@pytest.mark.parametrize("num_tokens", [1, 4, 16])
def test_distinct_experts_match_simulated_routing(num_experts, top_k, groups, top_groups, num_tokens):
    rng = random.Random(1)
    runs = 2000
    touched = sum(
        len({e for _ in range(num_tokens) for e in routed(num_experts, top_k, rng, groups, top_groups)})
        for _ in range(runs)
    )
    assert distinct_experts(num_experts, top_k, num_tokens) == pytest.approx(touched / runs, rel=0.02)


def test_distinct_experts_of_mixtral_by_hand():
    """8 (1 - (3/4)^n): 2, 3.5, 7.2 experts for 1, 2, 8 tokens."""
    assert [distinct_experts(8, 2, n) for n in (1, 2)] == [2.0, 3.5]
    assert distinct_experts(8, 2, 8) == pytest.approx(8 * (1 - 0.75**8))


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (8, 4)])
@pytest.mark.parametrize("num_ranks", [8, 16, 32])
def test_distinct_ranks_match_simulated_routing(groups, top_groups, num_ranks):
    rng = random.Random(2)
    ffn = MoEFFN(256, 8, 2048, num_groups=groups, top_k_groups=top_groups)
    per_rank = 256 // num_ranks
    runs = 3000
    reached = sum(len({e // per_rank for e in routed(256, 8, rng, groups, top_groups)}) for _ in range(runs))
    assert distinct_ranks(ffn, num_ranks) == pytest.approx(reached / runs, rel=0.03)


@given(st.integers(1, 8), st.sampled_from([(1, 1), (8, 4), (8, 2)]))
def test_with_one_expert_per_rank_a_token_reaches_top_k_ranks(top_k, groups):
    ffn = MoEFFN(256, top_k, 2048, num_groups=groups[0], top_k_groups=groups[1])
    assert distinct_ranks(ffn, 256) == pytest.approx(top_k)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 5000))
def test_expert_parallel_ranks_share_out_all_assignments(num_ranks, num_tokens):
    load, whole = uniform_routing(MIXTRAL, num_tokens, num_ranks), uniform_routing(MIXTRAL, num_tokens, 1)
    assert load.assignments * num_ranks == pytest.approx(whole.assignments) == 2 * num_tokens
    assert load.distinct * num_ranks == pytest.approx(whole.distinct)


@given(st.integers(1, 4096))
def test_grouped_experts_by_hand(num_tokens):
    """FLOPs 2 x 2n x 3 x 4096 x 14336; weights of D experts, each 3 x 4096 x 14336 x 2 B."""
    load = uniform_routing(MIXTRAL, num_tokens, 1)
    work = experts(num_tokens, MIXTRAL, load, BF16, width=4096, intermediate=14336)
    assert work.flops == pytest.approx(2 * 2 * num_tokens * 3 * 4096 * 14336)
    assert work.weight_bytes == pytest.approx(8 * (1 - 0.75**num_tokens) * 3 * 4096 * 14336 * 2)


@pytest.mark.parametrize("gated", [True, False])
def test_experts_as_modules_move_what_their_operators_read_and_write(gated):
    """Hugging Face's MixtralSparseMoeBlock, an expert on n of its rows, elements in bf16: gather (read d, write d), w1
    and, if gated, w3 (read d each, write f each), the activation (read f, write f) and the product (read 2 f, write f),
    w2 (read f, write d), times the router's weight (read d, write d), index_add_ (read 2 d, write d); one sum of d is
    written a token."""
    ffn, d, f = MoEFFN(8, 2, 14336, gated=gated), 4096, 14336
    load = uniform_routing(ffn, 100, 1)
    work = experts(100, ffn, load, BF16, width=d, intermediate=f, is_fused=False)
    product = 3 * f if gated else 0
    row = 2 * d + (1 + gated) * (d + f) + 2 * f + product + (f + d) + 2 * d + 3 * d
    assert work.activation_bytes == pytest.approx(2 * (load.assignments * row + 100 * d))


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_distinct_experts_grow_and_saturate(a, b):
    low, high = sorted((a, b))
    assert distinct_experts(128, 8, low) <= distinct_experts(128, 8, high) <= 128


def test_top_k_of_all_experts_touches_all():
    assert distinct_experts(4, 4, 1) == distinct_experts(4, 9, 1) == 4

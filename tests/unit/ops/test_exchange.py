"""Copies of a token on its way to experts: expected distinct nodes against simulated routing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.messages import distinct_nodes, distinct_ranks


def simulated(ffn, num_nodes, runs=4000):
    """Top-k experts of uniform scores among those of the best groups, as in DeepSeek-V3; mean distinct nodes."""
    rng = np.random.default_rng(0)
    size = ffn.num_experts // ffn.num_groups
    reached = 0
    for _ in range(runs):
        chosen = rng.choice(ffn.num_groups, ffn.top_k_groups, replace=False)
        among = np.concatenate([np.arange(g * size, (g + 1) * size) for g in chosen])
        experts = rng.choice(among, ffn.top_k, replace=False)
        reached += len(np.unique(experts * num_nodes // ffn.num_experts))
    return reached / runs


@pytest.mark.parametrize("num_nodes", [2, 4, 8, 16])
@pytest.mark.parametrize(("num_groups", "top_k_groups"), [(1, 1), (8, 4), (8, 2)])
def test_distinct_nodes_match_simulated_routing(num_nodes, num_groups, top_k_groups):
    ffn = MoEFFN(256, 8, 2048, num_groups=num_groups, top_k_groups=top_k_groups)
    assert distinct_nodes(ffn, num_nodes) == pytest.approx(simulated(ffn, num_nodes), rel=0.02)


@given(st.integers(1, 32), st.integers(1, 8), st.sampled_from([(1, 1), (8, 4)]))
def test_a_token_reaches_no_more_nodes_than_there_are_nor_than_its_experts(num_nodes, top_k, groups):
    ffn = MoEFFN(256, top_k, 2048, num_groups=groups[0], top_k_groups=groups[1])
    assert 1 - 1e-9 <= distinct_nodes(ffn, num_nodes) <= min(num_nodes, top_k) + 1e-9


@pytest.mark.parametrize("num_nodes", [2, 4, 8])
def test_nodes_of_several_ranks_get_fewer_copies_than_ranks(num_nodes):
    ffn = MoEFFN(256, 8, 2048, num_groups=8, top_k_groups=4)
    assert distinct_nodes(ffn, num_nodes) < distinct_ranks(ffn, 8 * num_nodes)

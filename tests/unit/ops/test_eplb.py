"""Placement by nodes and ranks as EPLB computes it: DeepSeek's published example, and vLLM's own policy."""

import numpy as np
import pytest

from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.routing import balanced_packs, place_experts, skewed_routing
from perfmodel.specs import ExpertRouting

# README of deepseek-ai/EPLB (MIT): loads of 12 experts in two layers; 16 copies, 4 groups, 2 nodes, 8 GPUs.
LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PLACED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
# Squares of 1 to 32, permuted, and what DefaultEplbPolicy.rebalance_experts of vLLM 0.30.0 (Apache-2.0) makes of them
# with 40 copies on 8 ranks: 8 groups on 4 nodes, and none on one.
SQUARES = np.random.default_rng(7).permutation(np.arange(1, 33) ** 2)
BY_NODE = [
    *(4, 5, 6, 17, 18, 16, 5, 6, 7, 19, 25, 26, 8, 24, 9, 25, 26, 10, 11, 27),
    *(2, 15, 13, 1, 14, 12, 15, 13, 0, 3, 23, 22, 20, 29, 21, 28, 28, 29, 31, 30),
]
ON_ONE = [
    *(13, 15, 22, 20, 14, 2, 26, 16, 0, 19, 25, 12, 10, 11, 9, 25, 26, 4, 31, 3),
    *(29, 28, 4, 1, 24, 5, 23, 16, 7, 27, 5, 28, 8, 30, 21, 6, 6, 15, 17, 18),
]


def ranks(experts, num_ranks=8):
    return [sorted(row) for row in np.reshape(experts, (num_ranks, -1)).tolist()]


@pytest.mark.parametrize(("loads", "placed"), list(zip(LOADS, PLACED, strict=True)))
def test_deepseeks_example(loads, placed):
    assert ranks(place_experts(np.array(loads, float), 8, 4, num_groups=4, num_nodes=2).expert) == ranks(placed)


@pytest.mark.parametrize(("groups", "nodes", "placed"), [(8, 4, BY_NODE), (1, 1, ON_ONE), (8, 3, ON_ONE)])
def test_vllms_policy(groups, nodes, placed):
    """Groups that do not divide by the nodes are placed as if on one."""
    assert ranks(place_experts(SQUARES.astype(float), 8, 8, groups, nodes).expert) == ranks(placed)


def test_packs_by_hand():
    """9 to the first, 8 and 2 to the second, 5 and 3 to the third: each goes to the lightest with room for two."""
    assert balanced_packs(np.array([9.0, 8.0, 5.0, 3.0, 2.0, 1.0]), 3).tolist() == [0, 1, 2, 2, 1, 0]


def test_groups_stay_on_their_node_and_balance_is_no_better_for_it():
    """Four groups of four on two nodes: each node has two whole groups; placed freely they are no less even."""
    loads = np.arange(1.0, 17.0) ** 2
    placed = place_experts(loads, 4, 4, num_groups=4, num_nodes=2)
    nodes = [set((half // 4).tolist()) for half in placed.expert.reshape(2, -1)]
    assert [len(groups) for groups in nodes] == [2, 2]
    assert not nodes[0] & nodes[1]
    heaviest = [(loads / item.copies)[item.expert].sum(axis=1).max() for item in (placed, place_experts(loads, 4, 4))]
    assert heaviest[0] >= heaviest[1]


def test_routing_places_by_node():
    """Half of the tokens go to two experts of one group: on a node of its own, two ranks share what four could."""
    counts = (*(200.0,) * 4, *(1.0,) * 12)
    spec = ExpertRouting(distribution="recorded", popularity=counts)
    ffn = MoEFFN(16, 2, 64, num_groups=4, top_k_groups=4)
    free, by_node = (skewed_routing(spec, 4, num_draws=2, ranks_per_node=size) for size in (4, 2))
    assert by_node(ffn, 4096, 4).assignments >= free(ffn, 4096, 4).assignments

"""Messages over two levels: bytes by brute force over all pairs of ranks, and bounds that no algorithm may beat."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from perfmodel.cost.kernel_models.messages.links import alpha_beta_time, network_time, two_level, ways_of
from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.messages import Exchange, Message, RankGroup, distinct_ranks, spread_over
from perfmodel.specs.networks import Link

NVLINK = Link(name="nvlink", bandwidth_bytes_per_s=450e9, latency_s=1e-6)
NETWORK = Link(name="infiniband-ndr", bandwidth_bytes_per_s=50e9, latency_s=5e-6)
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
sizes = st.floats(1, 1e10)
shapes = st.tuples(st.integers(2, 6), st.integers(1, 8))  # nodes, devices of each


def on_nodes(num_nodes, per_node):
    return spread_over(RankGroup("tensor", num_nodes * per_node), per_node)


def nodes_of(num_nodes, per_node):
    return [rank // per_node for rank in range(num_nodes * per_node)]


@given(shapes)
def test_an_all_to_all_moves_what_goes_to_other_nodes(shape):
    """Each rank sends 1/k to every other: counted pair by pair."""
    nodes = nodes_of(*shape)
    k = len(nodes)
    (way,) = two_level("all_to_all", on_nodes(*shape))
    for mine in nodes:
        assert way.between == pytest.approx(sum(other != mine for other in nodes) / k)
        assert way.within == pytest.approx((sum(other == mine for other in nodes) - 1) / k)


@given(shapes, st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]))
def test_a_ring_leaves_each_node_once_for_all_its_cards(shape, kind):
    """k edges of the ring, each with all but a k-th of the bytes (twice for an all-reduce); a node's share over its
    cards. The hops on the way are those between neighbours of the ring on one node and on two."""
    nodes = nodes_of(*shape)
    k, passes = len(nodes), 2 if kind == "all_reduce" else 1
    ring = two_level(kind, on_nodes(*shape))[0]
    edges = [one != other for one, other in pairwise([*nodes, nodes[0]])]
    over_network = sum(edges) * passes * (k - 1) / k
    assert ring.between * k == pytest.approx(over_network)
    assert ring.hops_between == passes * (shape[0] - 1)
    assert ring.hops_between + ring.hops_within == passes * (k - 1)


@pytest.mark.parametrize(("num_ranks", "per_node"), [(12, 8), (10, 8), (11, 4)])
def test_the_smallest_node_limits_an_exchange(num_ranks, per_node):
    """A rank of the smallest node sends most between nodes, a rank of a full node most within its node. A ring leaves
    the smallest node over its few cards."""
    nodes = [rank // per_node for rank in range(num_ranks)]
    spread = spread_over(RankGroup("tensor", num_ranks), per_node)
    (way,) = two_level("all_to_all", spread)
    assert way.between == pytest.approx(max(sum(other != own for other in nodes) for own in nodes) / num_ranks)
    assert way.within == pytest.approx(max(sum(other == own for other in nodes) - 1 for own in nodes) / num_ranks)
    (ring,) = two_level("all_gather", spread)
    assert ring.between == pytest.approx((num_ranks - 1) / num_ranks / min(nodes.count(node) for node in set(nodes)))


@given(shapes, st.sampled_from(KINDS))
def test_no_algorithm_moves_less_than_it_must(shape, kind):
    """What a node holds of a sum must leave it and the rest come in: S (N-1)/N over its cards, twice for an all-reduce
    (Patarasuk and Yuan 2009, nodes as ranks)."""
    num_nodes, per_node = shape
    if kind == "all_to_all":
        least = per_node * (1 - 1 / num_nodes) / per_node
    else:
        least = (2 if kind == "all_reduce" else 1) * (num_nodes - 1) / num_nodes / per_node
    assert all(way.between >= least * (1 - 1e-9) for way in two_level(kind, on_nodes(*shape)))


@given(shapes, st.integers(1, 8), st.floats(1, 1e9))
def test_copies_of_tokens_go_somewhere(shape, top_k, copy_bytes):
    """Every (token, expert) stays on its rank, its node, or leaves it; a copy for a node is one for several ranks."""
    spread, ffn = on_nodes(*shape), MoEFFN(840, top_k, 64)
    k = spread.num_ranks
    to_ranks = distinct_ranks(ffn, k) * copy_bytes
    ways = {}
    for route in ("expert", "node", "rank"):
        message = Message("all_to_all", to_ranks, k, None, Exchange(ffn, copy_bytes, route))
        (ways[route],) = ways_of(message, spread)
    experts, ranks, nodes = ways["expert"], ways["rank"], ways["node"]
    all_copies = top_k * copy_bytes
    assert (experts.within + experts.between) * to_ranks + all_copies / k == pytest.approx(all_copies)
    assert nodes.between <= ranks.between * (1 + 1e-9)
    assert ranks.between <= experts.between * (1 + 1e-9)


def test_the_faster_route_counts_where_none_is_named():
    spread, ffn = on_nodes(4, 8), MoEFFN(256, 8, 64)
    exchange = Exchange(ffn, 1e6)
    message = Message("all_to_all", 6e6, 32, None, exchange)
    assert {way.name for way in ways_of(message, spread)} == {"to_experts", "to_nodes"}


@given(st.sampled_from([*KINDS, "send_recv"]), sizes, shapes, st.floats(1e9, 1e12))
def test_a_slower_network_and_more_bytes_never_take_less(kind, size, shape, rate):
    spread = (
        on_nodes(*shape) if kind != "send_recv" else spread_over(RankGroup("pipeline", shape[1], shape[0]), shape[1])
    )
    message = Message(kind, size, spread.num_ranks)
    network = NETWORK.model_copy(update={"bandwidth_bytes_per_s": rate})
    now = network_time(message, spread, NVLINK, network)
    assert network_time(Message(kind, 2 * size, spread.num_ranks), spread, NVLINK, network) >= now
    slower = network.model_copy(update={"bandwidth_bytes_per_s": rate / 2})
    later = network.model_copy(update={"latency_s": 2 * network.latency_s})
    assert network_time(message, spread, NVLINK, slower) >= now
    assert network_time(message, spread, NVLINK, later) > now


@given(st.sampled_from(["all_reduce", "all_gather"]), sizes, st.integers(2, 7), st.integers(1, 8))
def test_more_nodes_never_take_less(kind, size, num_nodes, per_node):
    times = [
        network_time(Message(kind, size, spread.num_ranks), spread, NVLINK, NETWORK)
        for spread in (on_nodes(num_nodes, per_node), on_nodes(num_nodes + 1, per_node))
    ]
    assert times[0] <= times[1] * (1 + 1e-9)


@given(st.sampled_from(KINDS), shapes)
def test_a_network_without_limits_leaves_what_a_node_takes(kind, shape):
    """Large messages: no more than one domain of all ranks takes, and no less than the ranks of a node alone."""
    assume(shape[1] > 1)
    spread = on_nodes(*shape)
    free = Link(name="free", bandwidth_bytes_per_s=1e18)
    time = network_time(Message(kind, 1e13, spread.num_ranks), spread, NVLINK, free)
    assert time <= alpha_beta_time(Message(kind, 1e13, spread.num_ranks), NVLINK) * (1 + 1e-3)
    alone = alpha_beta_time(Message(kind, 1e13, shape[1]), NVLINK)
    assert time >= alone * (1 - 1e-3) * (1 if kind != "all_to_all" else 1 / shape[0])


@given(st.sampled_from(KINDS), shapes)
def test_a_slow_network_is_all_that_counts(kind, shape):
    """Bytes over the card, by the least of the algorithms."""
    spread = on_nodes(*shape)
    slow = Link(name="slow", bandwidth_bytes_per_s=1e6)
    least = min(way.between for way in two_level(kind, spread))
    time = network_time(Message(kind, 1e9, spread.num_ranks), spread, NVLINK, slow)
    assert time == pytest.approx(1e9 * least / 1e6, rel=1e-3)


def test_sends_that_stay_on_a_node_pay_no_network():
    """Four stages of four on nodes of eight: one of three sends crosses."""
    message = Message("send_recv", 1e6, 2)
    spread = spread_over(RankGroup("pipeline", 4, 4), 8)
    within = alpha_beta_time(message, NVLINK)
    expected = (2 * within + NETWORK.latency_s + 1e6 / 50e9) / 3
    assert network_time(message, spread, NVLINK, NETWORK) == pytest.approx(expected)

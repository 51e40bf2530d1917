"""What a message between devices of several nodes sends over the scale-up link and over the network, by algorithm.

k ranks on N nodes, M of them at most and m at least on one; S as nccl-tests counts it; bytes that leave the busiest
device over either. All devices of a node talk at once, each over its own share of the network.

    algorithm                  hops within          between         bytes within      between (per network card)
    ring  all-reduce           2 (k - N)            2 (N - 1)       2 S (k-1)/k       2 S (k-1)/k / m
          all-gather,
          reduce-scatter         k - N                N - 1           S (k-1)/k         S (k-1)/k / m
    tree  all-reduce           2 (M - 1)            2 log2 N        2 S (M-1)/M       S/m for N = 2, 2 S/m beyond
    direct  all-to-all         1                    1               S (M-1)/k         S (k-m)/k
    send  crossing             0                    1               0                 S

    to_ranks  all-to-all of experts as any (`Exchange`: S is a copy for each rank with an expert of the token)
    to_experts                 1                    1               T e (M-1)/k       T e (k-m)/k
    to_nodes                   1                    2               S (k-1)/k         T d (N-1)/N

T is one copy of all tokens of a rank, e the experts of a token, d the nodes that they are on, on average.

A ring passes each byte through every device and leaves a node once, over as many cards as the group has devices there.
A tree first reduces within a node, each device its part, then over the network (N nodes as a double binary tree, whose
busiest node sends to its parent and to two children), and gathers within: the hierarchical all-reduce.
Source: NCCL, src/graph/tuning.cc (steps and latencies of rings and trees; all-gather and reduce-scatter have rings
only; trees of two nodes have the bandwidth within a node); Sanders, Speck and Träff 2009 (two trees).
"""

__all__ = ["TwoLevel", "two_level", "ways_of"]

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from perfmodel.ops.messages import Message, Spread, distinct_nodes


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """One algorithm: steps one after another, and bytes per payload byte."""

    name: str  # ring | tree | direct | send | to_experts | to_nodes
    hops_within: int
    hops_between: int
    within: float
    between: float


@lru_cache(maxsize=4096)
def two_level(kind: str, spread: Spread) -> tuple[TwoLevel, ...]:
    """The algorithms that a library chooses among for messages of `kind` in a group on several nodes."""
    k, num_nodes, most, least = spread.num_ranks, spread.num_nodes, spread.most, spread.least
    if kind == "send_recv":
        return (TwoLevel("send", 0, 1, 0.0, 1.0),)
    if kind == "all_to_all":
        return (TwoLevel("direct", int(most > 1), 1, (most - 1) / k, (k - least) / k),)
    passes = 2 if kind == "all_reduce" else 1
    wire = passes * (k - 1) / k
    ring = TwoLevel("ring", passes * (k - num_nodes), passes * (num_nodes - 1), wire, wire / least)
    if kind != "all_reduce":
        return (ring,)
    crossings = (1 if num_nodes == 2 else 2) / least
    tree = TwoLevel("tree", 2 * (most - 1), 2 * ceil(log2(num_nodes)), 2 * (most - 1) / most, crossings)
    return ring, tree


def ways_of(message: Message, spread: Spread) -> tuple[TwoLevel, ...]:
    """The algorithms for `message`, whose group is on several nodes: of an exchange by its route, else any."""
    exchange = message.exchange
    direct = two_level(message.kind, spread)
    if exchange is None or exchange.route == "rank" or not message.bytes_:
        return direct
    one, k, num_nodes = exchange.copy_bytes / message.bytes_, spread.num_ranks, spread.num_nodes
    found = []
    if exchange.route in (None, "expert"):
        each = one * exchange.ffn.top_k
        found.append(TwoLevel("to_experts", 1, 1, each * direct[0].within, each * direct[0].between))
    if exchange.route in (None, "node"):
        once = min(one * distinct_nodes(exchange.ffn, num_nodes), 1.0) * (num_nodes - 1) / num_nodes
        found.append(TwoLevel("to_nodes", 1, 2, (k - 1) / k, once))
    return tuple(found)

"""Links of messages, and the alpha-beta time of each collective algorithm.

Between nodes: k ranks on N nodes, at most M and at least m per node; S as in nccl-tests; bytes leaving the busiest
device over the scale-up link and over the network. All devices of a node send at once, each over its share.

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

T is one copy of all tokens of a rank, e the experts of a token, d the nodes that they are on, on average. Copies for
ranks and experts are those of the rank that receives most, where `Exchange` knows it.

A ring passes each byte through every device and leaves a node once, over as many cards as the group has devices there.
A tree first reduces within a node, each device its part, then over the network (N nodes as a double binary tree, whose
busiest node sends to its parent and to two children), and gathers within: the hierarchical all-reduce.
Source: NCCL, src/graph/tuning.cc (steps and latencies of rings and trees; all-gather and reduce-scatter have rings
only; trees of two nodes have the bandwidth within a node); Sanders, Speck and Träff 2009 (two trees)."""

from functools import lru_cache
from math import ceil, inf, log2
from typing import NamedTuple

from perfmodel.cost.kernel_models.device import DEFAULT_LINK
from perfmodel.cost.kernel_models.overheads import load_overheads
from perfmodel.ops.messages import Message, RankGroup, Spread, distinct_nodes, spread_over
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.networks import Link

# Least seconds per step of an algorithm: a flag seen and answered, not just a packet on the wire. One NVLink hop of
# NCCL's low-latency protocol takes 0.8-1.0 us on A100 and H100 (fits to nccl-tests) [assumed of other links].
_DEFAULT_HOP_S = 1e-6
_MAX_RANKS_OVER_PCIE = 2  # vLLM's custom_all_reduce.py: kernels of its own serve more only where NVLink connects all


def link_for(hardware: HardwareSpec, group: int | RankGroup) -> Link:
    """The slowest link of a group, or of a number of neighbours: the scale-up link within a node, else the network."""
    return hardware.network_link if path_of(hardware, group).num_nodes > 1 else hardware.scale_up_link or DEFAULT_LINK


def path_of(hardware: HardwareSpec, group: int | RankGroup) -> Spread:
    """The spread of a group, or of a number of neighbours, over nodes of `hardware`."""
    ranks = RankGroup("tensor", group) if isinstance(group, int) else group
    return spread_over(ranks, hardware.devices_per_node)


def alpha_beta_time(message: Message, link: Link, bandwidth_fraction: float = 1.0) -> float:
    """Seconds on the wire for a message of S bytes between k ranks, hop latency a, one-way bandwidth W per rank.

        all_reduce      min( ring 2 (k-1) (a + S / (k W)),  one-shot a + (k-1) S / W )
        all_gather, reduce_scatter, all_to_all   min( (k-1) (a + S / (k W)),  a + (k-1) S / (k W) )
        send_recv       a + S / W

    One-shot: every rank reads all others' buffers at once, as engines' own kernels do up to
    `most_ranks_of_own_kernels`. The launch is not included.
    Source: Thakur et al. 2005 (ring, alpha-beta); vLLM's and TensorRT-LLM's custom all-reduce (one-shot)."""
    k, payload = message.num_ranks, message.bytes_
    if k <= 1:
        return 0.0
    hop = _hop_s(link)
    wire = payload / (link.bandwidth_bytes_per_s * bandwidth_fraction)
    if message.kind == "all_reduce":
        ring = 2 * (k - 1) * (hop + wire / k)
        return min(ring, hop + (k - 1) * wire) if k <= most_ranks_of_own_kernels(link) else ring
    return hop + wire if message.kind == "send_recv" else hop + (k - 1) * wire / k


def network_time(message: Message, spread: Spread, link: Link, network: Link, bandwidth_fraction: float = 1.0) -> float:
    """Wire seconds of a group on several nodes, by its fastest algorithm (`ways_of`):

        hops within a + hops between b + max( bytes within / W, bytes between / V )

    a, b: hop latencies, W, V: one-way bandwidths of the scale-up `link` and of a device's share of the `network`, which
    overlap. A pipeline's sends within a node cost what they do there. message: the payload; spread: of its group;
    bandwidth_fraction: reached of both bandwidths"""
    rate, network_rate = link.bandwidth_bytes_per_s * bandwidth_fraction, network.bandwidth_bytes_per_s
    network_rate *= bandwidth_fraction
    times = [
        item.hops_within * _hop_s(link)
        + item.hops_between * network.latency_s
        + message.bytes_ * max(item.within / rate, item.between / network_rate)
        for item in ways_of(message, spread)
    ]
    if message.kind != "send_recv":
        return min(times)
    return spread.crossing * times[0] + (1 - spread.crossing) * alpha_beta_time(message, link, bandwidth_fraction)


def most_ranks_of_own_kernels(link: Link) -> float:
    """Most devices whose peer memory an engine's own kernels read over `link`."""
    return inf if link.name != "pcie" else 1 if link.peer_to_peer is False else _MAX_RANKS_OVER_PCIE


def _hop_s(link: Link) -> float:
    if link.name != "pcie":
        return max(link.latency_s, _DEFAULT_HOP_S)
    pcie = load_overheads().over_pcie
    return max(link.latency_s, pcie.hop_through_host_s if link.peer_to_peer is False else pcie.hop_s)


class TwoLevel(NamedTuple):
    """One algorithm: consecutive hops, and bytes per payload byte."""

    name: str  # ring | tree | direct | send | to_experts | to_nodes
    hops_within: int
    hops_between: int
    within: float
    between: float


@lru_cache(maxsize=4096)
def two_level(kind: str, spread: Spread) -> tuple[TwoLevel, ...]:
    """A library's algorithms for messages of `kind` in a group on several nodes."""
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
    return ring, TwoLevel("tree", 2 * (most - 1), 2 * ceil(log2(num_nodes)), 2 * (most - 1) / most, crossings)


def ways_of(message: Message, spread: Spread) -> tuple[TwoLevel, ...]:
    """The algorithms for `message` between nodes: by route for an exchange, else any."""
    exchange = message.exchange
    direct = two_level(message.kind, spread)
    if exchange is None or exchange.route == "rank" or not message.bytes_:
        return direct
    one, k, num_nodes = exchange.copy_bytes / message.bytes_, spread.num_ranks, spread.num_nodes
    ways = []
    if exchange.route in (None, "expert"):
        item = one * exchange.ffn.top_k * exchange.busiest
        ways.append(TwoLevel("to_experts", 1, 1, item * direct[0].within, item * direct[0].between))
    if exchange.route in (None, "node"):
        once = min(one * distinct_nodes(exchange.ffn, num_nodes), 1.0) * (num_nodes - 1) / num_nodes
        ways.append(TwoLevel("to_nodes", 1, 2, exchange.busiest * (k - 1) / k, once))
    return tuple(ways)

"""Messages: groups of ranks, their spread over nodes, and copies of tokens for their experts.

Ranks are numbered as in vLLM: tensor-parallel ranks are neighbours, then come pipeline stages, then data-parallel
ranks. Rank r is on node r // (devices of a node), the first rank on the first device of a node.
Source: vLLM, vllm/distributed/parallel_state.py, initialize_model_parallel: "the layout order is: ExternalDP x DP x PP
x TP", arange(world).reshape(dp, pp, tp); expert-parallel groups are dp x tp ranks of one stage."""

from functools import lru_cache
from math import comb
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.models.architecture import MoEFFN

RankAxis = Literal["tensor", "context", "pipeline", "data", "expert"]


class RankGroup(NamedTuple):
    """The groups along one axis of tp x pp x dp ranks.

    tensor:   tp ranks each, which share out heads and columns; data: dp ranks of equal place
    context:  dcp neighbours of a tensor-parallel group, which share out the tokens of their KV heads
    expert:   all tp * dp ranks of a stage, which share out experts, whole or by columns
    pipeline: a rank and its peer in the next stage; `stage`: only of this one"""

    axis: RankAxis
    tp: int
    pp: int = 1
    dp: int = 1
    stage: int | None = None
    dcp: int = 1

    @property
    def num_ranks(self) -> int:
        sizes = {"tensor": self.tp, "context": self.dcp, "pipeline": min(self.pp, 2), "data": self.dp}
        return sizes.get(self.axis, self.tp * self.dp)

    @property
    def num_devices(self) -> int:
        """Ranks of the whole replica."""
        return self.tp * self.pp * self.dp

    def members(self) -> NDArray[Any]:
        ranks = np.arange(self.num_devices).reshape(self.dp, self.pp, self.tp)
        if self.axis in ("tensor", "context"):
            return ranks.reshape(-1, self.num_ranks)
        if self.axis == "data":
            return np.moveaxis(ranks, 0, -1).reshape(-1, self.dp)
        if self.axis == "expert":
            return np.moveaxis(ranks, 1, 0).reshape(self.pp, -1)
        first = range(self.pp - 1) if self.stage is None else (self.stage,)
        pairs = [np.stack((ranks[:, i].ravel(), ranks[:, i + 1].ravel()), axis=-1) for i in first]
        return np.concatenate(pairs) if pairs else np.zeros((1, 1), dtype=np.int64)


class Spread(NamedTuple):
    """The spread over nodes of the group with most messages between nodes.

    most, least: ranks of it on one node
    crossing:    share of the axis' groups on several nodes (pipeline: of the sends)"""

    num_ranks: int
    num_nodes: int
    most: int
    least: int
    crossing: float


@lru_cache(maxsize=4096)
def spread_over(group: RankGroup, devices_per_node: int) -> Spread:
    """How `group` is spread over nodes of `devices_per_node`."""
    k = group.num_ranks
    if group.num_devices <= devices_per_node:
        return Spread(k, 1, k, k, 0.0)
    nodes = group.members() // devices_per_node
    counts = [np.unique(row, return_counts=True)[1] for row in np.unique(nodes, axis=0)]
    worst = max(counts, key=lambda on_each: (len(on_each), -int(on_each.min())))
    is_split = (nodes != nodes[:, :1]).any(axis=1)
    return Spread(k, len(worst), int(worst.max()), int(worst.min()), float(is_split.mean()))


Route = Literal["node", "rank", "expert"]
NORMAL_UNITS = 20  # compute units that DeepEP's normal kernels run on (deep_ep/buffer.py, Buffer.num_sms)


class Exchange(NamedTuple):
    """Composition of a dispatch or combine.

    copy_bytes: all tokens of a rank, once
    route:      one copy of a token per "node" with an expert of it (forwarded over the scale-up link), per "rank", or
                per "expert"; None: the faster of the first and the last
    busiest:    copies of the rank that receives most over the mean"""

    ffn: MoEFFN
    copy_bytes: float
    route: Route | None = None
    busiest: float = 1.0


class Message(NamedTuple):
    """A collective or point-to-point transfer of `bytes_` payload on each participating rank.

    group:    None: neighbours from the first rank on
    exchange: of an all-to-all of expert parallelism"""

    kind: str  # all_reduce | all_gather | reduce_scatter | all_to_all | send_recv
    bytes_: float
    num_ranks: int
    group: RankGroup | None = None
    exchange: Exchange | None = None


def distinct_ranks(ffn: MoEFFN, num_ranks: int) -> float:
    """Expected distinct ranks that hold a token's k experts, when each holds E/R.

        R (1 - C(E - E/R, k) / C(E, k))

    With group-limited routing the token reaches only top_k_groups / num_groups of experts and ranks.
    Source: inclusion of a rank, hypergeometric."""
    fraction = ffn.top_k_groups / ffn.num_groups
    return _distinct(ffn, max(1.0, num_ranks * fraction), ffn.num_experts * fraction)


def distinct_nodes(ffn: MoEFFN, num_nodes: int) -> float:
    """Expected distinct nodes that hold a token's k experts.

    As for ranks, but a node may hold several of the G groups, of which a token reaches t. With g = G / N groups per
    node, a node is missed with the mean of C(E t / G - j E / G, k) / C(E t / G, k) over j, the number of its groups
    among the t, hypergeometric as well. If nodes split groups: the upper bound."""
    groups, chosen = ffn.num_groups, ffn.top_k_groups
    if chosen == groups:
        return _distinct(ffn, float(num_nodes), float(ffn.num_experts))
    if groups % num_nodes:
        return distinct_ranks(ffn, num_nodes) if num_nodes > groups else float(min(num_nodes, ffn.top_k))
    own, size = groups // num_nodes, ffn.num_experts / groups
    missed = 0.0
    for j in range(min(own, chosen) + 1):
        chance = comb(own, j) * comb(groups - own, chosen - j) / comb(groups, chosen)
        missed += chance * _missed(ffn, size * chosen, size * j)
    return num_nodes * (1.0 - missed)


def _distinct(ffn: MoEFFN, parts: float, reachable: float) -> float:
    return parts * (1.0 - _missed(ffn, reachable, reachable / parts))


def _missed(ffn: MoEFFN, reachable: float, local: float) -> float:
    """P(none of k among `reachable` experts is one of `local`)."""
    missed = 1.0
    for i in range(min(ffn.top_k, ffn.num_experts)):
        missed *= max(0.0, (reachable - local - i) / (reachable - i))
    return missed

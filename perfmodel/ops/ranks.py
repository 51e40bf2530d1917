"""`RankGroup`: which devices of a replica talk to each other, and how a group of them is spread over nodes.

Ranks are numbered as vLLM does it: those of a tensor-parallel group are neighbours, then come pipeline stages, then
data-parallel ranks. Rank r is on node r // (devices of a node), the first rank on the first device of a node.
Source: vLLM, vllm/distributed/parallel_state.py, initialize_model_parallel: "the layout order is: ExternalDP x DP x PP
x TP", arange(world).reshape(dp, pp, tp); expert-parallel groups are dp x tp ranks of one stage.
"""

__all__ = ["RankGroup", "Spread", "spread_over"]

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The groups along one axis of tp x pp x dp ranks.

    tensor:   tp ranks each; data: dp ranks of equal place; expert: tp * dp ranks of a stage
    pipeline: the rank of a stage and its like in the next; `stage`: of this one only, of all alike unless given
    """

    axis: Literal["tensor", "pipeline", "data", "expert"]
    tp: int
    pp: int = 1
    dp: int = 1
    stage: int | None = None

    @property
    def num_ranks(self) -> int:
        """Of one group."""
        sizes = {"tensor": self.tp, "pipeline": min(self.pp, 2), "data": self.dp, "expert": self.tp * self.dp}
        return sizes[self.axis]

    @property
    def num_devices(self) -> int:
        """Of the whole replica."""
        return self.tp * self.pp * self.dp

    def members(self) -> NDArray[Any]:
        """(groups, ranks of each)"""
        ranks = np.arange(self.num_devices).reshape(self.dp, self.pp, self.tp)
        if self.axis == "tensor":
            return ranks.reshape(-1, self.tp)
        if self.axis == "data":
            return np.moveaxis(ranks, 0, -1).reshape(-1, self.dp)
        if self.axis == "expert":
            return np.moveaxis(ranks, 1, 0).reshape(self.pp, -1)
        first = range(self.pp - 1) if self.stage is None else (self.stage,)
        pairs = [np.stack((ranks[:, i].ravel(), ranks[:, i + 1].ravel()), axis=-1) for i in first]
        return np.concatenate(pairs) if pairs else np.zeros((1, 1), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Spread:
    """A group over nodes: the group that most of its messages leave the node for.

    most, least: of its ranks on one node
    crossing:    share of the axis' groups that are on several nodes (of a pipeline's sends, those that cross)
    """

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

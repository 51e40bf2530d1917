"""Whole experts on their ranks: which a rank holds, and which rows of a step it multiplies. Ranks of a tensor-parallel
group have all tokens and choose alike; each multiplies the rows of its own experts, and sums are added up. Data-
parallel ranks have tokens of their own and send them (`exchanged`, `perfmodel_executors.parallel.group`). Where experts
are placed, and how their copies share tokens, is the cost model's rule (`perfmodel.ops.routing`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.routing import Placement, Values, consecutive_experts, place_experts, popularity_of
from perfmodel.specs.traffic import ExpertRouting


def layer_chances(routing: ExpertRouting, ffn: MoEFFN, index: int) -> Values:
    """How likely each expert of layer `index` is among a token's, as the simulator draws it: a draw for each layer."""
    draws = popularity_of(routing)(ffn.num_experts, ffn.top_k)
    draw: Values = draws[index % len(draws)]
    return draw


class ExpertSharing(NamedTuple):
    """routing: how popular experts are; num_redundant: copies of popular ones, placed by that; None: one of each"""

    routing: ExpertRouting
    num_redundant: int | None = None

    def placement(self, ffn: MoEFFN, index: int, num_ranks: int) -> Placement:
        if self.num_redundant is None:
            return consecutive_experts(ffn.num_experts, num_ranks)
        return place_experts(layer_chances(self.routing, ffn, index), num_ranks, self.num_redundant)


class LocalExperts(NamedTuple):
    """The experts that `rank` holds, by slot, and where all are. ranks_EM, slots_EM: rank and slot there of each
    expert's copy that takes every M-th of its rows, -1: there are fewer; copies_E: how many copies of each."""

    rank: int
    held: tuple[int, ...]
    ranks_EM: Tensor
    slots_EM: Tensor
    copies_E: Tensor

    @classmethod
    def of(cls, placement: Placement, rank: int, device: torch.device) -> "LocalExperts":
        copies = placement.copies
        ranks_EM = torch.full((len(copies), int(copies.max())), -1)
        slots_EM = ranks_EM.clone()
        by_rank = [[int(expert) for expert in row if expert >= 0] for row in placement.expert]
        for holder, experts in enumerate(by_rank):
            for slot, expert in enumerate(experts):
                # Of n rows, copy c of m gets (n + c) // m: those whose number leaves m - 1 - c when divided by m.
                place = copies[expert] - 1 - placement.copy[holder, slot]
                ranks_EM[expert, place], slots_EM[expert, place] = holder, slot
        moved = (ranks_EM.to(device), slots_EM.to(device), torch.from_numpy(copies).to(device))
        return cls(rank, tuple(by_rank[rank]), *moved)

    def homes(self, experts_TX: Tensor) -> tuple[Tensor, Tensor]:
        """Rank and slot, [T, top_k] each, where every row is multiplied."""
        experts_A = experts_TX.flatten()
        turns_A = torch.zeros_like(experts_A)
        if self.slots_EM.shape[1] > 1:
            # A row's number among those of its expert, modulo the expert's copies.
            order_A, counts_E = experts_A.argsort(stable=True), experts_A.bincount(minlength=len(self.copies_E))
            starts_A = (counts_E.cumsum(0) - counts_E)[experts_A[order_A]]
            turns_A[order_A] = torch.arange(len(order_A), device=order_A.device) - starts_A
            turns_A %= self.copies_E[experts_A]
        ranks_A, slots_A = self.ranks_EM[experts_A, turns_A], self.slots_EM[experts_A, turns_A]
        return ranks_A.view(experts_TX.shape), slots_A.view(experts_TX.shape)

    def slots(self, experts_TX: Tensor) -> Tensor:
        """[T, top_k]: the slot of each row that is multiplied here, -1 of others."""
        ranks_TX, slots_TX = self.homes(experts_TX)
        return torch.where(ranks_TX == self.rank, slots_TX, -1)

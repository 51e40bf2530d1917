"""Whole experts on their ranks: which a rank holds, which rows of a step it multiplies, and how they come there. Ranks
of a tensor-parallel group have all tokens and choose alike; each multiplies the rows of its own experts, and sums are
added up. Data-parallel ranks have tokens of their own and send them: dispatch, experts, combine. Where experts are
placed, and how their copies share tokens, is the cost model's rule (`perfmodel.ops.routing`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
    """routing: how popular experts are; num_redundant: copies of popular experts, all placed by how popular they are;
    None: consecutive experts, one of each"""

    routing: ExpertRouting
    num_redundant: int | None = None

    def placement(self, ffn: MoEFFN, index: int, num_ranks: int) -> Placement:
        if self.num_redundant is None:
            return consecutive_experts(ffn.num_experts, num_ranks)
        return place_experts(layer_chances(self.routing, ffn, index), num_ranks, self.num_redundant)


@dataclass(frozen=True, slots=True)
class LocalExperts:
    """The experts that `rank` holds, by slot, and where all are. ranks_EM, slots_EM: rank and slot there of each
    expert's copy that takes every M-th of its rows, -1: there are fewer; copies_E: how many copies of each there
    are."""

    rank: int
    held: tuple[int, ...]
    ranks_EM: Tensor  # noqa: N815
    slots_EM: Tensor  # noqa: N815
    copies_E: Tensor  # noqa: N815

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
            turns_A = _numbers(experts_A, len(self.copies_E)) % self.copies_E[experts_A]
        ranks_A, slots_A = self.ranks_EM[experts_A, turns_A], self.slots_EM[experts_A, turns_A]
        return ranks_A.view(experts_TX.shape), slots_A.view(experts_TX.shape)

    def slots(self, experts_TX: Tensor) -> Tensor:
        """[T, top_k]: the slot of each row that is multiplied here, -1 of others."""
        ranks_TX, slots_TX = self.homes(experts_TX)
        return torch.where(ranks_TX == self.rank, slots_TX, -1)


def _numbers(experts_A: Tensor, num_experts: int) -> Tensor:
    order_A = torch.argsort(experts_A, stable=True)
    ends_E = torch.bincount(experts_A, minlength=num_experts).cumsum(0)
    starts_E = torch.cat((ends_E.new_zeros(1), ends_E[:-1]))
    numbers_A = torch.empty_like(order_A)
    numbers_A[order_A] = torch.arange(len(order_A), device=order_A.device) - starts_E[experts_A[order_A]]
    return numbers_A


class Exchanging(Protocol):
    """Ranks that send rows to one another."""

    @property
    def num_expert_ranks(self) -> int: ...

    def exchange(self, rows_SB: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """counts: how many of the rows go to each rank, in order; what comes, and how many from each."""


def exchanged(
    group: Exchanging,
    local: LocalExperts,
    x_TC: Tensor,
    routing: tuple[Tensor, Tensor],
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """[T, C]: what the experts of all ranks add to this rank's tokens. A token goes once to each rank that has one of
    its experts, with their slots and weights; one sum comes back. multiply: what rows get of the experts of their slots
    here (-1: none), by weight."""
    weights_TX, experts_TX = routing
    ranks_TX, slots_TX = local.homes(experts_TX)
    parts = [torch.nonzero((ranks_TX == rank).any(dim=1)).flatten() for rank in range(group.num_expert_ranks)]
    counts, tokens_S = [len(part) for part in parts], torch.cat(parts)
    ranks_S = torch.repeat_interleave(torch.tensor(counts, device=x_TC.device))
    slots_SX = torch.where(ranks_TX[tokens_S] == ranks_S[:, None], slots_TX[tokens_S], -1)
    columns = (x_TC[tokens_S], weights_TX[tokens_S].float(), slots_SX.int())
    sizes = [column.shape[1] * column.element_size() for column in columns]
    arrived_RB, came = group.exchange(torch.cat([column.view(torch.uint8) for column in columns], dim=1), counts)
    x_RC, weights_RX, slots_RX = (
        part.contiguous().view(column.dtype)
        for part, column in zip(torch.split(arrived_RB, sizes, dim=1), columns, strict=True)
    )
    y_SC, _ = group.exchange(multiply(x_RC, weights_RX, slots_RX.long()), came)
    return torch.zeros_like(x_TC).index_add_(0, tokens_S, y_SC)

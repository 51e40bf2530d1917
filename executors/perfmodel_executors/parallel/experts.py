"""Whole experts on their ranks: which a rank holds, and which rows of a step it multiplies. All ranks have all tokens
and choose alike; each multiplies the rows of its own experts, and sums are added up. Where experts are placed, and how
their copies share tokens, is the cost model's rule (`perfmodel.ops.routing`)."""

from dataclasses import dataclass
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
    """The experts that a rank holds, by slot. slots_EM: the slot of each expert's copy that takes every M-th of its
    rows, -1: on another rank; copies_E: how many copies of each expert there are."""

    held: tuple[int, ...]
    slots_EM: Tensor  # noqa: N815
    copies_E: Tensor  # noqa: N815

    @classmethod
    def of(cls, placement: Placement, rank: int, device: torch.device) -> "LocalExperts":
        experts, copies = placement.expert[rank], placement.copies
        held = [int(expert) for expert in experts if expert >= 0]
        slots_EM = torch.full((len(copies), int(copies.max())), -1)
        for slot, expert in enumerate(held):
            # Of n rows, copy c of m gets (n + c) // m: those whose number leaves m - 1 - c when divided by m.
            slots_EM[expert, copies[expert] - 1 - placement.copy[rank, slot]] = slot
        return cls(tuple(held), slots_EM.to(device), torch.from_numpy(copies).to(device))

    def rows(self, weights_TX: Tensor, experts_TX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token [A], weight [A, 1] and slot [A, 1] of each row that is multiplied here."""
        experts_A = experts_TX.flatten()
        if self.slots_EM.shape[1] == 1:
            slots_A = self.slots_EM[experts_A, 0]
        else:
            slots_A = self.slots_EM[experts_A, _numbers(experts_A, len(self.copies_E)) % self.copies_E[experts_A]]
        kept_A = torch.nonzero(slots_A >= 0).flatten()
        tokens_A = torch.div(kept_A, experts_TX.shape[1], rounding_mode="floor")
        return tokens_A, weights_TX.flatten()[kept_A, None], slots_A[kept_A, None]


def _numbers(experts_A: Tensor, num_experts: int) -> Tensor:
    order_A = torch.argsort(experts_A, stable=True)
    ends_E = torch.bincount(experts_A, minlength=num_experts).cumsum(0)
    starts_E = torch.cat((ends_E.new_zeros(1), ends_E[:-1]))
    numbers_A = torch.empty_like(order_A)
    numbers_A[order_A] = torch.arange(len(order_A), device=order_A.device) - starts_E[experts_A[order_A]]
    return numbers_A

"""The second tier of an engine's KV blocks as its scenario has it, for both clocks: room, costs, when copies pay."""

__all__ = ["SecondTier", "copied", "second_tier"]

from collections.abc import Sequence
from typing import NamedTuple

from perfmodel.cost import StepCosts
from perfmodel.cost.memory.offload import RestoreCost, least_restored_tokens, restore_cost
from perfmodel.engine import HostBlocks, HostCopies
from perfmodel.specs.scenario import Scenario


class SecondTier(NamedTuple):
    """capacity: in blocks; least_tokens: fewer are computed again; cost: of copies on one device's link"""

    capacity: int
    least_tokens: int
    cost: RestoreCost

    def blocks(self, has_tensors: bool = False) -> HostBlocks:
        """An empty one; with tensors, plans say which blocks are copied where."""
        copies = HostCopies() if has_tensors else None
        return HostBlocks(self.capacity, self.least_tokens, self.cost.is_awaited, copies)


def second_tier(scenario: Scenario, costs: StepCosts) -> SecondTier | None:
    """That of each engine of `scenario`, whose steps take `costs`; None where it has none."""
    offload = scenario.engine.kv_offload
    if offload is None:
        return None
    cost = restore_cost(scenario, offload, costs.graph)
    capacity = int(offload.capacity_bytes // cost.block_bytes) if cost.block_bytes else 0
    return SecondTier(capacity, least_restored_tokens(scenario, offload, costs.graph, costs.timer), cost)


def copied(tiers: Sequence[tuple[HostBlocks, float]]) -> dict[str, float]:
    """Blocks that went to these tiers and came back, and their bytes; beside each tier, bytes of a block."""
    return {
        "stored_blocks": sum([host.num_stored for host, _ in tiers]),
        "restored_blocks": sum([host.num_restored for host, _ in tiers]),
        "restored_tokens": sum([host.num_restored_tokens for host, _ in tiers]),
        "stored_bytes": sum([host.num_stored * size for host, size in tiers]),
        "restored_bytes": sum([host.num_restored * size for host, size in tiers]),
    }

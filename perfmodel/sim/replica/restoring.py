"""What KV that comes back from a second tier adds to a simulated step."""

__all__ = ["restoring"]

from perfmodel.cost.offload import RestoreCost
from perfmodel.engine import StepPlan
from perfmodel.sim.clock import TICKS_PER_S, to_ticks


def restoring(plan: StepPlan, duration: int, cost: RestoreCost | None) -> int:
    """Ticks by which `plan`, which takes `duration` without, takes longer."""
    if cost is None or not plan.num_restored_tokens:
        return 0
    return to_ticks(cost.added_s(duration / TICKS_PER_S, plan.num_restored_tokens, plan.num_restored_blocks))

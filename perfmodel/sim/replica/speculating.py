"""`SpeculatingBackend`: the cost model of steps that draft and verify, with acceptance drawn."""

__all__ = ["SpeculatingBackend", "num_drafting"]

from collections.abc import Sequence
from itertools import accumulate

from perfmodel.cost import SpeculationTimer
from perfmodel.cost.offload import RestoreCost
from perfmodel.engine import Outcome, StepPlan
from perfmodel.sim.replica.acceptance import SimulatedAcceptance
from perfmodel.sim.replica.prompt_time import PromptTime, others
from perfmodel.sim.replica.restoring import restoring


class SpeculatingBackend:
    """Asks `timer` how long a plan takes, and `acceptance` which of its drafted tokens are right.

    restore: what KV that comes back from a second tier adds
    ahead: pipelined: how deep the drafter goes in a step, for every request that decodes
    is_split: whether `prompt_time` counts what prompts cost
    """

    def __init__(
        self,
        timer: SpeculationTimer,
        acceptance: SimulatedAcceptance,
        ahead: int | None = None,
        is_split: bool = False,
    ) -> None:
        self._timer = timer
        self._acceptance = acceptance
        self._ahead = ahead
        self.restore: RestoreCost | None = None
        self._fresh = timer.fresh()
        self.prompt_time = PromptTime(self._apart if is_split else None)

    def execute(self, plan: StepPlan) -> Outcome:
        num_decodes = len(plan.decodes)
        duration = self._timer.step(
            plan.num_chunk_tokens,
            len(plan.samples),
            plan.chunk_lengths if plan.chunks else (),
            num_decodes,
            plan.decode_context,
            plan.decode_windowed,
            plan.group_tokens,
            self._drafting(plan),
            plan.num_draft_tokens,
        )
        duration += restoring(plan, duration, self.restore)
        self.prompt_time.add(plan, duration)
        return Outcome(duration, None, self._acceptance.judge(plan))

    def _apart(self, plan: StepPlan) -> tuple[int, int]:
        step, tokens, num_decodes = self._fresh.step, plan.num_chunk_tokens, len(plan.decodes)
        group = others(plan, num_decodes + plan.num_draft_tokens)
        prompts = step(tokens, len(plan.samples), plan.chunk_lengths, 0, 0, (), group)
        context, windowed, group = plan.decode_context, plan.decode_windowed, others(plan, tokens)
        drafting, drafted = self._drafting(plan), plan.num_draft_tokens
        return prompts, step(0, 0, (), num_decodes, context, windowed, group, drafting, drafted)

    def _drafting(self, plan: StepPlan) -> Sequence[int]:
        if not plan.draft_depths:
            return ()
        if self._ahead is not None:
            return (len(plan.decodes),) * self._ahead
        return num_drafting(plan.draft_depths)


def num_drafting(depths: Sequence[int]) -> tuple[int, ...]:
    """How many of `depths` are at least 1, 2 ... up to the deepest."""
    deepest = max(depths)
    if len(depths) * deepest == sum(depths):
        return (len(depths),) * deepest
    exactly = [0] * (deepest + 1)
    for depth in depths:
        exactly[depth] += 1
    return tuple(reversed(list(accumulate(reversed(exactly[1:])))))

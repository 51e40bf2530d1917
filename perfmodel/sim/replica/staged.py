"""`PipelinedBackend`: asks the cost model how long a plan takes in each pipeline stage."""

__all__ = ["PipelinedBackend"]

from dataclasses import replace

from perfmodel.cost.offload import RestoreCost
from perfmodel.cost.pipeline_timer import PipelineTimer, StageTicks
from perfmodel.engine import Outcome, StepPlan
from perfmodel.sim.replica.prompt_time import PromptTime, others
from perfmodel.sim.replica.restoring import restoring


class PipelinedBackend:
    """As `SimulatedBackend`, for several stages.

    KV that comes back from a second tier is fetched by all stages side by side, from when the plan is made: what the
    first stage waits for is there for the others when the plan comes to them.
    """

    def __init__(self, timer: PipelineTimer, is_split: bool = False) -> None:
        self.timer = timer
        self.restore: RestoreCost | None = None
        self._fresh = timer.fresh()
        self.prompt_time = PromptTime(self._apart if is_split else None)

    @property
    def num_stages(self) -> int:
        return self.timer.num_stages

    def execute(self, plan: StepPlan) -> Outcome:
        """Duration of a plan with no other under way."""
        serial, hidden, stages = self.pass_through(plan)
        return Outcome(serial + max(hidden, sum(stages)))

    def pass_through(self, plan: StepPlan) -> StageTicks:
        num_decodes = len(plan.decodes)
        times = self.timer.stage_times(
            num_decodes + plan.num_chunk_tokens,
            num_decodes + len(plan.samples),
            plan.chunk_lengths if plan.chunks else (),
            num_decodes,
            plan.decode_context,
            plan.decode_windowed,
            plan.group_tokens,
        )
        if self.restore is not None and plan.num_restored_tokens:
            cost = replace(self.restore, layers=self.restore.layers // self.num_stages)
            first, *rest = times.stages
            times = times._replace(stages=(first + restoring(plan, first, cost), *rest))
        self.prompt_time.add(plan, sum(times.stages))
        return times

    def _apart(self, plan: StepPlan) -> tuple[int, int]:
        of, tokens, num_decodes = self._fresh.stage_times, plan.num_chunk_tokens, len(plan.decodes)
        group = others(plan, num_decodes)
        prompts = of(tokens, len(plan.samples), plan.chunk_lengths, 0, 0, (), group)
        context, windowed = plan.decode_context, plan.decode_windowed
        decodes = of(num_decodes, num_decodes, (), num_decodes, context, windowed, others(plan, tokens))
        return sum(prompts.stages), sum(decodes.stages)

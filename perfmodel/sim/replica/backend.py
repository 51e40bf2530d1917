"""`SimulatedBackend`: times plans by the cost model and draws accepted drafts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from perfmodel.cost import StagedCostModel, StageTicks, StepCostModel
from perfmodel.cost.memory.adapters import AdapterLoad
from perfmodel.cost.memory.offload import RestoreCost
from perfmodel.cost.steps.curve import DecodeRun
from perfmodel.engine import Outcome, StepPlan
from perfmodel.ops.work import BatchShape
from perfmodel.sim.clock import TICKS_PER_S, to_ticks
from perfmodel.sim.replica.acceptance import SimulatedAcceptance

Apart = Callable[[BatchShape], tuple[int, int]]
_MAX_PARTS = 20_000  # step sizes
_new = tuple.__new__  # named tuple constructors are Python functions, three times as slow


class PromptTime:
    """Ticks of a pool's steps and prompts' part of them, which splits the bill.

    A mixed step is shared in proportion to its prompts and its decodes priced as steps of their own; shared costs
    (weights, launches, host) count on both sides. Shares are cached by rounded step sizes. Tokens recomputed after a
    preemption count as prompts. Idle cost follows busy time.

    Of prompts' part, cached tokens have what prompts alone would be faster by if no cached token were read, and copies
    from the second tier.

    apart: (prompts alone, decodes alone) of a step in ticks; None: nothing is counted"""

    __slots__ = ("_apart", "_cached_parts", "_cached_ticks", "_parts", "_prompt_ticks", "_ticks")

    def __init__(self, apart: Apart | None) -> None:
        self._apart = apart
        self._parts: dict[tuple[int, ...], tuple[int, int]] = {}  # results of `apart` by rounded step sizes
        self._cached_parts: dict[tuple[int, ...], float] = {}  # cached tokens' share of prompts, likewise
        self._ticks = self._prompt_ticks = 0
        self._cached_ticks = 0.0

    @property
    def share(self) -> float | None:
        """Prompts' share of step time; None before the first step, or without `apart`."""
        return self._prompt_ticks / self._ticks if self._ticks else None

    @property
    def cached_share(self) -> float:
        """Cached prompt tokens' share of step time, a part of `share`; 0 before the first step."""
        return self._cached_ticks / self._ticks if self._ticks else 0.0

    def add(self, shape: BatchShape, duration: int, cached: Sequence[int] = (), restoring: int = 0) -> None:
        """Count a step of `shape` that took `duration` ticks, `restoring` of them for copies from the second tier.

        cached: of each of `shape.prefills`, its tokens found in a prefix cache"""
        if self._apart is None:
            return
        self._ticks += duration
        if not shape.prefills:
            return
        duration -= restoring
        if shape.num_decodes:
            prompts, decodes = self._parts_of(shape, self._apart)
            duration = duration * prompts // (prompts + decodes)
        self._prompt_ticks += duration + restoring
        self._cached_ticks += restoring
        if any(cached):
            self._cached_ticks += duration * self._cached_part(shape, cached, self._apart)

    def _cached_part(self, shape: BatchShape, cached: Sequence[int], apart: Apart) -> float:
        """Cached tokens' share of the prompts of the first step with about these sizes."""
        tokens, seen = shape.num_tokens - shape.num_decodes, sum([computed for _, computed in shape.prefills])
        key = (len(shape.prefills), _rounded(tokens), seen >> 9, _rounded(sum(cached)))
        part = self._cached_parts.get(key)
        if part is None:
            alone = shape.apart[0]
            unread = tuple([(new, computed - hit) for (new, computed), hit in zip(shape.prefills, cached, strict=True)])
            whole, without = apart(alone)[0], apart(alone._replace(prefills=unread))[0]
            part = self._cached_parts[key] = max(0.0, 1 - without / whole)
        return part

    def _parts_of(self, shape: BatchShape, apart: Apart) -> tuple[int, int]:
        """`apart` of the first step with about the sizes of `shape`."""
        num_decodes, prefills = shape.num_decodes, shape.prefills
        tokens = _rounded(shape.num_tokens - num_decodes)
        seen = sum([computed for _, computed in prefills])
        others = _rounded(shape.group_tokens - shape.num_tokens) if shape.group_tokens else 0
        key: tuple[int, ...] = (len(prefills), tokens, _rounded(num_decodes), seen >> 9, _rounded(shape.decode_context))
        key = (*key, others, _rounded(sum([image.num_patches for image in shape.images])))
        parts = self._parts.get(key)
        if parts is None:
            if len(self._parts) >= _MAX_PARTS:
                self._parts.clear()
            more, everyone = tokens + num_decodes - shape.num_tokens, shape.group_tokens
            alike = shape._replace(num_tokens=shape.num_tokens + more, group_tokens=everyone and everyone + more)
            parts = self._parts[key] = apart(alike)
        return parts

    def add_decoding(self, duration: int) -> None:
        """Count decode-only steps of `duration` ticks in all."""
        if self._apart is not None:
            self._ticks += duration


def _rounded(count: int) -> int:
    """`count` rounded down to its leading four bits."""
    shift = max(count.bit_length() - 4, 0)
    return (count + (1 << shift >> 1)) >> shift << shift


class SimulatedBackend:
    """Executes plans in the time that `cost_model` gives.

    can_leap: price runs of equal steps together; acceptance: judges drafts; ahead: draft depth of pipelined drafters
    restore: cost of KV copies to and from the second tier. All pipeline stages start theirs when the plan is made, so
             only the first stage waits
    adapter_load: cost of taking LoRA adapters to slots, which steps wait for
    tree_ticks: for each token of a prompt, to make suffix decoding's tree of it with its first token; steps wait for it
    is_split: whether `prompt_time` counts; samples_parts: see `BatchingRules`"""

    def __init__(
        self,
        cost_model: StepCostModel,
        acceptance: SimulatedAcceptance | None = None,
        ahead: int | None = None,
        is_split: bool = False,
        samples_parts: bool = False,
    ) -> None:
        self.can_leap = cost_model.has_runs
        self.restore: RestoreCost | None = None
        self.adapter_load: AdapterLoad | None = None
        self.tree_ticks = 0
        self.prompt_time = PromptTime(self._apart if is_split else None)
        self._cost_model = cost_model
        self._stages = cost_model if isinstance(cost_model, StagedCostModel) else None
        self._acceptance, self._ahead, self._samples_parts = acceptance, ahead, samples_parts
        self._alone = cost_model.fresh() if is_split else cost_model  # prices hypothetical steps

    @property
    def num_stages(self) -> int:
        return self._stages.num_stages if self._stages is not None else 1

    def execute(self, plan: StepPlan) -> Outcome:
        """Execute one step; with several stages, one plan alone in the pipeline."""
        if self._stages is not None:
            return Outcome(self.pass_through(plan).latency)
        shape = self._computed(plan)
        duration, restoring = self._cost_model.duration_ps(shape), 0
        if plan.num_restored_tokens or plan.num_stored_blocks:
            restoring = self._restoring(plan, duration, self.restore)
            duration += restoring
        if plan.adapter_loads and self.adapter_load is not None:
            duration += to_ticks(self.adapter_load.step_s(*plan.adapter_loads))
        if self.tree_ticks and (plan.samples or plan.singles):
            begun = [request for request in plan.samples + plan.singles if not request.num_output_tokens]
            duration += self.tree_ticks * sum([request.num_prompt_tokens for request in begun])
        self._count(plan, shape, duration, restoring)
        accepted = self._acceptance.judge(plan) if self._acceptance is not None else None
        return _new(Outcome, (duration, None, accepted))

    def pass_through(self, plan: StepPlan) -> StageTicks:
        """Ticks of `plan` in each stage."""
        assert self._stages is not None
        shape = self._computed(plan)
        times, restoring = self._stages.pass_through(shape), 0
        if self.restore is not None and (plan.num_restored_tokens or plan.num_stored_blocks):
            cost = replace(self.restore, layers=self.restore.layers // self.num_stages)
            first, *rest = times.stages
            restoring = self._restoring(plan, first, cost)
            times = times._replace(stages=(first + restoring, *rest))
        self._count(plan, shape, sum(times.stages), restoring)
        return times

    def _count(self, plan: StepPlan, shape: BatchShape, duration: int, restoring: int) -> None:
        cached = [min(grant.request.num_cached_tokens, grant.num_computed_tokens) for grant in plan.chunks]
        self.prompt_time.add(shape, duration, cached, restoring if plan.num_restored_tokens else 0)

    def _computed(self, plan: StepPlan) -> BatchShape:
        """Shape of `plan` without drafts that the drafter does not propose."""
        shape, depths = shape_of(plan, self._ahead, self._samples_parts), plan.draft_depths
        offered = self._acceptance.offered(plan) if self._acceptance is not None and depths else depths
        if offered is depths:
            return shape
        return shape._replace(drafting=_num_drafting(offered), num_draft_tokens=sum(offered) + plan.num_padding_tokens)

    def plan_leap(self, plan: StepPlan, growth: tuple[int, ...], num_steps: int) -> DecodeRun:
        """Cost of `num_steps` steps from `plan` on; `growth`: increment of each `plan.decode_windowed` per step."""
        run = self._cost_model.run(shape_of(plan), growth, num_steps)
        assert run is not None
        return run

    def apply_leap(self, run: DecodeRun, plan: StepPlan, num_steps: int) -> None:
        """Account for the first `num_steps` of `run`, which began with `plan`."""
        run.apply_leap(num_steps)
        self.prompt_time.add_decoding(run.duration(num_steps))

    def _apart(self, shape: BatchShape) -> tuple[int, int]:
        alone, (prompts, decodes) = self._alone, shape.apart
        if isinstance(alone, StagedCostModel):
            return sum(alone.pass_through(prompts).stages), sum(alone.pass_through(decodes).stages)
        return alone.duration_ps(prompts), alone.duration_ps(decodes)

    def _restoring(self, plan: StepPlan, duration: int, cost: RestoreCost | None) -> int:
        """Extra ticks of `plan`, else `duration` long, for KV copies."""
        if cost is None:
            return 0
        copies = plan.num_restored_tokens, plan.num_restored_blocks, plan.num_stored_blocks
        return to_ticks(cost.added_s(duration / TICKS_PER_S, *copies))


def shape_of(plan: StepPlan, ahead: int | None = None, samples_parts: bool = False) -> BatchShape:
    """Batch shape of `plan`; ahead, samples_parts: see `SimulatedBackend`."""
    num_decodes = len(plan.decodes)
    depths = plan.draft_depths
    if not depths:
        drafting: tuple[int, ...] = ()
    else:
        drafting = (num_decodes,) * ahead if ahead is not None else _num_drafting(depths)
    return _new(
        BatchShape,
        (
            num_decodes + plan.num_chunk_tokens,
            num_decodes + len(plan.chunks if samples_parts else plan.samples),
            plan.chunk_lengths if plan.chunks else (),
            num_decodes,
            plan.decode_context,
            plan.decode_windowed,
            plan.group_tokens,
            0,
            drafting,
            plan.num_draft_tokens + plan.num_padding_tokens,
            plan.num_adapters,
            plan.num_adapter_tokens,
            tuple([item.grid for _, item in plan.encoded]) if plan.encoded else (),
            plan.num_masks,
            plan.first_half,
        ),
    )


def _num_drafting(depths: Sequence[int]) -> tuple[int, ...]:
    """Number of `depths` that are at least 1, 2 ... max(depths)."""
    deepest = max(depths)
    if not deepest:
        return ()
    if len(depths) * deepest == sum(depths):
        return (len(depths),) * deepest
    exactly = [0] * (deepest + 1)
    for depth in depths:
        exactly[depth] += 1
    return tuple(reversed(list(accumulate(reversed(exactly[1:])))))

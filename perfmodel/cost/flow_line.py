"""Plans on their way through pipeline stages, without a clock: how a step's work is shared out, how long a round takes.

p stages work on up to p plans at once. With h seconds of the host before a plan starts (`serial`), g beside it
(`hidden`) and d_s in stage s, plan n passes a flow line, in which the host is the first server:

    begin_s(n) = max( end_{s-1}(n), end_s(n-1) ),    end_s(n) = begin_s(n) + d_s

and its sequences may decode again once it is through, and the host's work beside it is done. Plans n that go round and
round in this order then take, each of them once,

    round = max( over n: h(n) + max(g(n), sum over s of d_s(n)),   over s: sum over n of d_s(n),   sum of h(n) + g(n) )

the longest circuits of a timed event graph, per plan on them (Baccelli et al. 1992, theorem 2.28): all of them where
plans are equal, else further ones that mix plans may be a little longer. What stages do nothing in are bubbles: of m
plans on p equal stages m / p of the round is work. m equal plans that pass once take sum of d_s + (m - 1) max(d_s),
with bubbles of (p - 1) / (m + p - 1) where stages are equal (GPipe, Huang et al. 2019).

What a stage costs has one home, its step graph under an `OperatorTimer`: `estimate_step` and `PipelineTimer` ask it for
the stages' times, the simulator's flow line (`perfmodel.sim.replica.pipeline`) asks the latter.
"""

__all__ = ["StageTimes", "plans_of_round", "round_time"]

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from perfmodel.ops.work import BatchShape


class StageTimes(NamedTuple):
    """Of one plan: of the host before it starts, and beside it, then of each stage in turn; in any unit."""

    serial: float
    hidden: float
    stages: tuple[float, ...]

    @property
    def latency(self) -> float:
        """Duration of a plan with no other under way."""
        return self.serial + max(self.hidden, sum(self.stages))


def round_time(plans: Mapping[StageTimes, int]) -> float:
    """How long it takes until all `plans`, so many of each, have passed all stages once more."""
    busy = [sum(count * each for count, each in zip(plans.values(), stage, strict=True)) for stage in _by_stage(plans)]
    host = sum(count * (times.serial + times.hidden) for times, count in plans.items())
    return max(*busy, host, *(times.latency for times in plans))


def _by_stage(plans: Mapping[StageTimes, int]) -> list[tuple[float, ...]]:
    return list(zip(*(times.stages for times in plans), strict=True))


def plans_of_round(shape: BatchShape, num_stages: int) -> dict[BatchShape, int]:
    """The plans that make up a step of `shape`, and how many there are of each: one for each stage, if there are as
    many sequences. Decodes are shared out evenly, prompts as they are, to one plan after another."""
    count = max(1, min(num_stages, shape.num_decodes + len(shape.prefills)))
    if count == 1:
        return {shape: 1}
    sizes = sorted(shape.prefills, reverse=True)
    dealt = [tuple(sizes[i::count]) for i in range(count)]
    found: dict[BatchShape, int] = {}
    for prefills in dealt:
        plan = _plan(shape, prefills, count)
        found[plan] = found.get(plan, 0) + 1
    return found


def _plan(shape: BatchShape, prefills: tuple[tuple[int, int], ...], count: int) -> BatchShape:
    """Of `count`, the one with these prompts."""
    num_decoded = max(shape.num_tokens - sum(new for new, _ in shape.prefills), 0)
    tokens = ceil(num_decoded / count) + sum(new for new, _ in prefills)
    sampled = (shape.num_samples - shape.num_decodes) / max(len(shape.prefills), 1)
    return BatchShape(
        num_tokens=tokens,
        num_samples=ceil(shape.num_decodes / count) + ceil(sampled * len(prefills)),
        prefills=prefills,
        num_decodes=ceil(shape.num_decodes / count),
        decode_context=ceil(shape.decode_context / count),
        decode_windowed=tuple(ceil(context / count) for context in shape.decode_windowed),
        group_tokens=ceil(shape.group_tokens * tokens / max(shape.num_tokens, 1)),
    )

"""Plans on their way through pipeline stages, without a clock: how a step's work is shared out, how long a round takes.

p stages work on up to p plans at once. With h seconds of the host before a plan starts (`serial`), g beside it
(`hidden`) and d_s in stage s, plan n passes a flow line, in which the host is the first server:

    begin_s(n) = max( end_{s-1}(n), end_s(n-1) ),    end_s(n) = begin_s(n) + d_s

and its sequences may decode again once it is through, and the host's work beside it is done. m equal plans that go
round and round then take, each of them once,

    round = max( h + max(g, sum of d_s), m max(d_s), m (h + g) ),      bubbles = 1 - m sum of d_s / (p round)

the longest circuit of a timed event graph, per plan on it (Baccelli et al. 1992, theorem 2.28). With m = p and equal
stages nothing is lost; fewer plans leave stages idle. m plans that pass once take sum of d_s + (m - 1) max(d_s), with
bubbles of (p - 1) / (m + p - 1) where stages are equal (GPipe, Huang et al. 2019).

What a stage costs has one home, its step graph under an `OperatorTimer`: `estimate_step` and `PipelineTimer` ask it for
the stages' times, the simulator's flow line (`perfmodel.sim.replica.pipeline`) asks the latter.
"""

__all__ = ["plan_of_round", "round_time"]

from collections.abc import Sequence
from math import ceil

from perfmodel.ops.work import BatchShape


def round_time(serial: float, hidden: float, stages: Sequence[float], num_plans: int) -> float:
    """How long it takes until each of `num_plans` equal plans has passed all stages once more, all in one unit."""
    once = serial + max(hidden, sum(stages))
    return max(once, num_plans * max(*stages, serial + hidden))


def plan_of_round(shape: BatchShape, num_stages: int) -> tuple[BatchShape, int]:
    """One of the equal plans that make up a step of `shape`, and how many there are: one for each stage, if there are
    as many sequences. Prompts are cut, too: a piece in each plan, with as much before it as pieces have on average."""
    count = max(1, min(num_stages, shape.num_decodes + len(shape.prefills)))
    if count == 1:
        return shape, 1
    pieces = [(ceil(new / count), new, before) for new, before in shape.prefills]
    plan = BatchShape(
        num_tokens=ceil(shape.num_tokens / count),
        num_samples=ceil(shape.num_samples / count),
        prefills=tuple((piece, before + (new - piece) // 2) for piece, new, before in pieces),
        num_decodes=ceil(shape.num_decodes / count),
        decode_context=ceil(shape.decode_context / count),
        decode_windowed=tuple(ceil(context / count) for context in shape.decode_windowed),
        group_tokens=ceil(shape.group_tokens / count),
        decode_tokens=ceil(shape.decode_tokens / count),
    )
    return plan, count

"""Gaps between two tokens of a request that are not just the last step."""

__all__ = ["note_uneven"]

from perfmodel.engine.plan import StepPlan


def note_uneven(plan: StepPlan, now: int, last_token_at: int, into: list[tuple[int, int]]) -> int:
    """How many of the plan's tokens end no plain gap: first ones, and ones after steps that the request sat out.

    now:  the end of the step, in ticks
    into: gets (ticks, how many times) of the latter; last_token_at: when those who stalled together had their last
    """
    if plan.num_stalled:
        into.append((now - last_token_at, plan.num_stalled))
    if not (plan.resumed or plan.singles or plan.samples):
        return plan.num_stalled
    unevens = plan.resumed + plan.singles + plan.samples
    since = [request.last_token_at for request in unevens if request.last_token_at is not None]
    into += [(now - tick, 1) for tick in since]
    return plan.num_stalled + len(unevens)

"""Answers of a required shape: the masks of a plan, and who waits for a grammar (vLLM v1).

A request with a shape arrives among those that the scheduler has skipped: under FCFS ahead of all that wait without
one, also where its grammar is there. It is skipped until the grammar is compiled (`Request.awaits_grammar`), and those
behind it go on. Each step needs a mask of the vocabulary for each token that it may sample for such requests, those of
drafted positions among them; a chunk of a prompt that samples nothing needs none.

Source: vllm/v1/core/sched/scheduler.py (`_enqueue_waiting_request`, `_try_promote_blocked_waiting_request`,
`get_grammar_bitmask`), vllm/v1/structured_output/__init__.py (`grammar_bitmask`), vLLM 0.30."""

from perfmodel.engine.plan import StepPlan
from perfmodel.engine.request import Request


class GrammarMasks:
    """Enters into plans how many masks they need."""

    def __init__(self) -> None:
        self._last: tuple[list[Request], int] | None = None  # decodes without drafts, and how many have a shape

    def count(self, plan: StepPlan) -> None:
        """Set `plan.num_masks`."""
        decodes, last = plan.decodes, self._last
        if plan.draft_depths:
            drafted = zip(decodes, plan.draft_depths, strict=True)
            count = sum([1 + depth for request, depth in drafted if request.grammar is not None])
        elif last is not None and last[0] is decodes:
            count = last[1]
        else:
            count = _num_shaped(decodes)
            self._last = decodes, count
        plan.num_masks = count + _num_shaped(plan.samples)


def _num_shaped(requests: list[Request]) -> int:
    return sum([request.grammar is not None for request in requests])

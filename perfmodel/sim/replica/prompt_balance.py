"""`PromptBalance`: data-parallel ranks in lockstep compute their prompts in the same steps.

A step with a prompt on one rank is as long for the others, which only decode. So TensorRT-LLM, with attention data
parallelism and `attention_dp_config.enable_balance`, lets no rank start a prompt until every rank has one to start, for
up to `timeout_iters` steps. Its steps are counted whether or not a prompt waits, so a wait takes half of that on
average. Source: `_balance_adp_requests` of TensorRT-LLM's `py_executor.py` (1.1, 1.2), with `batching_wait_iters` 0.
"""

__all__ = ["PromptBalance"]

from collections.abc import Sequence

from perfmodel.engine import Scheduler


class PromptBalance:
    """Says before each step whether waiting requests may start; `timeout_steps` of at least 1."""

    def __init__(self, timeout_steps: int) -> None:
        self._timeout = timeout_steps
        self._num_waited = 0
        self._is_counting = False

    def admits(self, ranks: Sequence[Scheduler]) -> bool:
        """Whether the step to be planned now may start prompts. Call once per step."""
        have_prompts = all(rank.num_waiting and rank.has_free_slot for rank in ranks)
        have_decodes = all(rank.num_running for rank in ranks)
        self._is_counting = have_decodes and not have_prompts
        if not self._is_counting:
            self._num_waited = 0
            return True
        self.pass_steps(1)
        return self._num_waited == 0

    def pass_steps(self, num_steps: int) -> None:
        """So many steps passed as the last one did, with no request waiting."""
        if self._is_counting:
            self._num_waited = (self._num_waited + num_steps) % self._timeout

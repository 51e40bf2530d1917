"""`StepSpec`: the one step that a metric of steps is of: `step: {batch: 8, context: 1024}`."""

__all__ = ["StepSpec"]

from pydantic import model_validator

from perfmodel.files.amounts import NonNegativeInt, PositiveInt
from perfmodel.files.base import Spec


class StepSpec(Spec):
    """One step: `batch` sequences that decode with `context` tokens each, and `prompts` prompts of `prefill` tokens.

    cached: tokens that each prompt already has in the KV cache (an earlier chunk, a prefix)
    """

    batch: NonNegativeInt = 0
    context: PositiveInt | None = None
    prefill: NonNegativeInt = 0
    prompts: PositiveInt = 1
    cached: NonNegativeInt = 0

    @model_validator(mode="after")
    def _does_something(self) -> "StepSpec":
        if not self.batch and not self.prefill:
            raise ValueError("needs `batch` and `context` (sequences that decode), `prefill` (a prompt), or both")
        if bool(self.batch) != (self.context is not None):
            raise ValueError("`batch` and `context` go together: so many sequences, so many tokens in each one's KV")
        return self

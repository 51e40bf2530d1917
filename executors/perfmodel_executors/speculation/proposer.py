"""What a drafter is asked, and what it answers."""

__all__ = ["Drafting", "Proposer"]

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from perfmodel_executors.models.batch import TokenSegment
from perfmodel_executors.runner import StepRunner


class Drafting(NamedTuple):
    """A sequence of this step whose earlier tokens are all computed.

    key:          its request
    tokens:       all that are known; the last one is computed in this step
    block_table:  its KV blocks, those for drafted tokens included
    depth:        how deep to draft; 0: not at all
    is_prompt:    whether its last token is of the prompt (and its block may be found by others from now on)
    draws:        random numbers of the tokens behind its last one, by depth; none: the likeliest ones are wanted
    """

    key: int
    tokens: Sequence[int]
    block_table: Sequence[int]
    depth: int
    is_prompt: bool = False
    draws: Sequence[int] = ()

    @property
    def num_computed(self) -> int:
        """Tokens in the KV cache."""
        return len(self.tokens) - 1


class Proposer(Protocol):
    """Drafts tokens. `propose` may be called twice in a step and answers the same; `settle` follows once."""

    depends_on_text: bool  # how many tokens are drafted is known only when they are

    @property
    def runner(self) -> StepRunner | None:
        """What drafts, where a decoder does."""
        ...

    def reserve_for(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Make room for what the step will write."""
        ...

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        """For each sequence the nodes behind its last known token, by depth; fewer where there is nothing to draft.

        chunks: the parts of prompts that the step computes, for drafters that have to know them
        """
        ...

    def verify(
        self,
        runner: StepRunner,
        drafting: Sequence[Drafting],
        drafts: Sequence[Sequence[int]],
        segments: Sequence[TokenSegment],
        is_warm_up: bool = False,
    ) -> list[int]:
        """What `runner.run` gives for the step's `segments`, those of `drafting` with their drafts first."""
        ...

    def settle(self, drafting: Sequence[Drafting], num_accepted: Sequence[int]) -> None:
        """So many tokens of each were right."""
        ...

    def release(self, key: int) -> None:
        """A request is done, or has lost its KV."""
        ...

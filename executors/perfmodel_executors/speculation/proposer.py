"""What a drafter is asked, and what it answers."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from perfmodel_executors.graphs import DecodeGraphs
from perfmodel_executors.models.batch import TokenSegment, first_rows
from perfmodel_executors.models.decoder import Decoder
from perfmodel_executors.models.kv_cache import KVCache
from perfmodel_executors.runner import StepRunner

Part = TypeVar("Part")


class Drafting(NamedTuple):
    """A sequence of this step whose earlier tokens are all computed.

    key:          its request
    tokens:       all that are known; the last one is computed in this step
    block_table:  its KV blocks, those for drafted tokens included
    depth:        how deep to draft; 0: not at all
    is_prompt:    whether its last token is of the prompt (and its block may be found by others from now on)
    draws:        random numbers of the tokens behind its last one, by depth; none: the likeliest ones are wanted
    ahead:        pipelined: how many tokens to draft behind its draft, while that is verified
    """

    key: int
    tokens: Sequence[int]
    block_table: Sequence[int]
    depth: int
    is_prompt: bool = False
    draws: Sequence[int] = ()
    ahead: int = 0

    @property
    def num_computed(self) -> int:
        """Tokens in the KV cache."""
        return len(self.tokens) - 1


class Passes(Protocol):
    """What takes a drafter's passes, as far as timing one of them needs it; a `StepRunner` is one."""

    @property
    def decoder(self) -> Decoder: ...

    @property
    def cache(self) -> KVCache: ...

    @property
    def graphs(self) -> DecodeGraphs | None: ...

    @property
    def keeps_kv(self) -> bool: ...

    def reserve_for(self, segments: Sequence[TokenSegment]) -> None:
        """Make room for what the pass writes."""
        ...

    def run(self, segments: Sequence[TokenSegment], is_warm_up: bool = False) -> list[int]:
        """One pass over `segments`, whatever states come with them: the likeliest token behind each wanted row."""
        ...


class Proposer(Protocol):
    """Drafts tokens. `propose` may be called twice in a step and answers the same; `settle` follows once."""

    depends_on_text: bool  # how many tokens are drafted is known only when they are

    @property
    def runner(self) -> Passes | None:
        """What drafts, where a decoder, its head or a part of it does."""
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

    def settle(self, drafting: Sequence[Drafting], paths: Sequence[Sequence[int]]) -> None:
        """These nodes of each were right."""
        ...

    def release(self, key: int) -> None:
        """A request is done, or has lost its KV."""
        ...


class PlainProposer:
    """What drafters have in common that verify by a plain pass and remember nothing of it."""

    def verify(
        self,
        runner: StepRunner,
        drafting: Sequence[Drafting],
        drafts: Sequence[Sequence[int]],
        segments: Sequence[TokenSegment],
        is_warm_up: bool = False,
    ) -> list[int]:
        """As of `Proposer`."""
        return runner.run(segments, is_warm_up)

    def settle(self, drafting: Sequence[Drafting], paths: Sequence[Sequence[int]]) -> None:
        """What was right is in the KV cache, or in the text."""

    def release(self, key: int) -> None:
        """Nothing is remembered."""


def by_row(segments: Sequence[TokenSegment], parts: Sequence[Part]) -> list[Part]:
    """What each segment has, in the order of the segments' rows in their batch."""
    starts = first_rows(segments)
    return [parts[i] for i in sorted(range(len(starts)), key=starts.__getitem__)]

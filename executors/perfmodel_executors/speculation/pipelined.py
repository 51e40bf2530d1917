"""`PipelinedSpeculator`: steps in which a drafter goes on in a thread of its own while the model verifies."""

__all__ = ["PipelinedSpeculator"]

import time
from collections.abc import Sequence

from perfmodel_executors.models.batch import TokenSegment
from perfmodel_executors.speculation.measured import AcceptanceCounts
from perfmodel_executors.speculation.proposer import Drafting
from perfmodel_executors.speculation.proposers.pipelined import PipelinedProposer
from perfmodel_executors.speculation.speculator import Speculator, Verified


class PipelinedSpeculator:
    """As `Speculator`, around one whose proposer is `proposer`.

    A step takes as long as the longer of both threads, by their CPU times: on a shared machine the wall's time is that
    of the neighbours. What they wait for each other, for the interpreter or for memory, is not in it.
    """

    def __init__(self, verifying: Speculator, proposer: PipelinedProposer) -> None:
        self.proposer = proposer
        self.tree = verifying.tree
        self._verifying = verifying
        self._ahead: list[list[int]] = []

    @property
    def ahead(self) -> int:
        """How many tokens are drafted behind a draft: a guess of the model's own, and the next draft."""
        return self.proposer.depth + 1

    def new_counts(self) -> AcceptanceCounts:
        """Nothing drafted yet."""
        return self._verifying.new_counts()

    def shape(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> tuple[int, ...]:
        """What a step's matrix shapes depend on beside its plan."""
        return (*self._verifying.shape(drafting, chunks), -1, *sorted(self.proposer.first_lengths(drafting)))

    def run(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment], is_warm_up: bool = False) -> Verified:
        """Take the step. Nothing is remembered of it until `settle`, so it may be taken twice."""
        drafts = self.proposer.propose(drafting, chunks)
        going_on = self.proposer.go_on(drafting, drafts, chunks)
        begin = time.thread_time_ns()
        verified = self._verifying.run(drafting, chunks, is_warm_up)
        verifying_ns = time.thread_time_ns() - begin
        self._ahead, drafting_ns = going_on.result()
        guessed = [
            tokens[-1] == ahead[0] if ahead and len(path) == len(draft) else None
            for tokens, path, draft, ahead in zip(verified.tokens, verified.paths, drafts, self._ahead, strict=False)
        ]
        return verified._replace(guessed=guessed, waited_ns=max(0, drafting_ns - verifying_ns))

    def settle(self, drafting: Sequence[Drafting], verified: Verified) -> None:
        """Remember what was right, and what was drafted ahead where all was."""
        self._verifying.settle(drafting, verified)
        found = zip(drafting, verified.paths, verified.guessed, self._ahead, strict=True)
        for index, (each, path, guess, ahead) in enumerate(found):
            self.proposer.keep(index, each, len(path), ahead[1:] if guess else None)

"""`Speculator`: one step with drafts: they are made, verified together with all else that runs, and kept as far as they
are what the model itself would have said: its likeliest token, or the one that it draws with the random number of the
token's position."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from perfmodel_executors.models.batch import TokenSegment, slot
from perfmodel_executors.runner import StepRunner
from perfmodel_executors.speculation.measured import AcceptanceCounts
from perfmodel_executors.speculation.proposer import Drafting, DraftShape, Proposer, Round, split_tokens


class Verified(NamedTuple):
    """What came of a step, for each sequence: tokens that it got (then one for each sampled chunk), nodes that were
    right, how many were verified; guessed: pipelined: whether the drafter guessed the model's token behind a right
    draft; waited_ns: what the device's clock does not see: how much longer a drafter beside it took."""

    tokens: list[list[int]]
    paths: list[list[int]]
    num_drafted: list[int]
    guessed: Sequence[bool | None] = ()
    waited_ns: int = 0

    @property
    def num_accepted(self) -> list[int]:
        """As `Outcome` has it: of each sequence the nodes that were right, and a guess that was."""
        counts = [len(path) for path in self.paths]
        return [n + bool(guess) for n, guess in zip(counts, self.guessed, strict=True)] if self.guessed else counts


class Speculator:
    """Drafts with `proposer` in the shape of `tree`, verifies with `runner`; ahead: tokens drafted behind a draft."""

    ahead = 0

    def __init__(self, runner: StepRunner, proposer: Proposer, tree: DraftShape, method: str = "") -> None:
        self.proposer, self.tree, self._runner = proposer, tree, runner
        self._method = method

    def new_counts(self) -> AcceptanceCounts:
        return AcceptanceCounts(self.tree, self._method, self._runner.decoder.model.name)

    def shape(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> tuple[int, ...]:
        """What a step's matrix shapes depend on beside its plan: how much is drafted, where the text decides it."""
        if not self.proposer.depends_on_text:
            return tuple(sorted(sequence.depth for sequence in drafting))
        return (sum(map(len, self.proposer.propose(drafting, chunks))),)

    def run(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment], is_warm_up: bool = False) -> Verified:
        """Take the step. Nothing is remembered of it until `proposer.finalize`, so it may be taken twice."""
        drafts = self.proposer.propose(drafting, chunks)
        segments = [self._segment(sequence, draft) for sequence, draft in zip(drafting, drafts, strict=True)]
        flat = self.proposer.verify(self._runner, Round(drafting, drafts, [*segments, *chunks]), is_warm_up)
        chosen = split_tokens([*segments, *chunks], flat)
        last = self._verify([segment.tokens for segment in segments], chosen[: len(segments)])
        paths = [self.tree.path(node)[: s.depth] for s, node in zip(drafting, last, strict=True)]
        tokens = [
            [*(segment.tokens[node] for node in path), after[path[-1] if path else 0]]
            for segment, path, after in zip(segments, paths, chosen[: len(segments)], strict=True)
        ]
        tokens += [sampled for sampled in chosen[len(segments) :] if sampled]
        size = self._runner.cache.block_size
        # Node i of a path belongs where the i-th token does, with its keys and values.
        moves = [
            (slot(s.block_table, s.num_computed + node, size), slot(s.block_table, s.num_computed + i, size))
            for s, path in zip(drafting, paths, strict=True)
            for i, node in enumerate(path, start=1)
            if node != i
        ]
        if moves:
            self._runner.cache.move(moves)
        return Verified(tokens, paths, list(map(len, drafts)))

    def finalize(self, drafting: Sequence[Drafting], verified: Verified) -> None:
        self.proposer.finalize(drafting, verified.paths)

    def _segment(self, drafting: Drafting, draft: Sequence[int]) -> TokenSegment:
        tokens = [drafting.tokens[-1], *draft]
        where = (drafting.num_computed, drafting.block_table)
        if not draft:
            return TokenSegment(tokens, *where, draws=drafting.draws[:1])
        nodes, depths = None, list(range(len(tokens)))
        if not self.tree.is_chain:
            nodes = self.tree.nodes(0, len(tokens))
            most = self._runner.decoder.model.max_position_embeddings - 1 - drafting.num_computed
            depths = [min(depth, most) for depth in nodes.depths]  # behind it nothing is right
            nodes = nodes._replace(depths=depths)
        draws = [drafting.draws[min(depth, drafting.depth)] for depth in depths] if drafting.draws else ()
        return TokenSegment(tokens, *where, is_verified=True, nodes=nodes, draws=draws)

    def _verify(self, nodes: Sequence[Sequence[int]], chosen: Sequence[Sequence[int]]) -> list[int]:
        longest = min(max(map(len, nodes), default=1), len(self.tree.parents))
        if longest == 1:
            return [0] * len(nodes)

        def padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor([[*row[:longest], *[0] * (longest - len(row))] for row in rows])

        verify = self._runner.decoder.kernels.verify_greedy
        counts = torch.tensor([len(row) for row in nodes])
        return list(verify(padded(nodes), self.tree.parents[:longest], padded(chosen), counts).tolist())

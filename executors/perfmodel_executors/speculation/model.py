"""Drafting with a decoder: a chain token by token, a tree level by level. What shares the model's own KV cache
(`SelfProposer`) writes what it computes for drafted tokens into the slots that verifying fills again. A second model
(`ModelProposer`) has a KV cache on the same block tables: it computes the same prompts, and catches up on tokens
that were right but that it has not computed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from perfmodel_executors.models.batch import TokenSegment, build_batch, first_rows
from perfmodel_executors.runner import StepRunner
from perfmodel_executors.speculation.proposer import Drafting, DraftTree, Proposer, Round, by_row, draft_by_level


class SelfProposer(Proposer):
    """Drafts with `runner`, whose decoder shares the KV of the model that verifies."""

    def __init__(self, runner: StepRunner, tree: DraftTree) -> None:
        self.runner = self._drafter = runner
        self._tree = tree

    def reserve_for(self, block_tables: Sequence[Sequence[int]]) -> None:
        self._drafter.cache.reserve_for(block_tables)

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        def candidates(depth: int, active: list[int], drafts: list[list[int]]) -> list[list[int]]:
            segments = [] if depth else self._unasked(drafting, chunks)
            segments += [self._level(drafting[i], drafts[i], depth) for i in active]
            return self._candidates(segments, self._tree.widths[depth], active)

        return draft_by_level(drafting, candidates)

    def _unasked(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[TokenSegment]:
        return []

    def _level(self, drafting: Drafting, draft: Sequence[int], depth: int) -> TokenSegment:
        """The nodes of `depth`, whose successors are wanted."""
        if depth:
            return self._tree.level_of(drafting, draft, depth)
        return TokenSegment([drafting.tokens[-1]], drafting.num_computed, drafting.block_table)

    def _candidates(self, segments: Sequence[TokenSegment], width: int, active: Sequence[int]) -> list[list[int]]:
        """The likeliest successors of each row that is wanted; `active`: which sequences the last segments are of."""
        return self._drafter.candidates(segments, width)


class ModelProposer(SelfProposer):
    """Drafts with a model that has a KV cache of its own."""

    def __init__(self, runner: StepRunner, tree: DraftTree) -> None:
        super().__init__(runner, tree)
        self._behind: dict[int, int] = {}  # tokens that the model has computed and the drafter has not, where any

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        drafts = any(sequence.depth for sequence in drafting)
        if not drafts and (unasked := self._unasked(drafting, chunks)):
            self._drafter.run(unasked)
        return super().propose(drafting, chunks)

    def finalize(self, drafting: Sequence[Drafting], paths: Sequence[Sequence[int]]) -> None:
        for sequence, accepted in zip(drafting, map(len, paths), strict=True):
            if sequence.depth:
                # Nodes of a tree lie elsewhere than the path that was right, so the drafter computes that again.
                kept = min(accepted, sequence.depth - 1) if self._tree.is_chain else 0
                self._behind[sequence.key] = accepted - kept
            else:
                behind = self._behind.get(sequence.key, 0) + 1
                self._behind[sequence.key] = 0 if sequence.is_prompt else behind

    def release(self, key: int) -> None:
        self._behind.pop(key, None)

    def _unasked(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[TokenSegment]:
        """Prompts, which others may find in the prefix cache."""
        ends = (s for s in drafting if s.is_prompt and not s.depth)
        last = (TokenSegment([s.tokens[-1]], s.num_computed, s.block_table) for s in ends)
        return [segment._replace(is_sampled=False) for segment in (*chunks, *last)]

    def _level(self, drafting: Drafting, draft: Sequence[int], depth: int) -> TokenSegment:
        if depth:
            return super()._level(drafting, draft, depth)
        start = drafting.num_computed - self._behind.get(drafting.key, 0)
        return TokenSegment(drafting.tokens[start:], start, drafting.block_table)


class SkippingProposer(SelfProposer):
    """`runner` has the first layers alone, on the KV cache of the model."""

    def __init__(self, runner: StepRunner, tree: DraftTree) -> None:
        super().__init__(runner, tree)
        self._passed: dict[int, list[Tensor]] = {}  # of each sequence that drafts: its nodes, level by level

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        self._passed = {}
        return super().propose(drafting, chunks)

    def _candidates(self, segments: Sequence[TokenSegment], width: int, active: Sequence[int]) -> list[list[int]]:
        decoder, cache = self._drafter.decoder, self._drafter.cache
        with torch.inference_mode():
            batch = build_batch(segments, cache.block_size, decoder.device)
            x_TC = decoder.through(batch, cache)
            for i, segment, row in zip(active, segments, first_rows(segments), strict=True):
                self._passed.setdefault(i, []).append(x_TC[row : row + len(segment.tokens)])
            return decoder.chooser.candidates(decoder.logits(x_TC, batch), width)

    def verify(self, runner: StepRunner, round_: Round, is_warm_up: bool = False) -> list[int]:
        drafting, drafts, segments = round_
        if not self._passed:
            return runner.run(segments, is_warm_up)
        passed, decoder, cache = self._passed, runner.decoder, runner.cache
        num_first = self._drafter.decoder.model.num_layers
        unread = [
            self._level(drafting[i], drafts[i], drafting[i].depth) if i in passed else segment._replace(draws=())
            for i, segment in enumerate(segments)
        ]
        with torch.inference_mode():
            x_UC = decoder.through(build_batch(unread, cache.block_size, decoder.device), cache, 0, num_first)
            states = [
                torch.cat([*passed.get(i, ()), x_UC[row : row + len(unread[i].tokens)]])
                for i, row in enumerate(first_rows(unread))
            ]
            batch = build_batch(segments, cache.block_size, decoder.device)
            x_TC = decoder.through(batch, cache, num_first, None, torch.cat(by_row(segments, states)))
            return list(decoder.chooser.choose(decoder.logits(x_TC, batch), batch.draws_S).tolist())

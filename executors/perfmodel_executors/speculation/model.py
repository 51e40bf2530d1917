"""Drafting with a decoder: a chain token by token, a tree level by level.

The part of the model that drafts may share the model's own KV cache (`SelfProposer`): its layers write what they
compute for drafted tokens into the slots that verifying fills again, so it is always up to date, and never needs to
see a prompt. A second model has a KV cache of its own on the same block tables (`ModelProposer`): it computes the same
prompts, and catches up on tokens that were right but that it has not computed, the last one of a draft that was right
from end to end.

Drafting with the model's first layers, whose work the verification does not do again (LayerSkip).

Elhoushi et al. 2024, section 4.3: what the first layers gave for a drafted token is kept, with its keys and values.
Verifying takes the tokens that no pass has read yet (the deepest of each draft, and all that did not draft) through the
first layers, then all tokens together through the rest.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from perfmodel_executors.models.batch import TokenSegment, build_batch, first_rows
from perfmodel_executors.runner import StepRunner
from perfmodel_executors.speculation.proposer import Drafting, PlainProposer
from perfmodel_executors.speculation.tree import DraftTree


class SelfProposer(PlainProposer):
    """Drafts with `runner`, whose decoder shares the KV of the model that verifies."""

    depends_on_text = False

    def __init__(self, runner: StepRunner, tree: DraftTree) -> None:
        self.runner = runner
        self._tree = tree

    def reserve_for(self, block_tables: Sequence[Sequence[int]]) -> None:
        self.runner.cache.reserve_for(block_tables)

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in drafting]
        for depth in range(max((each.depth for each in drafting), default=0)):
            active = [i for i, each in enumerate(drafting) if each.depth > depth]
            segments = [] if depth else self._unasked(drafting, chunks)
            segments += [self._level(drafting[i], drafts[i], depth) for i in active]
            for i, found in zip(active, self._next(segments, depth, active), strict=True):
                drafts[i] += found
        return drafts

    def _unasked(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[TokenSegment]:
        """What the first pass computes beside what drafts: nothing."""
        return []

    def _level(self, drafting: Drafting, draft: Sequence[int], depth: int) -> TokenSegment:
        """The nodes of `depth`, whose successors are wanted."""
        if depth == 0:
            return TokenSegment([drafting.tokens[-1]], drafting.num_computed, drafting.block_table)
        return level_of(self._tree, drafting, draft, depth)

    def _next(self, segments: Sequence[TokenSegment], depth: int, active: Sequence[int]) -> list[list[int]]:
        """The nodes of the next depth, for each of the sequences that draft."""
        rows = self._candidates(segments, self._tree.widths[depth], active)
        per_sequence = len(rows) // len(active)
        return [
            [token for row in rows[start : start + per_sequence] for token in row]
            for start in range(0, len(rows), per_sequence)
        ]

    def _candidates(self, segments: Sequence[TokenSegment], width: int, active: Sequence[int]) -> list[list[int]]:
        """The likeliest successors of each row that is wanted; `active`: which sequences the last segments are of."""
        if width == 1:
            return [[token] for token in self.runner.run(segments)]
        return self.runner.candidates(segments, width)


class ModelProposer(SelfProposer):
    """Drafts with a model that has a KV cache of its own."""

    def __init__(self, runner: StepRunner, tree: DraftTree) -> None:
        super().__init__(runner, tree)
        self._behind: dict[int, int] = {}  # tokens that the model has computed and the drafter has not, where any

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        if not any(each.depth for each in drafting):
            unasked = self._unasked(drafting, chunks)
            if unasked:
                self.runner.run(unasked)
        return super().propose(drafting, chunks)

    def settle(self, drafting: Sequence[Drafting], paths: Sequence[Sequence[int]]) -> None:
        for each, accepted in zip(drafting, map(len, paths), strict=True):
            if each.depth:
                # Nodes of a tree lie elsewhere than the path that was right, so the drafter computes that again.
                kept = min(accepted, each.depth - 1) if self._tree.is_chain else 0
                self._behind[each.key] = accepted - kept
            elif each.is_prompt:
                self._behind[each.key] = 0
            else:
                self._behind[each.key] = self._behind.get(each.key, 0) + 1

    def release(self, key: int) -> None:
        self._behind.pop(key, None)

    def _unasked(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[TokenSegment]:
        """Prompts, which others may find in the prefix cache."""
        segments = [chunk._replace(is_sampled=False) for chunk in chunks]
        segments += [
            TokenSegment([each.tokens[-1]], each.num_computed, each.block_table, is_sampled=False)
            for each in drafting
            if each.is_prompt and not each.depth
        ]
        return segments

    def _level(self, drafting: Drafting, draft: Sequence[int], depth: int) -> TokenSegment:
        if depth:
            return super()._level(drafting, draft, depth)
        start = drafting.num_computed - self._behind.get(drafting.key, 0)
        return TokenSegment(drafting.tokens[start:], start, drafting.block_table)


def level_of(tree: DraftTree, drafting: Drafting, draft: Sequence[int], depth: int) -> TokenSegment:
    """The drafted nodes of `depth`, at least 1, behind the newest token; `draft`: all down to there."""
    computed = drafting.num_computed
    if tree.is_chain:
        return TokenSegment([draft[-1]], computed + depth, drafting.block_table)
    level = tree.levels[depth]
    tokens = draft[level.start - 1 : level.stop - 1]
    nodes = tree.nodes(level.start, level.stop)
    return TokenSegment(tokens, computed, drafting.block_table, is_verified=True, nodes=nodes)


class SkippingProposer(SelfProposer):
    """`runner` has the first layers alone, on the KV cache of the model."""

    def __init__(self, runner: StepRunner, tree: DraftTree) -> None:
        super().__init__(runner, tree)
        self._passed: dict[int, list[Tensor]] = {}  # of each sequence that drafts: its nodes, level by level

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        self._passed = {}
        return super().propose(drafting, chunks)

    def _candidates(self, segments: Sequence[TokenSegment], width: int, active: Sequence[int]) -> list[list[int]]:
        decoder, cache = self.runner.decoder, self.runner.cache
        with torch.inference_mode():
            batch = build_batch(segments, cache.block_size, decoder.device)
            x_TC = decoder.through(batch, cache)
            for i, segment, row in zip(active, segments, first_rows(segments), strict=True):
                self._passed.setdefault(i, []).append(x_TC[row : row + len(segment.tokens)])
            logits_SV = decoder.logits(x_TC, batch)
            if width == 1:
                return [[token] for token in decoder.chooser.choose(logits_SV, None).tolist()]
            ranked: list[list[int]] = logits_SV.topk(width, dim=-1).indices.tolist()
            return ranked

    def verify(
        self,
        runner: StepRunner,
        drafting: Sequence[Drafting],
        drafts: Sequence[Sequence[int]],
        segments: Sequence[TokenSegment],
        is_warm_up: bool = False,
    ) -> list[int]:
        if not self._passed:
            return runner.run(segments, is_warm_up)
        passed, decoder, cache = self._passed, runner.decoder, runner.cache
        num_first = self.runner.decoder.model.num_layers
        unread = [
            self._level(drafting[i], drafts[i], drafting[i].depth) if i in passed else segment._replace(draws=())
            for i, segment in enumerate(segments)
        ]
        with torch.inference_mode():
            x_UC = decoder.through(build_batch(unread, cache.block_size, decoder.device), cache, 0, num_first)
            rows = [
                torch.cat([*passed.get(i, ()), x_UC[row : row + len(unread[i].tokens)]])
                for i, row in enumerate(first_rows(unread))
            ]
            batch, starts = build_batch(segments, cache.block_size, decoder.device), first_rows(segments)
            x_TC = torch.cat([rows[i] for i in sorted(range(len(rows)), key=starts.__getitem__)])
            x_TC = decoder.through(batch, cache, num_first, None, x_TC)
            tokens: list[int] = decoder.chooser.choose(decoder.logits(x_TC, batch), batch.draws_S).tolist()
            return tokens

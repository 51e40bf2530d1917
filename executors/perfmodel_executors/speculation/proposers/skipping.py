"""Drafting with the model's first layers, whose work the verification does not do again (LayerSkip).

Elhoushi et al. 2024, section 4.3: what the first layers gave for a drafted token is kept, with its keys and values.
Verifying takes the tokens that no pass has read yet (the deepest of each draft, and all that did not draft) through the
first layers, then all tokens together through the rest.
"""

__all__ = ["SkippingProposer"]

from collections.abc import Sequence

import torch
from torch import Tensor

from perfmodel_executors.models.batch import TokenSegment, build_batch, first_rows
from perfmodel_executors.runner import StepRunner
from perfmodel_executors.speculation.proposer import Drafting
from perfmodel_executors.speculation.proposers.model import SelfProposer
from perfmodel_executors.speculation.tree import DraftTree


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

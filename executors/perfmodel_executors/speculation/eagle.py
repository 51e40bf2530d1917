"""EAGLE: one layer that continues the model's own states, token by token (Li et al. 2024, section 3.1).

    x_j = layer(F [embedding(t_j); f_{j-1}]),  F [d, 2 d];  what the model's head makes of x_j is the draft for t_{j+1}

f is what the model's last layer gave; where the model has not computed a token yet, it is the draft's own x. So row j
of the layer's KV depends on tokens up to j only, and blocks of it are shared as the model's are.

The first pass of a round has 1 + k tokens of each sequence: those that the last round added, with the model's states in
place of the draft's; where these are fewer, the last one is repeated behind itself, which nothing before it sees.
Prompts pass through the layer behind the model's own pass, which gives their states.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from perfmodel_executors.graphs import DecodeGraphs
from perfmodel_executors.kernels.tiles import tuning
from perfmodel_executors.models.batch import StepBatch, TokenSegment, build_batch
from perfmodel_executors.models.decoder import Decoder
from perfmodel_executors.models.kv_cache import KVCache
from perfmodel_executors.runner import StepRunner
from perfmodel_executors.speculation.model import level_of
from perfmodel_executors.speculation.proposer import Drafting, by_row
from perfmodel_executors.speculation.states import NewestStates, states_of
from perfmodel_executors.speculation.tree import DraftTree


class EaglePasses:
    """The layer as `decoder`, between the model's embedding and head; `projection` is F, in front of it."""

    graphs: DecodeGraphs | None = None
    keeps_kv = True

    def __init__(self, decoder: Decoder, cache: KVCache, projection_CD: Tensor) -> None:
        self.decoder = decoder
        self.cache = cache
        self.projection_CD = projection_CD

    def reserve_for(self, segments: Sequence[TokenSegment]) -> None:
        self.cache.reserve_for([segment.block_table for segment in segments])

    def run(self, segments: Sequence[TokenSegment], is_warm_up: bool = False) -> list[int]:
        """A pass with embeddings in place of states."""
        decoder = self.decoder
        with torch.inference_mode(), tuning() if is_warm_up else nullcontext():
            batch = build_batch(segments, self.cache.block_size, decoder.device)
            x_TC = self._through(batch, decoder.embedded(batch))
            if not len(batch.sample_rows_S):
                return []
            tokens: list[int] = decoder.chooser.choose(decoder.logits(x_TC, batch), None).tolist()
            return tokens

    def states(self, segments: Sequence[TokenSegment], before: Sequence[Tensor]) -> list[Tensor]:
        """x of each segment's tokens, [T, C]; `before`: the states before each of them, [T, C]."""
        with torch.inference_mode():
            batch = build_batch(segments, self.cache.block_size, self.decoder.device)
            return states_of(segments, self._through(batch, torch.cat(by_row(segments, before))))

    def candidates(self, x_RC: Tensor, width: int) -> list[list[int]]:
        """The likeliest tokens behind each state."""
        with torch.inference_mode():
            logits_RV = self.decoder.head(x_RC)
            if width == 1:
                return [[token] for token in self.decoder.chooser.choose(logits_RV, None).tolist()]
            ranked: list[list[int]] = logits_RV.topk(width, dim=-1).indices.tolist()
            return ranked

    def _through(self, batch: StepBatch, before_TC: Tensor) -> Tensor:
        decoder = self.decoder
        both_TD = torch.cat((decoder.embedded(batch), before_TC), dim=-1)
        return decoder.through(batch, self.cache, x_TC=decoder.kernels.linear(both_TD, self.projection_CD))


class EagleProposer:
    """Drafts with `passes`, whose KV is on the block tables of the model's."""

    depends_on_text = False

    def __init__(self, passes: EaglePasses, tree: DraftTree) -> None:
        decoder, cache = passes.decoder, passes.cache
        self.runner = passes
        self._tree = tree
        self._newest = NewestStates(decoder.model.hidden_size, cache.block_size, decoder.dtype, decoder.device)
        self._unread: dict[int, Tensor] = {}  # of each sequence: the model's states that no first pass has read
        self._segments: Sequence[TokenSegment] = ()
        self._states: list[Tensor] = []

    def reserve_for(self, block_tables: Sequence[Sequence[int]]) -> None:
        self.runner.cache.reserve_for(block_tables)
        self._newest.reserve(self.runner.cache.num_blocks)

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in drafting]
        active = [i for i, each in enumerate(drafting) if each.depth]
        states = dict(zip(active, self._first([drafting[i] for i in active]), strict=True)) if active else {}
        for depth in range(max((each.depth for each in drafting), default=0)):
            active = [i for i in active if drafting[i].depth > depth]
            if depth:
                before = [states[i].repeat_interleave(self._tree.widths[depth - 1], 0) for i in active]
                segments = [level_of(self._tree, drafting[i], drafts[i], depth) for i in active]
                states = dict(zip(active, self.runner.states(segments, before), strict=True))
            rows = iter(self.runner.candidates(torch.cat([states[i] for i in active]), self._tree.widths[depth]))
            for i in active:
                drafts[i] += [token for _ in range(len(states[i])) for token in next(rows)]
        return drafts

    def verify(
        self,
        runner: StepRunner,
        drafting: Sequence[Drafting],
        drafts: Sequence[Sequence[int]],
        segments: Sequence[TokenSegment],
        is_warm_up: bool = False,
    ) -> list[int]:
        tokens, x_TC = runner.run_with_states(segments, is_warm_up)
        self._segments, self._states = segments, states_of(segments, x_TC)
        prompts = [i for i, each in enumerate(drafting) if each.is_prompt and not each.depth]
        prompts += range(len(drafting), len(segments))
        if prompts:
            asked = [segments[i]._replace(is_sampled=False, draws=()) for i in prompts]
            first = self._newest.before([each.block_table for each in asked], [each.num_computed for each in asked])
            before = [torch.cat((first[row : row + 1], self._states[i][:-1])) for row, i in enumerate(prompts)]
            self.runner.states(asked, before)
        return tokens

    def settle(self, drafting: Sequence[Drafting], paths: Sequence[Sequence[int]]) -> None:
        states = [x_TC[[0, *path]] for x_TC, path in zip(self._states, paths, strict=False)]
        for each, x_TC in zip(drafting, states, strict=True):
            if not each.depth and not each.is_prompt:
                x_TC = torch.cat((self._before(each), x_TC))
            self._unread[each.key] = x_TC
        tables = [segment.block_table for segment in self._segments]
        starts = [segment.num_computed for segment in self._segments]
        self._newest.keep(tables, starts, [*states, *self._states[len(paths) :]])

    def release(self, key: int) -> None:
        self._unread.pop(key, None)

    def _before(self, drafting: Drafting) -> Tensor:
        """The states before the tokens that no pass has read, up to the newest; behind a prompt, before that alone."""
        unread = self._unread.get(drafting.key)
        return self._newest.before([drafting.block_table], [drafting.num_computed]) if unread is None else unread

    def _first(self, drafting: Sequence[Drafting]) -> list[Tensor]:
        """x of the newest token of each sequence, [1, C]."""
        segments, before, ends = list[TokenSegment](), list[Tensor](), list[int]()
        for each in drafting:
            x_TC = self._before(each)
            unread = len(x_TC)
            start = each.num_computed + 1 - unread
            padding = max(0, min(self._tree.depth + 1 - unread, each.depth))
            tokens = [*each.tokens[start:], *[each.tokens[-1]] * padding]
            segments.append(TokenSegment(tokens, start, each.block_table, is_sampled=False))
            before.append(torch.cat((x_TC, x_TC[-1:].expand(padding, -1))))
            ends.append(unread)
        found = self.runner.states(segments, before)
        return [x_TC[end - 1 : end] for x_TC, end in zip(found, ends, strict=True)]

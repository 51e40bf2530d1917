"""Drafters that build on what the model's last layer gave: Medusa's heads and EAGLE's layer.

Medusa (Cai et al. 2024, section 3.1): the next tokens from the model's last state, each by a head of its own,

    head i of a state h:  W_i (h + silu(R_i h)),  R_i [d, d], W_i [V, d], h behind the final norm

All heads run once a round, whatever the depth of single sequences; all nodes of a level have the same children.

EAGLE (Li et al. 2024, section 3.1): one layer that continues the model's own states, token by token,

    x_j = layer(F [embedding(t_j); f_{j-1}]),  F [d, 2 d];  what the model's head makes of x_j is the draft for t_{j+1}
"""

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.graphs import DecodeGraphs
from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.kernels.kv_pages import grown
from perfmodel_executors.kernels.tiles import tuning
from perfmodel_executors.models.batch import StepBatch, TokenSegment, build_batch, first_rows
from perfmodel_executors.models.decoder import Decoder
from perfmodel_executors.models.kv_cache import KVCache
from perfmodel_executors.models.support import check_memory
from perfmodel_executors.runner import StepRunner
from perfmodel_executors.speculation.proposer import Drafting, DraftTree, Proposer, Round, by_row, draft_by_level


def _states_of(segments: Sequence[TokenSegment], x_TC: Tensor) -> list[Tensor]:
    return [x_TC[row : row + len(s.tokens)] for row, s in zip(first_rows(segments), segments, strict=True)]


class _StateProposer(Proposer):
    """Keeps the states that come with a pass that verifies: [C] of the newest token of each KV block. A shared block is
    full, so what lies behind its end holds there, too."""

    def __init__(self, decoder: Decoder, cache: KVCache, tree: DraftTree) -> None:
        self._cache, self._tree = cache, tree
        self._newest_BC = torch.zeros(0, decoder.model.hidden_size, dtype=decoder.dtype, device=decoder.device)
        self._segments: Sequence[TokenSegment] = ()
        self._states: list[Tensor] = []

    def reserve_for(self, block_tables: Sequence[Sequence[int]]) -> None:
        self._cache.reserve_for(block_tables)
        newest_BC, num_blocks = self._newest_BC, self._cache.num_blocks
        if num_blocks > len(newest_BC):
            num_bytes = num_blocks * newest_BC.shape[1] * newest_BC.element_size()
            check_memory(f"states of {num_blocks} KV blocks", num_bytes, newest_BC.device)
            self._newest_BC = grown(newest_BC, num_blocks)

    def verify(self, runner: StepRunner, round_: Round, is_warm_up: bool = False) -> list[int]:
        tokens, x_TC = runner.run_with_states(round_.segments, is_warm_up)
        self._segments, self._states = round_.segments, _states_of(round_.segments, x_TC)
        return tokens

    def finalize(self, drafting: Sequence[Drafting], paths: Sequence[Sequence[int]]) -> None:
        right = [x_TC[[0, *path]] for x_TC, path in zip(self._states, paths, strict=False)]
        size, blocks, rows = self._cache.block_size, list[int](), list[Tensor]()
        for segment, x_TC in zip(self._segments, [*right, *self._states[len(paths) :]], strict=True):
            start, end = segment.num_computed, segment.num_computed + len(x_TC)
            for block in range(start // size, -(-end // size)):
                blocks.append(segment.block_table[block])
                rows.append(x_TC[min((block + 1) * size, end) - 1 - start])
        if blocks:
            index = torch.tensor(blocks, device=self._newest_BC.device)
            self._newest_BC.index_copy_(0, index, torch.stack(rows))

    def _newest_before(self, sequences: Sequence[Drafting | TokenSegment]) -> Tensor:
        """[R, C]: of the token before the first new one of each, the newest of its block; zeros without one."""
        size, positions = self._cache.block_size, [sequence.num_computed for sequence in sequences]
        last = [s.block_table[(place - 1) // size] for s, place in zip(sequences, positions, strict=True)]
        x_RC = self._newest_BC[torch.tensor(last, device=self._newest_BC.device)]
        if 0 in positions:
            x_RC[[row for row, position in enumerate(positions) if not position]] = 0
        return x_RC


class MedusaHeads:
    """A head for each of `widths`, untrained, as the paper begins: R_i is zero and W_i a copy of the LM head."""

    graphs: DecodeGraphs | None = None
    keeps_kv = True

    def __init__(self, decoder: Decoder, cache: KVCache, widths: Sequence[int]) -> None:
        self.decoder, self.cache = decoder, cache
        self.widths = tuple(widths)
        hidden, vocab, dtype = decoder.model.hidden_size, decoder.model.vocab_size, decoder.dtype
        num_bytes = len(self.widths) * hidden * (hidden + vocab) * dtype.itemsize
        check_memory(f"{decoder.model.name}: Medusa heads", num_bytes, decoder.device)
        self.blocks = [torch.zeros(hidden, hidden, dtype=dtype, device=decoder.device) for _ in self.widths]
        self.heads = [deepcopy(decoder.weights.lm_head) for _ in self.widths]

    def reserve_for(self, segments: Sequence[TokenSegment]) -> None:
        """Nothing is written."""

    def run(self, segments: Sequence[TokenSegment], is_warm_up: bool = False) -> list[int]:
        """The tokens of the last head, whatever the states."""
        decoder = self.decoder
        h_RC = torch.ones(len(segments), decoder.model.hidden_size, dtype=decoder.dtype, device=decoder.device)
        return [ranked[-1][0] for ranked in self.candidates(h_RC)]

    def candidates(self, h_RC: Tensor) -> list[list[list[int]]]:
        """For each state, of each head, the likeliest tokens, as many as its width."""
        choose = self.decoder.chooser.candidates
        with torch.inference_mode():
            ranked = [choose(*head) for head in zip(self.logits(h_RC), self.widths, strict=True)]
        return [list(row) for row in zip(*ranked, strict=True)]

    def logits(self, h_RC: Tensor) -> list[Tensor]:
        decoder, kernels = self.decoder, self.decoder.kernels
        h_RC = kernels.rms_norm(h_RC, decoder.weights.final_norm, decoder.model.norm_eps)
        blocks = (h_RC + functional.silu(kernels.linear(h_RC, block)) for block in self.blocks)
        return [apply_linear(kernels, x_RC, head) for x_RC, head in zip(blocks, self.heads, strict=True)]


class MedusaProposer(_StateProposer):
    def __init__(self, heads: MedusaHeads, tree: DraftTree) -> None:
        super().__init__(heads.decoder, heads.cache, tree)
        self.runner = self._heads = heads

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in drafting]
        active = [i for i, sequence in enumerate(drafting) if sequence.depth]
        if active:
            h_RC = self._newest_before([drafting[i] for i in active])
            for i, by_head in zip(active, self._heads.candidates(h_RC), strict=True):
                for depth in range(drafting[i].depth):
                    drafts[i] += by_head[depth] * len(self._tree.levels[depth])
        return drafts


@dataclass
class EaglePasses:
    """The layer as `decoder`, between the model's embedding and head; `projection` is F, in front of it."""

    decoder: Decoder
    cache: KVCache
    projection_CD: Tensor
    graphs: DecodeGraphs | None = None
    keeps_kv: bool = True

    def reserve_for(self, segments: Sequence[TokenSegment]) -> None:
        self.cache.reserve_for([segment.block_table for segment in segments])

    def run(self, segments: Sequence[TokenSegment], is_warm_up: bool = False) -> list[int]:
        decoder = self.decoder
        with torch.inference_mode(), tuning() if is_warm_up else nullcontext():
            batch = build_batch(segments, self.cache.block_size, decoder.device)
            x_TC = self._through(batch, decoder.embedded(batch))
            if not len(batch.sample_rows_S):
                return []
            return list(decoder.chooser.choose(decoder.logits(x_TC, batch), None).tolist())

    def states(self, segments: Sequence[TokenSegment], before: Sequence[Tensor]) -> list[Tensor]:
        """x of each segment's tokens, [T, C]; `before`: the states before each of them, [T, C]."""
        with torch.inference_mode():
            batch = build_batch(segments, self.cache.block_size, self.decoder.device)
            return _states_of(segments, self._through(batch, torch.cat(by_row(segments, before))))

    def candidates(self, x_RC: Tensor, width: int) -> list[list[int]]:
        with torch.inference_mode():
            return self.decoder.chooser.candidates(self.decoder.head(x_RC), width)

    def _through(self, batch: StepBatch, before_TC: Tensor) -> Tensor:
        decoder = self.decoder
        both_TD = torch.cat((decoder.embedded(batch), before_TC), dim=-1)
        return decoder.through(batch, self.cache, x_TC=decoder.kernels.linear(both_TD, self.projection_CD))


class EagleProposer(_StateProposer):
    """Drafts with `passes`, whose KV is on the block tables of the model's."""

    def __init__(self, passes: EaglePasses, tree: DraftTree) -> None:
        super().__init__(passes.decoder, passes.cache, tree)
        self.runner = self._passes = passes
        self._unread: dict[int, Tensor] = {}  # of each sequence: the model's states that no first pass has read

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        states: dict[int, Tensor] = {}
        widths = self._tree.widths

        def candidates(depth: int, active: list[int], drafts: list[list[int]]) -> list[list[int]]:
            if depth == 0:
                first = self._first([drafting[i] for i in active])
            else:
                before = [states[i].repeat_interleave(widths[depth - 1], 0) for i in active]
                levels = [self._tree.level_of(drafting[i], drafts[i], depth) for i in active]
                first = self._passes.states(levels, before)
            states.update(zip(active, first, strict=True))
            return self._passes.candidates(torch.cat(first), widths[depth])

        return draft_by_level(drafting, candidates)

    def verify(self, runner: StepRunner, round_: Round, is_warm_up: bool = False) -> list[int]:
        tokens, (drafting, _, segments) = super().verify(runner, round_, is_warm_up), round_
        prompts = [i for i, sequence in enumerate(drafting) if sequence.is_prompt and not sequence.depth]
        prompts += range(len(drafting), len(segments))
        if prompts:
            asked = [segments[i]._replace(is_sampled=False, draws=()) for i in prompts]
            first = self._newest_before(asked)
            before = [torch.cat((first[row : row + 1], self._states[i][:-1])) for row, i in enumerate(prompts)]
            self._passes.states(asked, before)
        return tokens

    def finalize(self, drafting: Sequence[Drafting], paths: Sequence[Sequence[int]]) -> None:
        for sequence, x_TC, path in zip(drafting, self._states, paths, strict=False):
            right = x_TC[[0, *path]]
            is_unread = not sequence.depth and not sequence.is_prompt
            self._unread[sequence.key] = torch.cat((self._before(sequence), right)) if is_unread else right
        super().finalize(drafting, paths)

    def release(self, key: int) -> None:
        self._unread.pop(key, None)

    def _before(self, drafting: Drafting) -> Tensor:
        """The states before the tokens that no pass has read, up to the newest; behind a prompt, before that alone."""
        unread = self._unread.get(drafting.key)
        return self._newest_before([drafting]) if unread is None else unread

    def _first(self, drafting: Sequence[Drafting]) -> list[Tensor]:
        segments, before, ends = list[TokenSegment](), list[Tensor](), list[int]()
        for sequence in drafting:
            x_TC = self._before(sequence)
            unread = len(x_TC)
            start = sequence.num_computed + 1 - unread
            padding = max(0, min(self._tree.depth + 1 - unread, sequence.depth))
            tokens = [*sequence.tokens[start:], *[sequence.tokens[-1]] * padding]
            segments.append(TokenSegment(tokens, start, sequence.block_table, is_sampled=False))
            before.append(torch.cat((x_TC, x_TC[-1:].expand(padding, -1))))
            ends.append(unread)
        return [x_TC[end - 1 : end] for x_TC, end in zip(self._passes.states(segments, before), ends, strict=True)]

"""Medusa heads: the next tokens from the model's last state, each by a head of its own (Cai et al. 2024, section 3.1).

    head i of a state h:  W_i (h + silu(R_i h)),  R_i [d, d], W_i [V, d], h behind the final norm

All heads run once a round, whatever the depth of single sequences. Of a tree all nodes of a level have the same
children: head i's likeliest tokens. The candidates are verified as any tree.
"""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.graphs import DecodeGraphs
from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.models.batch import TokenSegment
from perfmodel_executors.models.decoder import Decoder
from perfmodel_executors.models.kv_cache import KVCache
from perfmodel_executors.models.support import check_memory
from perfmodel_executors.runner import StepRunner
from perfmodel_executors.speculation.proposer import Drafting
from perfmodel_executors.speculation.states import NewestStates, states_of
from perfmodel_executors.speculation.tree import DraftTree


class MedusaHeads:
    """One head for each of `widths`, on the states of `decoder`; untrained, as the paper begins: R_i is zero and W_i a
    copy of the LM head, so that each head says what the model says."""

    graphs: DecodeGraphs | None = None
    keeps_kv = True

    def __init__(self, decoder: Decoder, cache: KVCache, widths: Sequence[int]) -> None:
        self.decoder = decoder
        self.cache = cache
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
        with torch.inference_mode():
            ranked = [
                self._ranked(logits_RV, width) for logits_RV, width in zip(self.logits(h_RC), self.widths, strict=True)
            ]
        return [list(row) for row in zip(*ranked, strict=True)]

    def logits(self, h_RC: Tensor) -> list[Tensor]:
        """[R, V] of each head."""
        decoder = self.decoder
        kernels = decoder.kernels
        h_RC = kernels.rms_norm(h_RC, decoder.weights.final_norm, decoder.model.norm_eps)
        blocks = (h_RC + functional.silu(kernels.linear(h_RC, block)) for block in self.blocks)
        return [apply_linear(kernels, x_RC, head) for x_RC, head in zip(blocks, self.heads, strict=True)]

    def _ranked(self, logits_RV: Tensor, width: int) -> list[list[int]]:
        if width == 1:
            return [[token] for token in self.decoder.chooser.choose(logits_RV, None).tolist()]
        ranked: list[list[int]] = logits_RV.topk(width, dim=-1).indices.tolist()
        return ranked


class MedusaProposer:
    """Drafts with heads on the state of the newest token that the model has computed."""

    depends_on_text = False

    def __init__(self, heads: MedusaHeads, tree: DraftTree) -> None:
        decoder, cache = heads.decoder, heads.cache
        self.runner = heads
        self._tree = tree
        self._newest = NewestStates(decoder.model.hidden_size, cache.block_size, decoder.dtype, decoder.device)
        self._segments: Sequence[TokenSegment] = ()
        self._states: list[Tensor] = []

    def reserve_for(self, block_tables: Sequence[Sequence[int]]) -> None:
        self.runner.cache.reserve_for(block_tables)
        self._newest.reserve(self.runner.cache.num_blocks)

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in drafting]
        active = [i for i, each in enumerate(drafting) if each.depth]
        if active:
            asked = [drafting[i] for i in active]
            h_RC = self._newest.before([each.block_table for each in asked], [each.num_computed for each in asked])
            for i, by_head in zip(active, self.runner.candidates(h_RC), strict=True):
                for depth in range(drafting[i].depth):
                    drafts[i] += by_head[depth] * len(self._tree.levels[depth])
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
        return tokens

    def settle(self, drafting: Sequence[Drafting], paths: Sequence[Sequence[int]]) -> None:
        states = [x_TC[[0, *path]] for x_TC, path in zip(self._states, paths, strict=False)]
        tables = [segment.block_table for segment in self._segments]
        starts = [segment.num_computed for segment in self._segments]
        self._newest.keep(tables, starts, [*states, *self._states[len(paths) :]])

    def release(self, key: int) -> None:
        """Nothing is remembered of a sequence."""

"""Keys and values in several precisions by age: the newest in rings of their own, the oldest in the engine's blocks.
Tier i of R_i tokens holds what is newer than the R_1 + ... + R_i newest and older than those before it. A step attends
to what the tiers hold before it and, in full precision, to its own tokens; then each token that a tier no longer has is
rewritten in the next. Source: Liu et al. 2024 (KIVI), section 3.2."""

from typing import NamedTuple

import torch
from torch import Tensor

from perfmodel.models.architecture import Attention
from perfmodel_executors.kernels.attention_decode import attend_one
from perfmodel_executors.kernels.attention_prefill import attend
from perfmodel_executors.models.kept import KVTiers
from perfmodel_executors.models.states import MixerStep


class _Sequence(NamedTuple):
    """own: its rows of the step; table: its blocks; before: its tokens before the step; row: of the rings."""

    own: slice
    table: Tensor
    before: int
    row: int


def attend_in_tiers(
    step: MixerStep, mixer: Attention, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, tiers: KVTiers
) -> Tensor:
    """[T, N, H_v], one-token rows first; queries and keys come unrotated. The tiers take all T tokens in."""
    q_TNH, k_TKH = step.rotated(mixer, q_TNH, k_TKH)
    out_TNV = q_TNH.new_empty(*q_TNH.shape[:2], mixer.v_head_dim)
    moved: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in (*tiers.rings, tiers.pages)]
    for sequence in _sequences(step):
        own_k, own_v = k_TKH[sequence.own], v_TKV[sequence.own]
        k_LKH, v_LKV = _held(tiers, sequence, own_k, own_v)
        if len(own_k) == 1:
            out_TNV[sequence.own] = attend_one(q_TNH[sequence.own][0], k_LKH, v_LKV)[None]
        else:
            queries, keys = torch.arange(sequence.before, len(k_LKH)), torch.arange(len(k_LKH))
            mask_TL = (keys <= queries[:, None]).to(q_TNH.device)
            out_TNV[sequence.own] = attend(q_TNH[sequence.own], k_LKH.transpose(0, 1), v_LKV.transpose(0, 1), mask_TL)
        for place, (first, last, slots) in enumerate(_entering(tiers, sequence, len(own_k))):
            if last > first:
                moved[place].append((k_LKH[first:last], v_LKV[first:last], slots))
    for pages, parts in zip((*tiers.rings, tiers.pages), moved, strict=True):
        if parts:
            k, v, slots = (torch.cat(side) for side in zip(*parts, strict=True))
            step.kernels.kv_write(k, v, pages, slots)
    return out_TNV


def _sequences(step: MixerStep) -> list[_Sequence]:
    batch, (decodes, chunks) = step.batch, step.state_rows
    own = enumerate(zip(batch.tables_DM, batch.contexts_D.tolist(), decodes.tolist(), strict=True))
    sequences = [_Sequence(slice(i, i + 1), table, context - 1, row) for i, (table, context, row) in own]
    before = batch.chunks.computed_G.tolist()
    return sequences + list(map(_Sequence, step.chunk_rows, batch.chunks.tables_GM, before, chunks.tolist()))


def _spans(tiers: KVTiers, num_tokens: int) -> list[tuple[int, int]]:
    """Positions [first, last) of each tier from the newest on, then of the pages, of a sequence of so many tokens."""
    spans, last = [], num_tokens
    for ring in tiers.rings:
        first = max(0, last - ring.block_size)
        spans.append((first, last))
        last = first
    return [*spans, (0, last)]


def _held(tiers: KVTiers, sequence: _Sequence, own_k: Tensor, own_v: Tensor) -> tuple[Tensor, Tensor]:
    dtype, parts = own_k.dtype, []
    *spans, (_, oldest) = _spans(tiers, sequence.before)
    if oldest:
        parts.append(tiers.pages.first(oldest, sequence.table, dtype))
    row = torch.tensor([sequence.row], device=own_k.device)
    for ring, (first, last) in reversed(list(zip(tiers.rings, spans, strict=True))):
        if last > first:
            k, v = ring.gathered(row, dtype)
            places = torch.arange(first, last, device=own_k.device) % ring.block_size
            parts.append((k[places], v[places]))
    parts.append((own_k, own_v))
    k_LKH, v_LKV = (torch.cat(side) for side in zip(*parts, strict=True))
    return k_LKH, v_LKV


def _entering(tiers: KVTiers, sequence: _Sequence, num_new: int) -> list[tuple[int, int, Tensor]]:
    """For each tier and the pages: the positions [first, last) that enter with the step, and their slots."""
    before, after = (_spans(tiers, count) for count in (sequence.before, sequence.before + num_new))
    entering = []
    for pages, (_, known), (first, last) in zip((*tiers.rings, tiers.pages), before, after, strict=True):
        first, size = max(first, known), pages.block_size
        positions = torch.arange(first, max(first, last), device=sequence.table.device)
        blocks = sequence.table[positions // size] if pages is tiers.pages else sequence.row
        entering.append((first, max(first, last), blocks * size + positions % size))
    return entering

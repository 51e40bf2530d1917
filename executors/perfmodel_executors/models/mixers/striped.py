"""Attention over keys and values that are striped over ranks (decode context parallelism): of a sequence, rank r of n
has the tokens whose position leaves r when divided by n. For a decode the ranks gather the queries of their heads,
which read the same keys, attend to what each has, and merge; a chunk's ranks gather the keys and values before it.

    o = sum over ranks of w_r o_r,    w_r = exp(s_r - log sum exp s),    s_r = log sum exp of the rank's scores

Source: vLLM's `cp_lse_ag_out_rs`; Milakov and Gimelshein 2018 (online softmax)."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from perfmodel_executors.kernels.attention_prefill import PLAIN
from perfmodel_executors.kernels.kv_pages import Chunks, KVPages
from perfmodel_executors.models.states import MixerStep
from perfmodel_executors.parallel.group import TensorGroup


def attend_striped(step: MixerStep, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, pages: KVPages) -> Tensor:
    """[T, N, H_v] of rotated queries and keys, of which this rank keeps its own; slots count tokens of all ranks."""
    batch, group, split = step.batch, step.group, step.batch.num_decodes
    own_T = batch.slots_T % group.num_stripes == group.stripe
    step.kernels.kv_write(k_TKH[own_T], v_TKH[own_T], pages, batch.slots_T[own_T] // group.num_stripes)
    parts = [_decodes(q_TNH[:split], pages, batch.tables_DM, batch.contexts_D, group)] if split else []
    if len(batch.chunks.computed_G):
        parts += _chunks(step, q_TNH[split:], k_TKH[split:], v_TKH[split:], pages)
    return torch.cat(parts)


def _decodes(q_DNH: Tensor, pages: KVPages, tables_DM: Tensor, contexts_D: Tensor, group: TensorGroup) -> Tensor:
    (num_seqs, num_heads, head_dim), size = q_DNH.shape, group.num_stripes
    q_DNH = torch.cat(group.gather_stripes(q_DNH), dim=1)
    out_DNH = q_DNH.new_zeros(*q_DNH.shape[:2], pages.v_dim)
    sums_DN = torch.full(q_DNH.shape[:2], -math.inf, device=q_DNH.device)
    for row, context in enumerate(contexts_D.tolist()):
        num_rows = -(-(context - group.stripe) // size)
        if num_rows > 0:
            k_LKH, v_LKH = pages.first(num_rows, tables_DM[row], q_DNH.dtype)
            scores_NL = (q_DNH[row] @ k_LKH[:, 0].T).float() / math.sqrt(head_dim)
            sums_DN[row] = scores_NL.logsumexp(dim=1)
            out_DNH[row] = torch.softmax(scores_NL, dim=1).to(q_DNH.dtype) @ v_LKH[:, 0]
    total_DN = torch.stack(group.gather_stripes(sums_DN)).logsumexp(dim=0)
    weighted_DNH = out_DNH * torch.exp(sums_DN - total_DN)[..., None].to(out_DNH.dtype)
    return group.scatter_stripes(weighted_DNH.view(num_seqs, size, num_heads, -1).transpose(0, 1))


def _chunks(step: MixerStep, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, pages: KVPages) -> list[Tensor]:
    """Each chunk over the keys and values before it, gathered, and its own."""
    group, chunks, width = step.group, step.batch.chunks, k_TKH.shape[2]
    computed: list[int] = chunks.computed_G.tolist()
    rows = [-(-count // group.num_stripes) for count in computed]
    cached_rows = zip(chunks.tables_GM, rows, strict=True)
    before = [torch.cat(pages.first(count, table, k_TKH.dtype), dim=2) for table, count in cached_rows]
    cached = [torch.stack(group.gather_stripes(torch.cat(before)), dim=1)] if any(rows) else []
    parts, begin = [], 0
    for count, num_rows, (start, end) in zip(computed, rows, pairwise(chunks.starts_G.tolist()), strict=True):
        kv_LKH = torch.cat((k_TKH[start:end], v_TKH[start:end]), dim=2)
        if count:
            own = cached[0][begin : begin + num_rows].flatten(0, 1)[:count]
            kv_LKH, begin = torch.cat((own, kv_LKH)), begin + num_rows
        blocks_of_one = KVPages(kv_LKH[:, None, :, :width].contiguous(), kv_LKH[:, None, :, width:].contiguous())
        table = torch.arange(len(kv_LKH), device=q_TNH.device)[None]
        alone = Chunks(table, chunks.starts_G.new_tensor([0, end - start]), chunks.computed_G.new_tensor([count]))
        parts.append(step.kernels.attention_prefill(q_TNH[start:end], blocks_of_one, alone, PLAIN))
    return parts

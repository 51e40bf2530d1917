"""Attention over latents (DeepSeek-V2, section 2.1): decodes absorb the up-projection, prompts expand what they read.

    k_j = [W_k c_j | r_j], v_j = W_v c_j  for each head, of the cached latents c (R elements) and rotated keys r

Absorbed, a query reads each latent once for all heads: (W_k^T q) . c + q_r . r, and W_v of the weighted sum of latents.
A page has one vector of each token, the compressed keys and values beside the rotated part of the key.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfmodel.ops.attention.latent import latent_decode
from perfmodel.ops.attention.prefill import Heads, flash_prefill
from perfmodel_executors.kernels.attention_prefill import QUERY_TILE, attend, visible
from perfmodel_executors.kernels.kv_pages import NAMES, TOLERANCE, Chunks, grown, shuffled_tables
from perfmodel_executors.kernels.problem import Inputs, Problem, Sizes


class LatentHeads(NamedTuple):
    """keys: W_k of each head, to the P elements of a key that are not rotated; values: W_v; scale: of scores."""

    keys_NPR: Tensor
    values_NVR: Tensor
    scale: float

    def absorbs(self, num_new: int, num_tokens: int) -> bool:
        """Whether a chunk of `num_new` tokens, the last of `num_tokens`, is less work with W_k and W_v absorbed.

        FLOPs of a head, with q pairs of a query and a key, of c new tokens and C in all:

            absorbed  2 (2 R + r) q + 2 R (P + V) c     expanded  2 (P + r + V) q + 2 R (P + V) C

        Absorbed pays per pair, expanded per token of context: DeepSeek-V3's heads (128, 128 and 512) break even at 171
        new tokens behind a long prefix. A prompt without a prefix is never absorbed.
        """
        (_, size, rank), value = self.keys_NPR.shape, self.values_NVR.shape[1]
        pairs = num_new * (num_tokens - (num_new - 1) / 2)
        return (2 * rank - size - value) * pairs < rank * (size + value) * (num_tokens - num_new)


class LatentPages(NamedTuple):
    """Latents [B, S, R + r] of B blocks of S tokens: R elements of keys and values, then r of the rotated key."""

    latents_BSW: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.latents_BSW,)

    @property
    def block_size(self) -> int:
        return self.latents_BSW.shape[1]

    @property
    def block_bytes(self) -> int:
        return math.prod(self.latents_BSW.shape[1:]) * self.latents_BSW.element_size()

    def grown(self, num_blocks: int) -> "LatentPages":
        return LatentPages(grown(self.latents_BSW, num_blocks))

    def write(self, latents_TW: Tensor, slots_T: Tensor) -> None:
        self.latents_BSW.flatten(0, 1).index_copy_(0, slots_T, latents_TW)

    def gathered(self, blocks_M: Tensor) -> Tensor:
        return self.latents_BSW.index_select(0, blocks_M).flatten(0, 1)

    def move(self, sources_M: Tensor, targets_M: Tensor) -> None:
        """Copy the tokens in slots `sources` to slots `targets`; all are read before any is written."""
        rows = self.latents_BSW.flatten(0, 1)
        rows[targets_M] = rows[sources_M]

    def fill_normal(self, first_block: int) -> None:
        torch.nn.init.normal_(self.latents_BSW[first_block:])


def attention_latent_decode(
    q_DNH: Tensor, pages: LatentPages, block_tables_DM: Tensor, context_lens_D: Tensor, heads: LatentHeads
) -> Tensor:
    """One new token per sequence, [D, N, V]. q: queries, P elements that meet keys made of latents, then r rotated
    ones; block_tables, context_lens: blocks of each sequence, and its tokens, the new one included."""
    keys_NPR, values_NVR, scale = heads
    num_nope, rank = keys_NPR.shape[1:]
    absorbed_DNR = torch.einsum("dnp,npr->dnr", q_DNH[..., :num_nope], keys_NPR)
    q_DNW = torch.cat((absorbed_DNR, q_DNH[..., num_nope:]), dim=-1) * scale
    sums_DNR = q_DNW.new_empty(*q_DNH.shape[:2], rank)
    for row, context in enumerate(context_lens_D.tolist()):
        latents_LW = pages.gathered(block_tables_DM[row, : -(-context // pages.block_size)])[:context]
        scores_NL = q_DNW[row] @ latents_LW.T
        weights_NL = torch.softmax(scores_NL.float(), dim=-1).to(q_DNW.dtype)
        sums_DNR[row] = weights_NL @ latents_LW[:, :rank]
    return torch.einsum("dnr,nvr->dnv", sums_DNR, values_NVR)


def attention_latent_prefill(q_TNH: Tensor, pages: LatentPages, chunks: Chunks, heads: LatentHeads) -> Tensor:
    """Prompt chunks, [T, N, V], whose latents are in their pages; q and heads as those of the decode."""
    keys_NPR, values_NVR, scale = heads
    (num_heads, _, rank), size = keys_NPR.shape, pages.block_size
    q_TNH = q_TNH * (scale * math.sqrt(q_TNH.shape[-1]))  # `attend` divides by the root
    out_TNV = q_TNH.new_empty(*q_TNH.shape[:2], values_NVR.shape[1])
    for row, (begin, end, computed) in enumerate(chunks.spans()):
        total = computed + end - begin
        latents_LW = pages.gathered(chunks.tables_GM[row, : -(-total // size)])[:total]
        k_NLP = latents_LW[:, :rank] @ keys_NPR.transpose(1, 2)
        k_NLH = torch.cat((k_NLP, latents_LW[:, rank:].expand(num_heads, -1, -1)), dim=-1)
        v_NLV = latents_LW[:, :rank] @ values_NVR.transpose(1, 2)
        for tile in range(begin, end, QUERY_TILE):
            rows = slice(tile, min(tile + QUERY_TILE, end))
            first, last = computed + tile - begin, computed + rows.stop - begin
            queries_T, keys_L = (torch.arange(p, last, device=q_TNH.device) for p in (first, 0))
            mask_TL = visible(queries_T, keys_L)
            out_TNV[rows] = attend(q_TNH[rows], k_NLH[:, :last], v_NLV[:, :last], mask_TL)
    return out_TNV


_DEEPSEEK = (128, 64, 512, 128)  # elements of a query that meet keys of latents, rotated ones, of a latent, of a value


def tiny(dtype: torch.dtype) -> list[Problem]:
    small = (12, 8, 32, 10)
    return [
        _problem([1, 19, 40], 6, small, dtype, 4),
        _problem([33, 70], 20, (10, 6, 24, 16), dtype),
        _problem([(9, 0), (2, 30), (140, 5)], 3, small, dtype, 4),
        _problem([(50, 90)], 2, (16, 16, 32, 16), dtype),
        _problem([(3, 37), (2, 0)], 4, small, dtype, 4),
    ]


def serving() -> list[Problem]:
    decodes = [([4096] * 32, 128), ([2048] * 128, 128), ([32768], 128), ([4096] * 64, 16), ([16384] * 8, 16)]
    chunks = [([(4096, 0)], 128)]
    chunks += [(spans, 16) for spans in ([(1024, 0)] * 8, [(8192, 0)], [(2048, 14336)], [(4, 8192)] * 32)]
    problems = [_problem(contexts, heads, _DEEPSEEK, torch.bfloat16) for contexts, heads in decodes]
    return problems + [_problem(spans, heads, _DEEPSEEK, torch.bfloat16) for spans, heads in chunks]


def _problem(
    seqs: Sequence[int] | Sequence[tuple[int, int]],
    num_heads: int,
    dims: tuple[int, int, int, int],
    dtype: torch.dtype,
    page: int = 16,
) -> Problem:
    """seqs: contexts of decodes, or (new tokens, tokens computed before) of a prompt's chunks"""
    nope, rotated, rank, value = dims
    contexts = [seq for seq in seqs if isinstance(seq, int)]
    spans = [seq for seq in seqs if not isinstance(seq, int)]
    starts = list(accumulate((new for new, _ in spans), initial=0))
    width = -(-max([*contexts, *map(sum, spans)]) // page)

    def make(inputs: Inputs) -> tuple[Any, ...]:
        q = inputs.normal(len(contexts) or starts[-1], num_heads, nope + rotated, dtype=dtype)
        pages = LatentPages(inputs.normal(width * len(seqs) + 1, page, rank + rotated, dtype=dtype))
        tables = shuffled_tables(inputs, len(seqs), width)
        lengths = (contexts,) if contexts else (starts, [done for _, done in spans])
        keys = inputs.normal(num_heads, nope, rank, dtype=dtype, scale=rank**-0.5)
        values = inputs.normal(num_heads, value, rank, dtype=dtype, scale=rank**-0.5)
        heads = LatentHeads(keys, values, 1 / math.sqrt(nope + rotated))
        sequences = (tables, *(inputs.of(part, torch.int64) for part in lengths))
        return q, pages, *(sequences if contexts else (Chunks(*sequences),)), heads

    formats = (NAMES[dtype], dtype.itemsize, dtype.itemsize)
    if contexts:
        operator, own = "attention_latent_decode", {"step": max(contexts) - 1}
        work = latent_decode(len(contexts), sum(contexts), Heads(num_heads, 1, rank + rotated, rank, *formats))
    else:
        operator = "attention_latent_prefill"
        own = {"isl": max(new for new, _ in spans), "step": max(done for _, done in spans)}
        work = flash_prefill(spans, Heads(num_heads, num_heads, nope + rotated, value, *formats))
    sizes: Sizes = {"batch_size": len(seqs), **own, "num_heads": num_heads, "kv_lora_rank": rank,
             "qk_rope_head_dim": rotated, "block_size": page, "attn_dtype": NAMES[dtype]}  # fmt: skip
    return Problem(operator, sizes, make, work, TOLERANCE[dtype])

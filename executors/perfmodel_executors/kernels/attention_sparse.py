"""Block-sparse attention over paged keys and values: what a query's block does not see is neither read nor computed.
Patterns are BigBird's and Longformer's, for text that is generated. Blocks of tokens are whole pages, so that what is
seen is gathered page by page. Positions are those in the text."""

import math
import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from perfmodel.models.architecture import BlockSparsity
from perfmodel_executors.kernels import attention_decode as decodes
from perfmodel_executors.kernels import attention_prefill as prompts
from perfmodel_executors.kernels.attention_decode import attend_one
from perfmodel_executors.kernels.attention_prefill import attend_masked
from perfmodel_executors.kernels.kv_pages import Chunks, KVPages
from perfmodel_executors.kernels.problem import Inputs, Problem


@lru_cache(maxsize=65536)
def seen_blocks(block: int, sparsity: BlockSparsity) -> tuple[int, ...]:
    """Ascending: blocks at the beginning, blocks anywhere (the same whenever they are asked for), the nearest ones, the
    queries' own last. With a fraction, BigBird's random blocks are half of what the first ones leave."""
    count = sparsity.num_blocks or math.ceil((sparsity.fraction or 1.0) * (block + 1))
    if count > block:
        return tuple(range(block + 1))
    first = min(sparsity.num_globals, count - 1)
    drawn = min(sparsity.num_random, count - first - 1)
    if sparsity.num_blocks is None:
        drawn = (count - first) // 2 if sparsity.num_random else 0
    nearest = count - first - drawn
    between = range(first, block - nearest + 1)
    chosen = sorted(random.Random(block).sample(between, drawn))
    return (*range(first), *chosen, *range(block - nearest + 1, block + 1))


def attention_sparse_decode(
    q_DNH: Tensor, pages: KVPages, block_tables_DM: Tensor, context_lens_D: Tensor, sparsity: BlockSparsity
) -> Tensor:
    """softmax(q k^T / sqrt(H)) v of one token per sequence over the blocks that its block sees, [D, N, H_v]."""
    out_DNH = q_DNH.new_empty(*q_DNH.shape[:2], pages.v_dim)
    for row, context in enumerate(context_lens_D.tolist()):
        k_LKH, v_LKH = _seen(pages, block_tables_DM[row], context, sparsity, q_DNH.dtype)
        out_DNH[row] = attend_one(q_DNH[row], k_LKH, v_LKH)
    return out_DNH


def attention_sparse_prefill(q_TNH: Tensor, pages: KVPages, chunks: Chunks, sparsity: BlockSparsity) -> Tensor:
    """The same for the queries of prompt chunks, block by block, [T, N, H_v]; causal within a query's own block."""
    out_TNH = q_TNH.new_empty(*q_TNH.shape[:2], pages.v_dim)
    for row, (begin, stop, computed) in enumerate(chunks.spans()):
        position, total = computed, computed + stop - begin
        while position < total:
            end = min((position // sparsity.block + 1) * sparsity.block, total)
            k_LKH, v_LKH = _seen(pages, chunks.tables_GM[row], end, sparsity, q_TNH.dtype)
            size, own = end - position, (end - 1) % sparsity.block + 1  # queries, and keys of their own block
            mask_TL = torch.ones(size, len(k_LKH), dtype=torch.bool, device=q_TNH.device)
            mask_TL[:, len(k_LKH) - own :] = mask_TL.new_ones(size, own).tril(own - size)
            rows = slice(begin + position - computed, begin + end - computed)
            out_TNH[rows] = attend_masked(q_TNH[rows], k_LKH.transpose(0, 1), v_LKH.transpose(0, 1), mask_TL)
            position = end
    return out_TNH


def _seen(
    pages: KVPages, table_M: Tensor, context: int, sparsity: BlockSparsity, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values [L, K, H] of the blocks that the block of the last of `context` tokens sees, up to that token."""
    blocks = seen_blocks((context - 1) // sparsity.block, sparsity)
    per_block, last = sparsity.block // pages.block_size, -(-context // pages.block_size)
    numbers = [page for b in blocks for page in range(b * per_block, min((b + 1) * per_block, last))]
    k_LKH, v_LKH = pages.gathered(table_M[torch.tensor(numbers, device=table_M.device)], dtype)
    num_seen = (len(blocks) - 1) * sparsity.block + (context - 1) % sparsity.block + 1
    return k_LKH[:num_seen], v_LKH[:num_seen]


def tiny(dtype: torch.dtype) -> list[Problem]:
    patterns = BlockSparsity(16, 3, None, 1, 1), BlockSparsity(32, None, 0.5, 1), BlockSparsity(16, 1)
    problems = [*decodes.tiny(dtype), *prompts.tiny(dtype)]
    return [_over(problem, pattern) for problem in problems if _is_plain(problem) for pattern in patterns]


def serving() -> list[Problem]:
    problems = [*decodes.serving()[:3], *prompts.serving()[:3]]
    return [_over(problem, BlockSparsity(64, 8, None, 2, 3)) for problem in problems if _is_plain(problem)]


def _is_plain(problem: Problem) -> bool:
    sizes = problem.sizes
    limits = [sizes.get(name, 0) for name in ("window_size", "chunk", "tree")]
    is_whole = sizes["kv_cache_dtype"] == sizes["attn_dtype"] and sizes["block_size"] == 16
    return is_whole and "sinks" not in sizes and all(limit in (0, "no") for limit in limits)


def _over(problem: Problem, sparsity: BlockSparsity) -> Problem:
    def make(inputs: Inputs) -> tuple[Any, ...]:
        return *problem.make(inputs)[:-1], sparsity  # in place of the rule

    pattern = {"block": sparsity.block, "blocks": sparsity.num_blocks or 0, "random": sparsity.num_random}
    sizes, operator = {**problem.sizes, **pattern}, problem.operator.replace("attention", "attention_sparse")
    return replace(problem, operator=operator, sizes=sizes, make=make, work=None, baselines={})

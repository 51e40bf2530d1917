"""Block-sparse attention over paged keys and values: what a query's block does not see is neither read nor computed.

Blocks of tokens are whole pages, so that what is seen is gathered page by page. Positions are those in the text.
"""

__all__ = ["attention_sparse_decode", "attention_sparse_prefill"]

import torch
from torch import Tensor

from perfmodel.models.architecture import BlockSparsity
from perfmodel_executors.kernels.attention_prefill.reference import attend_masked
from perfmodel_executors.kernels.attention_sparse.blocks import seen_blocks
from perfmodel_executors.kernels.kv_pages import KVPages
from perfmodel_executors.kernels.one_query import attend_one


def attention_sparse_decode(
    q_DNH: Tensor, pages: KVPages, block_tables_DM: Tensor, context_lens_D: Tensor, sparsity: BlockSparsity
) -> Tensor:
    """softmax(q k^T / sqrt(H)) v of one token per sequence over the blocks that its block sees, [D, N, H_v]."""
    num_seqs, num_heads, _ = q_DNH.shape
    out_DNH = q_DNH.new_empty(num_seqs, num_heads, pages.v_dim)
    for row, context in enumerate(context_lens_D.tolist()):
        k_LKH, v_LKH = _seen(pages, block_tables_DM[row], context, sparsity, q_DNH.dtype)
        out_DNH[row] = attend_one(q_DNH[row], k_LKH, v_LKH)
    return out_DNH


def attention_sparse_prefill(
    q_TNH: Tensor,
    pages: KVPages,
    block_tables_GM: Tensor,
    query_starts_G: Tensor,
    num_computed_G: Tensor,
    sparsity: BlockSparsity,
) -> Tensor:
    """The same for the queries of prompt chunks, block by block, [T, N, H_v]; causal within a query's own block."""
    starts: list[int] = query_starts_G.tolist()
    out_TNH = q_TNH.new_empty(*q_TNH.shape[:2], pages.v_dim)
    for row, computed in enumerate(num_computed_G.tolist()):
        begin, total = starts[row], computed + starts[row + 1] - starts[row]
        position = computed
        while position < total:
            end = min((position // sparsity.block + 1) * sparsity.block, total)
            k_LKH, v_LKH = _seen(pages, block_tables_GM[row], end, sparsity, q_TNH.dtype)
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

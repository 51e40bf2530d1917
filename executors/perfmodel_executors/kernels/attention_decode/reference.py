"""Attention of one new token per sequence over its paged keys and values.

Sequence by sequence, so that the time is a sum over sequences of (a constant + a part linear in the context): no
padding to the longest context, whose cost would depend on which sequences meet in a batch.
"""

__all__ = ["attention_decode"]

from torch import Tensor

from perfmodel_executors.kernels.kv_pages import KVPages
from perfmodel_executors.kernels.one_query import attend_one
from perfmodel_executors.kernels.spans import first_visible


def attention_decode(
    q_DNH: Tensor,
    pages: KVPages,
    block_tables_DM: Tensor,
    context_lens_D: Tensor,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(H)) v for each sequence, [D, N, H_v].

    block_tables: block ids of each sequence, padded with anything up to the longest
    context_lens: tokens in the KV cache, the new one included
    window:       only the last `window` tokens are seen
    chunk:        only the tokens of the new token's own chunk of this length are seen
    """
    num_seqs, num_heads, _ = q_DNH.shape
    block_size = pages.block_size
    out_DNH = q_DNH.new_empty(num_seqs, num_heads, pages.v_dim)
    for row, context in enumerate(context_lens_D.tolist()):
        first = first_visible(context - 1, window, chunk)
        block = first // block_size
        blocks = block_tables_DM[row, block : -(-context // block_size)]
        seen = slice(first - block * block_size, context - block * block_size)
        k_LKH, v_LKH = pages.gathered(blocks, q_DNH.dtype)
        out_DNH[row] = attend_one(q_DNH[row], k_LKH[seen], v_LKH[seen])
    return out_DNH

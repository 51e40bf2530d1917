"""Block-sparse attention by the kernels of plain attention, over tables of the blocks that are seen. What a query's
block sees are whole pages, and keys carry their positions in them: so a decode is one over a shorter table, and each
block of a prompt is a chunk of its own, behind a prefix of the blocks that it sees."""

from functools import lru_cache

import torch
from torch import Tensor

from perfmodel.models.architecture import BlockSparsity
from perfmodel_executors.kernels.attention_sparse import seen_blocks
from perfmodel_executors.kernels.kv_pages import Chunks, KVPages
from perfmodel_executors.kernels.triton.attention_decode import attention_decode
from perfmodel_executors.kernels.triton.attention_prefill import attention_prefill


def attention_sparse_decode(
    q_DNH: Tensor, pages: KVPages, block_tables_DM: Tensor, context_lens_D: Tensor, sparsity: BlockSparsity
) -> Tensor:
    last_D = (context_lens_D - 1).clamp(min=0)
    tables_DM, before_D = _seen_pages(pages, block_tables_DM, last_D // sparsity.block, sparsity)
    seen_D = before_D + last_D % sparsity.block + 1
    return attention_decode(q_DNH, pages, tables_DM, torch.where(context_lens_D > 0, seen_D, 0))


def attention_sparse_prefill(q_TNH: Tensor, pages: KVPages, chunks: Chunks, sparsity: BlockSparsity) -> Tensor:
    tables_GM, query_starts_G, num_computed_G, *_ = chunks
    size, num_tokens, num_chunks, device = sparsity.block, len(q_TNH), len(num_computed_G), q_TNH.device
    begins_G = query_starts_G[:-1]
    first_G = begins_G // size + 2 * torch.arange(num_chunks, device=device)  # of each chunk's parts
    part_P = torch.arange(num_tokens // size + 2 * num_chunks, device=device)
    chunk_P = torch.searchsorted(first_G, part_P, right=True) - 1
    computed_P, ends_P = num_computed_G[chunk_P], (num_computed_G + query_starts_G.diff())[chunk_P]
    block_P = computed_P // size + part_P - first_G[chunk_P]
    position_P = torch.minimum(torch.maximum(block_P * size, computed_P), ends_P)  # at the end: nothing is left
    block_P = torch.minimum(block_P, (ends_P - 1).clamp(min=0) // size)
    tables_PM, before_P = _seen_pages(pages, tables_GM[chunk_P], block_P, sparsity)
    starts_P = torch.cat((begins_G[chunk_P] + position_P - computed_P, query_starts_G[-1:]))
    parts = Chunks(tables_PM, starts_P, before_P + position_P - block_P * size)
    return attention_prefill(q_TNH, pages, parts)


def _seen_pages(pages: KVPages, tables_PM: Tensor, block_P: Tensor, sparsity: BlockSparsity) -> tuple[Tensor, Tensor]:
    """(pages of the blocks that each of `block` sees, its own last; tokens before its own)."""
    per_block, columns = sparsity.block // pages.block_size, tables_PM.shape[1]
    num_blocks = -(-columns // per_block)
    seen_BW, counts_B = _seen_by(sparsity, 1 << (num_blocks - 1).bit_length(), tables_PM.device)
    within = torch.arange(per_block, device=tables_PM.device)
    columns_PM = (seen_BW[block_P][..., None] * per_block + within).flatten(1).clamp(max=columns - 1)
    return tables_PM.gather(1, columns_PM), (counts_B[block_P] - 1) * sparsity.block


@lru_cache(maxsize=64)
def _seen_by(sparsity: BlockSparsity, num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(blocks that each of the first `num_blocks` sees, padded with zeros, [B, W]; how many, [B])."""
    seen = [torch.tensor(seen_blocks(block, sparsity)) for block in range(num_blocks)]
    table_BW = torch.nn.utils.rnn.pad_sequence(seen, batch_first=True)
    return table_BW.to(device), torch.tensor([len(item) for item in seen]).to(device)

"""Keys and values of heads from pages of latents: one product for each head, once for all queries of a chunk.

    k_j = W_k c_j, v_j = W_v c_j    FLOPs = 2 R (P + V) for each head and token, bytes written b (P + V)

What is written is what the products of attention want: for each chunk and head, rows as wide as tiles (padded with
zeros), whole tiles of tokens behind one another (zero behind the context), and the rotated keys beside them, once for
all heads. So the kernel that reads them needs neither block tables nor masks, and the copy engine can fetch its tiles.
"""

__all__ = ["TOKENS", "Chunks", "ExpandedKV", "expand_latents"]

from typing import NamedTuple, TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.attention_latent.heads import LatentHeads
from perfmodel_executors.kernels.attention_latent.pages import LatentPages
from perfmodel_executors.kernels.kv_pages.triton import token_rows
from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.row_tiles.triton import has_copy_engine
from perfmodel_executors.kernels.tiles import TileConfig, capability_of, padded, pick, pipelined_bytes

Chunks: TypeAlias = tuple[Tensor, Tensor, Tensor]  # block tables, first query rows, tokens computed before

TOKENS = 128  # of a tile, and what contexts are rounded up to
# Sums take 128 registers of each thread. With slices of 32 of the rank and more, fragments spill on Ampere.
_CANDIDATES = [
    TileConfig({"BLOCK_K": 64}, Options(num_warps=8, num_stages=3)),
    TileConfig({"BLOCK_K": 32}, Options(num_warps=8, num_stages=3)),
    TileConfig({"BLOCK_K": 16}, Options(num_warps=8, num_stages=4)),
]


class ExpandedKV(NamedTuple):
    """keys [G, N, L, P], rotated [G, L, r], values [G, N, L, V], of N heads; all sizes are those of tiles."""

    keys: Tensor
    rotated: Tensor
    values: Tensor


@triton.jit(do_not_specialize=["table_stride", "length", "first_head"])
def _expand_latents_kernel(
    latents_ptr, tables_ptr, starts_ptr, computed_ptr, key_weights_ptr, value_weights_ptr, keys_ptr, rotated_ptr,
    values_ptr, table_stride, length, first_head,
    RANK: tl.constexpr, NOPE: tl.constexpr, ROTATED: tl.constexpr, VALUE: tl.constexpr, NOPE_PAD: tl.constexpr,
    ROTATED_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.program_id(1)
    chunk = tl.program_id(2).to(tl.int64)
    new = tl.load(starts_ptr + chunk + 1) - tl.load(starts_ptr + chunk)
    context = (tl.load(computed_ptr + chunk) + new).to(tl.int32)
    if tile * TOKENS >= context:
        return
    position = tile * TOKENS + tl.arange(0, TOKENS)
    is_inside = position < context
    rows = token_rows(tables_ptr + chunk * table_stride, position, is_inside, PAGE, True).to(tl.int64)
    latent_ptrs = latents_ptr + rows[:, None] * (RANK + ROTATED)
    p = tl.arange(0, NOPE_PAD)
    v = tl.arange(0, VALUE_PAD)
    weight_head = (first_head + head).to(tl.int64)
    key_ptrs = key_weights_ptr + (weight_head * NOPE + p)[None, :] * RANK
    value_ptrs = value_weights_ptr + (weight_head * VALUE + v)[None, :] * RANK
    keys = tl.zeros([TOKENS, NOPE_PAD], tl.float32)
    values = tl.zeros([TOKENS, VALUE_PAD], tl.float32)
    for begin in range(0, RANK, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        latents = tl.load(latent_ptrs + k[None, :], mask=is_inside[:, None] & (k < RANK)[None, :], other=0.0)
        if NOPE_PAD == NOPE and RANK % BLOCK_K == 0:
            key_weights = tl.load(key_ptrs + k[:, None])
        else:
            key_weights = tl.load(key_ptrs + k[:, None], mask=(p < NOPE)[None, :] & (k < RANK)[:, None], other=0.0)
        keys = tl.dot(latents, key_weights, keys, input_precision="ieee")
        if VALUE_PAD == VALUE and RANK % BLOCK_K == 0:
            value_weights = tl.load(value_ptrs + k[:, None])
        else:
            value_weights = tl.load(value_ptrs + k[:, None], mask=(v < VALUE)[None, :] & (k < RANK)[:, None], other=0.0)
        values = tl.dot(latents, value_weights, values, input_precision="ieee")
    own = (chunk * tl.num_programs(0) + head) * length + position
    tl.store(keys_ptr + own[:, None] * NOPE_PAD + p[None, :], keys.to(keys_ptr.dtype.element_ty))
    tl.store(values_ptr + own[:, None] * VALUE_PAD + v[None, :], values.to(values_ptr.dtype.element_ty))
    if head == 0:
        r = tl.arange(0, ROTATED_PAD)
        rotated = tl.load(latent_ptrs + RANK + r[None, :], mask=is_inside[:, None] & (r < ROTATED)[None, :], other=0.0)
        tl.store(rotated_ptr + (chunk * length + position)[:, None] * ROTATED_PAD + r[None, :], rotated)


def expand_latents(pages: LatentPages, chunks: Chunks, heads: LatentHeads, which: slice) -> ExpandedKV:
    """Keys and values of the heads `which` for all tokens of all chunks; behind a chunk's context, anything."""
    tables_GM, (num_chunks, width) = chunks[0], chunks[0].shape
    num_heads, nope, rank = heads.keys_NPR[which].shape
    value, rotated = heads.values_NVR.shape[1], pages.latents_BSW.shape[2] - rank
    length = triton.cdiv(width * pages.block_size, TOKENS) * TOKENS
    wide = {"NOPE_PAD": padded(nope), "ROTATED_PAD": padded(rotated), "VALUE_PAD": padded(value)}
    latents = pages.latents_BSW
    expanded = ExpandedKV(
        latents.new_empty(num_chunks, num_heads, length, wide["NOPE_PAD"]),
        latents.new_empty(num_chunks, length, wide["ROTATED_PAD"]),
        latents.new_empty(num_chunks, num_heads, length, wide["VALUE_PAD"]),
    )
    args = (
        latents, *chunks, heads.keys_NPR, heads.values_NVR, *expanded, tables_GM.stride(0), length,
        which.start,
    )  # fmt: skip
    sizes = {"RANK": rank, "NOPE": nope, "ROTATED": rotated, "VALUE": value, **wide, "PAGE": pages.block_size}
    operands = TOKENS + wide["NOPE_PAD"] + wide["VALUE_PAD"]

    def run(config: TileConfig) -> None:
        grid = (num_heads, length // TOKENS, num_chunks)
        launch(_expand_latents_kernel, grid, *args, options=config.options, TOKENS=TOKENS, **sizes, **config.sizes)

    def needed(config: TileConfig, capability: int) -> int:
        return pipelined_bytes(operands * config.sizes["BLOCK_K"] * latents.element_size(), config, capability)

    problem = (num_heads, num_chunks.bit_length(), length.bit_length(), *sizes.values(), latents.dtype)
    copies = has_copy_engine(capability_of(latents.device) or 0)
    listed = _CANDIDATES if copies else _CANDIDATES[-1:]
    run(pick("expand_latents", problem, lambda: listed, needed, run, latents.device))
    return expanded

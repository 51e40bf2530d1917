"""Prompts over pages of latents, with the keys and values of each head made of them first (`expand`).

Expanded and not absorbed: a pair of a query and a key is then 2 (P + r + V) FLOPs of a head instead of 2 (2 R + r), 640
instead of 2,176 for DeepSeek-V3, which soon outweighs what expanding costs, once per token of context. Only few new
tokens behind a long prefix are less work absorbed (`LatentHeads.absorbs`); they go as so many decodes.

A program has a tile of queries of one head and walks over the keys before it, first those that all its queries see
(no masks), then the diagonal. Keys, rotated keys and values are rows of three matrices, without block tables between:
where there is a copy engine, it fetches them (tensor descriptors), and no thread computes an address. Heads go in
groups whose keys and values fit a workspace, which bounds the memory that a long context takes.
"""

__all__ = ["attention_latent_prefill", "expanded_shared_bytes"]

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.attention_latent.heads import LatentHeads
from perfmodel_executors.kernels.attention_latent.pages import LatentPages
from perfmodel_executors.kernels.attention_latent.triton.decode import attention_latent_decode
from perfmodel_executors.kernels.attention_latent.triton.expand import Chunks, ExpandedKV, expand_latents
from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.row_tiles.triton import has_copy_engine, provide_scratch, row_tiles, tile_rows
from perfmodel_executors.kernels.segments.triton import num_tiles, tile_of_segment
from perfmodel_executors.kernels.tiles import TileConfig, capability_of, padded, pick

_LEAST = tl.constexpr(-1.0e30)  # finite, so that a row that sees nothing takes exp2(-inf), not NaN
_WORKSPACE_BYTES = 1 << 30  # of keys and values, as far as one head's fit
# Binaries decide the order. Two warp groups on an H200 take 2,560 cycles of their tensor cores for 128 keys, and issue
# what follows beside or behind them: 1,060 instructions a scheduler with tiles of 128 keys from the copy engine, 1,520
# with tiles of 64, 1,540 with addresses computed by threads (those take 36 registers more, too).
_COPIED = [
    TileConfig({"ROWS": 128, "KEYS": 128, "DESCRIPTORS": 1}, Options(num_warps=8, num_stages=2)),
    TileConfig({"ROWS": 128, "KEYS": 64, "DESCRIPTORS": 1}, Options(num_warps=8, num_stages=3)),
    TileConfig({"ROWS": 128, "KEYS": 64, "DESCRIPTORS": 0}, Options(num_warps=8, num_stages=3)),
    TileConfig({"ROWS": 64, "KEYS": 64, "DESCRIPTORS": 0}, Options(num_warps=4, num_stages=2)),
]
_LOADED = [
    TileConfig({"ROWS": 64, "KEYS": 32, "DESCRIPTORS": 0}, Options(num_warps=4, num_stages=2)),
    TileConfig({"ROWS": 128, "KEYS": 32, "DESCRIPTORS": 0}, Options(num_warps=8, num_stages=2)),
    TileConfig({"ROWS": 32, "KEYS": 16, "DESCRIPTORS": 0}, Options(num_warps=4, num_stages=2)),
]


@triton.jit
def _attend_expanded(
    acc, largest, total, q, q_rotated, keys, rotated, values, head_row, chunk_row, begin, end, query_position,
    scale_log2, WIDTHS: tl.constexpr, KEYS: tl.constexpr, DESCRIPTORS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax over keys [begin, end); masked: a query sees those up to its own position."""
    for start in range(begin, end, KEYS):
        k = tile_rows(keys, head_row + start, KEYS, WIDTHS[0], DESCRIPTORS)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        k_rotated = tile_rows(rotated, chunk_row + start, KEYS, WIDTHS[1], DESCRIPTORS)
        scores = tl.dot(q_rotated, tl.trans(k_rotated), scores, input_precision="ieee")
        if MASKED:
            is_seen = (start + tl.arange(0, KEYS))[None, :] <= query_position[:, None]
            scores = tl.where(is_seen, scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tile_rows(values, head_row + start, KEYS, WIDTHS[2], DESCRIPTORS)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        largest = larger
    return acc, largest, total


@triton.jit(do_not_specialize=["num_chunks", "length", "first_head"])
def _attention_expanded_kernel(
    q_ptr, keys_ptr, rotated_ptr, values_ptr, starts_ptr, computed_ptr, out_ptr, num_chunks, length, first_head,
    scale_log2,
    N: tl.constexpr, NOPE: tl.constexpr, ROTATED: tl.constexpr, VALUE: tl.constexpr, NOPE_PAD: tl.constexpr,
    ROTATED_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    chunk, begin, count = tile_of_segment(starts_ptr, num_chunks, tile, ROWS)
    first_token = (tile - begin // ROWS - chunk) * ROWS
    if first_token >= count:
        return
    prefix = tl.load(computed_ptr + chunk).to(tl.int32)
    token = first_token + tl.arange(0, ROWS)
    is_row = token < count
    row = (begin + token).to(tl.int64) * N + first_head + head
    p = tl.arange(0, NOPE_PAD)
    r = tl.arange(0, ROTATED_PAD)
    q_ptrs = q_ptr + row[:, None] * (NOPE + ROTATED)
    q = tl.load(q_ptrs + p[None, :], mask=is_row[:, None] & (p < NOPE)[None, :], other=0.0)
    q_rotated = tl.load(q_ptrs + NOPE + r[None, :], mask=is_row[:, None] & (r < ROTATED)[None, :], other=0.0)

    heads = tl.num_programs(0)
    WIDTHS: tl.constexpr = (NOPE_PAD, ROTATED_PAD, VALUE_PAD)
    keys = row_tiles(keys_ptr, num_chunks * heads * length, KEYS, NOPE_PAD, DESCRIPTORS)
    rotated = row_tiles(rotated_ptr, num_chunks * length, KEYS, ROTATED_PAD, DESCRIPTORS)
    values = row_tiles(values_ptr, num_chunks * heads * length, KEYS, VALUE_PAD, DESCRIPTORS)
    head_row = (chunk * heads + head) * length
    chunk_row = chunk * length
    to_all = (prefix + first_token + 1) // KEYS * KEYS
    high = prefix + tl.minimum(first_token + ROWS, count)

    largest = tl.full([ROWS], _LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    acc, largest, total = _attend_expanded(
        acc, largest, total, q, q_rotated, keys, rotated, values, head_row, chunk_row, 0, to_all, prefix + token,
        scale_log2, WIDTHS, KEYS, DESCRIPTORS, False,
    )  # fmt: skip
    acc, largest, total = _attend_expanded(
        acc, largest, total, q, q_rotated, keys, rotated, values, head_row, chunk_row, to_all, high, prefix + token,
        scale_log2, WIDTHS, KEYS, DESCRIPTORS, True,
    )  # fmt: skip
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    v = tl.arange(0, VALUE_PAD)
    tl.store(out_ptr + row[:, None] * VALUE + v[None, :], out, mask=is_row[:, None] & (v < VALUE)[None, :])


def attention_latent_prefill(
    q_TNH: Tensor,
    pages: LatentPages,
    block_tables_GM: Tensor,
    query_starts_G: Tensor,
    num_computed_G: Tensor,
    heads: LatentHeads,
    *,
    config: TileConfig | None = None,
) -> Tensor:
    """Prompt chunks, [T, N, V], whose latents are in their pages; the reference says what the arguments are."""
    num_tokens, num_heads, _ = q_TNH.shape
    num_chunks, width = block_tables_GM.shape
    chunks = (block_tables_GM, query_starts_G, num_computed_G)
    if heads.absorbs(-(-num_tokens // num_chunks), width * pages.block_size):
        return _as_decodes(q_TNH, pages, chunks, heads)
    q_TNH = q_TNH.contiguous()
    out_TNV = q_TNH.new_empty(num_tokens, num_heads, heads.values_NVR.shape[1])
    at_once = _heads_at_once(num_chunks * width * pages.block_size, heads, q_TNH.element_size())
    for first in range(0, num_heads, at_once):
        which = slice(first, min(first + at_once, num_heads))
        expanded = expand_latents(pages, chunks, heads, which)
        _attend(q_TNH, expanded, query_starts_G, num_computed_G, heads, which, out_TNV, config)
    return out_TNV


def _as_decodes(q_TNH: Tensor, pages: LatentPages, chunks: Chunks, heads: LatentHeads) -> Tensor:
    """Each token as a sequence of its own, that ends with it."""
    tables_GM, starts_G, computed_G = chunks
    token_T = torch.arange(len(q_TNH), device=q_TNH.device)
    chunk_T = torch.searchsorted(starts_G, token_T, right=True) - 1
    context_T = computed_G[chunk_T] + token_T - starts_G[chunk_T] + 1
    return attention_latent_decode(q_TNH, pages, tables_GM[chunk_T], context_T, heads)


def _heads_at_once(num_tokens: int, heads: LatentHeads, element_bytes: int) -> int:
    """Heads whose keys and values of `num_tokens` fit the workspace; one at least."""
    (num_heads, nope, _), value = heads.keys_NPR.shape, heads.values_NVR.shape[1]
    per_head = num_tokens * (padded(nope) + padded(value)) * element_bytes
    return max(1, min(num_heads, _WORKSPACE_BYTES // max(1, per_head)))


def _attend(
    q_TNH: Tensor,
    expanded: ExpandedKV,
    query_starts_G: Tensor,
    num_computed_G: Tensor,
    heads: LatentHeads,
    which: slice,
    out_TNV: Tensor,
    config: TileConfig | None,
) -> None:
    """Writes what the heads `which` attend to."""
    (num_tokens, num_heads, width), (num_chunks, at_once, length, _) = q_TNH.shape, expanded.keys.shape
    nope, value = heads.keys_NPR.shape[1], out_TNV.shape[2]
    args = (
        q_TNH, *expanded, query_starts_G, num_computed_G, out_TNV, num_chunks, length, which.start,
        heads.scale * math.log2(math.e),
    )  # fmt: skip
    widths = expanded.keys.shape[3], expanded.rotated.shape[2], expanded.values.shape[3]
    constants = {
        "N": num_heads, "NOPE": nope, "ROTATED": width - nope, "VALUE": value,
        "NOPE_PAD": widths[0], "ROTATED_PAD": widths[1], "VALUE_PAD": widths[2],
    }  # fmt: skip

    def run(config: TileConfig) -> None:
        if config.sizes["DESCRIPTORS"]:
            provide_scratch(q_TNH.device)
        grid = (at_once, num_tiles(num_tokens, num_chunks, config.sizes["ROWS"]))
        launch(_attention_expanded_kernel, grid, *args, options=config.options, **constants, **config.sizes)

    if config is None:
        problem = (num_tokens.bit_length(), num_chunks.bit_length(), length.bit_length(), at_once)

        def needed(config: TileConfig, capability: int) -> int:
            return expanded_shared_bytes(config, capability, widths, q_TNH.element_size())

        key = (*problem, *constants.values(), q_TNH.dtype)
        copies = has_copy_engine(capability_of(q_TNH.device) or 0)
        listed = [*_COPIED, *_LOADED] if copies else _LOADED
        config = pick("attention_latent_prefill", key, lambda: listed, needed, run, q_TNH.device)
    run(config)


def expanded_shared_bytes(config: TileConfig, capability: int, widths: tuple[int, int, int], element_bytes: int) -> int:
    """An upper bound: queries, the stages' keys and values, and weights on their way to the second product."""
    rows, keys, stages = config.sizes["ROWS"], config.sizes["KEYS"], config.options.num_stages
    reads_sram = rows >= 64 and has_copy_engine(capability)
    buffers = stages if reads_sram else stages - 1
    elements = rows * sum(widths[:2]) + buffers * keys * sum(widths) + (0 if reads_sram else rows * keys)
    return elements * element_bytes + 1024 * config.sizes["DESCRIPTORS"]  # barriers

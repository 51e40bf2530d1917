"""Attention over pages of latents: decodes absorb the up-projections, prompts expand what they read.

    decode   s_j = q_c . c_j + q_r . r_j,  out = sum_j softmax(s)_j c_j        bytes = b (R + r) C for C tokens
    prompt   k_j = W_k c_j, v_j = W_v c_j                                      2 R (P + V) FLOPs of a head and token

Hopper has a kernel of its own for decodes of the sizes of DeepSeek's models (`hopper_latent`). Prompts: expanded and
not absorbed, a pair of a query and a key is 2 (P + r + V) FLOPs of a head instead of 2 (2 R + r), 640 instead of 2,176
for DeepSeek-V3; only few new tokens behind a long prefix are less work absorbed, and go as so many decodes.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels import tiles
from perfmodel_executors.kernels.attention_latent import LatentHeads, LatentPages
from perfmodel_executors.kernels.kv_pages import Chunks
from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.tiles import TileConfig, padded, pick
from perfmodel_executors.kernels.triton.attention_decode import combine_splits, num_splits_for, split_buffers
from perfmodel_executors.kernels.triton.hopper_latent import HEADS, hopper_latent_kernel, is_for_hopper
from perfmodel_executors.kernels.triton.kv_pages import page_buffers, token_rows
from perfmodel_executors.kernels.triton.many_tokens import provide_scratch
from perfmodel_executors.kernels.triton.segments import num_tiles, tile_of_segment

_TILES = ((64, 8, 2), (32, 4, 3), (16, 4, 2))  # tokens, warps, stages
_CANDIDATES = [TileConfig({"ROWS": 16, "TILE": tokens}, Options(*options)) for tokens, *options in _TILES]
# Of as many tokens a product reads half the shared memory that 64 take, and Blackwell's units multiply twice as fast.
_BLACKWELL_TILE = TileConfig({"ROWS": 16, "TILE": 128}, Options(num_warps=8, num_stages=2))
_HOPPER_TILE = TileConfig({}, Options(num_warps=4, num_stages=1))  # of the kernel that has no other


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def _attention_latent_kernel(
    q_ptr, q_rotated_ptr, latents_ptr, tables_ptr, contexts_ptr, out_ptr, lse_ptr, table_stride, num_splits, scale_log2,
    N: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, PAGE: tl.constexpr,
    RANK_PAD: tl.constexpr, ROTATED_PAD: tl.constexpr, IS_SPLIT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    context = tl.load(contexts_ptr + seq).to(tl.int32)
    share = tl.cdiv(tl.cdiv(context, TILE), num_splits) * TILE
    begin = split * share
    end = tl.minimum(begin + share, context)

    is_row = head < N
    column = tl.arange(0, RANK_PAD)
    rotated = tl.arange(0, ROTATED_PAD)
    q_row = ((head * tl.num_programs(2) + seq) * RANK)[:, None]
    rotated_row = ((seq * N + head) * WIDTH)[:, None]
    q = tl.load(q_ptr + q_row + column[None, :], mask=is_row[:, None] & (column < RANK)[None, :], other=0.0)
    q_mask = is_row[:, None] & (rotated < ROTATED)[None, :]
    q_rotated = tl.load(q_rotated_ptr + rotated_row + rotated[None, :], mask=q_mask, other=0.0)
    table_ptr = tables_ptr + seq * table_stride

    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK_PAD], tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        is_seen = position < end
        rows = token_rows(table_ptr, position, is_seen, PAGE, True).to(tl.int64)[:, None] * (RANK + ROTATED)
        is_latent = is_seen[:, None] & (column < RANK)[None, :]
        is_rotated = is_seen[:, None] & (rotated < ROTATED)[None, :]
        latents = tl.load(latents_ptr + rows + column[None, :], mask=is_latent, other=0.0)
        keys = tl.load(latents_ptr + rows + RANK + rotated[None, :], mask=is_rotated, other=0.0)
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_rotated, tl.trans(keys), scores, input_precision="ieee") * scale_log2
        scores = tl.where(is_seen[None, :], scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(latents.dtype), latents, acc * shrink[:, None], input_precision="ieee")
        largest = larger

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    row = (seq * N + head)[:, None]
    mask = is_row[:, None] & (column < RANK)[None, :]
    if IS_SPLIT:
        row = row * num_splits + split
        lse = tl.where(total > 0, largest + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))
        tl.store(lse_ptr + row, lse[:, None], mask=is_row[:, None])
        tl.store(out_ptr + row * RANK + column[None, :], acc, mask=mask & (begin < end))
    else:
        tl.store(out_ptr + row * RANK + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def attention_latent_decode(
    q_DNH: Tensor,
    pages: LatentPages,
    block_tables_DM: Tensor,
    context_lens_D: Tensor,
    heads: LatentHeads,
    *,
    num_splits: int | None = None,
    config: TileConfig | None = None,
) -> Tensor:
    """One new token per sequence, [D, N, V]; the reference says what the arguments are. num_splits: programs that share
    one sequence and tile of heads; by default `num_splits_for` the shapes."""
    keys_NPR, values_NVR, scale = heads
    q_DNH, (num_heads, nope, rank), num_seqs = q_DNH.contiguous(), keys_NPR.shape, len(q_DNH)
    absorbed_NDR, q_rotated_DNr = torch.bmm(q_DNH[..., :nope].transpose(0, 1), keys_NPR), q_DNH[..., nope:]
    rotated, most_tokens = q_rotated_DNr.shape[2], block_tables_DM.shape[1] * pages.block_size
    programs = num_seqs * triton.cdiv(num_heads, HEADS)
    splits = num_splits or num_splits_for(programs, most_tokens, tiles.compute_units(q_DNH.device))
    sums_DNR = q_DNH.new_empty(num_seqs, num_heads, rank)
    part, lse = split_buffers(sums_DNR, splits)
    args = (
        absorbed_NDR, q_rotated_DNr, pages.latents_BSW, block_tables_DM, context_lens_D, part, lse,
        block_tables_DM.stride(0), splits, scale * math.log2(math.e),
    )  # fmt: skip
    width = q_rotated_DNr.stride(1)
    sizes = {"N": num_heads, "WIDTH": width, "RANK": rank, "ROTATED": rotated, "PAGE": pages.block_size}
    widths = (padded(rank), padded(rotated))
    paddings = {"RANK_PAD": widths[0], "ROTATED_PAD": widths[1], "IS_SPLIT": splits > 1}

    def run(config: TileConfig) -> None:
        grid = (triton.cdiv(num_heads, config.sizes.get("ROWS", HEADS)), splits, num_seqs)
        if config == _HOPPER_TILE:
            launch(hopper_latent_kernel, grid, *args, options=config.options, **sizes)
        else:
            launch(_attention_latent_kernel, grid, *args, options=config.options, **sizes, **paddings, **config.sizes)

    problem = (triton.next_power_of_2(num_seqs), splits.bit_length(), most_tokens.bit_length())
    law = partial(latent_shared_bytes, widths=widths, element_bytes=q_DNH.element_size())
    listed = [_BLACKWELL_TILE] if 100 <= (tiles.capability_of(q_DNH.device) or 0) < 120 else []
    listed += _CANDIDATES
    if is_for_hopper(absorbed_NDR, rotated):
        listed.insert(0 if num_heads > HEADS // 2 else len(listed), _HOPPER_TILE)
    key = (*problem, *sizes.values(), splits > 1, q_DNH.dtype)
    run(config or pick("attention_latent_decode", key, lambda: listed, law, run, q_DNH.device))
    if lse is not None:
        combine_splits(part, lse, sums_DNR)
    return torch.bmm(sums_DNR.transpose(0, 1), values_NVR.transpose(1, 2)).transpose(0, 1)


def latent_shared_bytes(config: TileConfig, capability: int, widths: tuple[int, int], element_bytes: int) -> int:
    """Shared memory of a thread block: queries, the stages' latents and the ids of their blocks, and weights on their
    way to the second product; on Hopper queries, two tiles, barriers and what groups of warps tell each other."""
    if config == _HOPPER_TILE:
        return 3 * HEADS * sum(widths) * element_bytes + 2048
    rows, tile, stages = config.sizes["ROWS"], config.sizes["TILE"], config.options.num_stages
    latents = tile * sum(widths) * page_buffers(stages)
    return (rows * sum(widths) + latents + rows * tile) * element_bytes + (16 * tile if stages > 2 else 0)


TOKENS = 128  # of a tile, and what contexts are rounded up to
# Sums take 128 registers of each thread. With slices of 32 of the rank and more, fragments spill on Ampere.
_EXPANDING = [TileConfig({"BLOCK_K": depth}, Options(8, stages)) for depth, stages in ((64, 3), (32, 3), (16, 4))]


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
    tables_GM, (num_chunks, width), latents = chunks.tables_GM, chunks.tables_GM.shape, pages.latents_BSW
    num_heads, nope, rank = heads.keys_NPR[which].shape
    value, rotated = heads.values_NVR.shape[1], latents.shape[2] - rank
    length = triton.cdiv(width * pages.block_size, TOKENS) * TOKENS
    wide = {"NOPE_PAD": padded(nope), "ROTATED_PAD": padded(rotated), "VALUE_PAD": padded(value)}
    expanded = ExpandedKV(
        latents.new_empty(num_chunks, num_heads, length, wide["NOPE_PAD"]),
        latents.new_empty(num_chunks, length, wide["ROTATED_PAD"]),
        latents.new_empty(num_chunks, num_heads, length, wide["VALUE_PAD"]),
    )
    args = (latents, *chunks[:3], heads.keys_NPR, heads.values_NVR, *expanded, tables_GM.stride(0), length, which.start)
    sizes = {"RANK": rank, "NOPE": nope, "ROTATED": rotated, "VALUE": value, **wide, "PAGE": pages.block_size}
    row_bytes = (TOKENS + wide["NOPE_PAD"] + wide["VALUE_PAD"]) * latents.element_size()

    def run(config: TileConfig) -> None:
        grid = (num_heads, length // TOKENS, num_chunks)
        launch(_expand_latents_kernel, grid, *args, options=config.options, TOKENS=TOKENS, **sizes, **config.sizes)

    def needed(config: TileConfig, capability: int) -> int:
        return tiles.pipelined_bytes(row_bytes * config.sizes["BLOCK_K"], config, capability)

    problem = (num_heads, num_chunks.bit_length(), length.bit_length(), *sizes.values(), latents.dtype)
    listed = _EXPANDING if tiles.has_copy_engine(tiles.capability_of(latents.device) or 0) else _EXPANDING[-1:]
    run(pick("expand_latents", problem, lambda: listed, needed, run, latents.device))
    return expanded


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
def row_tiles(matrix_ptr, num_rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """What `tile_rows` takes tiles of `ROWS` rows of a gapless matrix from: addresses that each thread computes
    (cp.async), or a descriptor for the copy engine, made once a program."""
    if DESCRIPTORS:
        return tl.make_tensor_descriptor(matrix_ptr, [num_rows, WIDTH], [WIDTH, 1], [ROWS, WIDTH])
    else:
        return matrix_ptr


@triton.jit
def tile_rows(matrix, row, ROWS: tl.constexpr, WIDTH: tl.constexpr, DESCRIPTORS: tl.constexpr):
    if DESCRIPTORS:
        return matrix.load([row, 0])
    else:
        rows = row.to(tl.int64) + tl.arange(0, ROWS)
        return tl.load(matrix + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])


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
    q_TNH: Tensor, pages: LatentPages, chunks: Chunks, heads: LatentHeads, *, config: TileConfig | None = None
) -> Tensor:
    block_tables_GM, query_starts_G, num_computed_G, *_ = chunks
    (num_tokens, num_heads, _), (num_chunks, width) = q_TNH.shape, block_tables_GM.shape
    nope, value = heads.keys_NPR.shape[1], heads.values_NVR.shape[1]
    if heads.absorbs(-(-num_tokens // num_chunks), width * pages.block_size):
        # Each token as a sequence of its own, that ends with it.
        token_T = torch.arange(num_tokens, device=q_TNH.device)
        chunk_T = torch.searchsorted(query_starts_G, token_T, right=True) - 1
        context_T = num_computed_G[chunk_T] + token_T - query_starts_G[chunk_T] + 1
        return attention_latent_decode(q_TNH, pages, block_tables_GM[chunk_T], context_T, heads)
    q_TNH = q_TNH.contiguous()
    out_TNV = q_TNH.new_empty(num_tokens, num_heads, value)
    head_bytes = num_chunks * width * pages.block_size * (padded(nope) + padded(value)) * q_TNH.element_size()
    at_once = max(1, min(num_heads, _WORKSPACE_BYTES // max(1, head_bytes)))
    listed = [*_COPIED, *_LOADED] if tiles.has_copy_engine(tiles.capability_of(q_TNH.device) or 0) else _LOADED

    def attend(expanded: ExpandedKV, first: int) -> None:
        (_, held, length, _), width = expanded.keys.shape, q_TNH.shape[2]
        args = (
            q_TNH, *expanded, query_starts_G, num_computed_G, out_TNV, num_chunks, length, first,
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
            grid = (held, num_tiles(num_tokens, num_chunks, config.sizes["ROWS"]))
            launch(_attention_expanded_kernel, grid, *args, options=config.options, **constants, **config.sizes)

        problem = (num_tokens.bit_length(), num_chunks.bit_length(), length.bit_length(), held)
        law = partial(expanded_shared_bytes, widths=widths, element_bytes=q_TNH.element_size())
        key = (*problem, *constants.values(), q_TNH.dtype)
        run(config or pick("attention_latent_prefill", key, lambda: listed, law, run, q_TNH.device))

    for first in range(0, num_heads, at_once):
        attend(expand_latents(pages, chunks, heads, slice(first, min(first + at_once, num_heads))), first)
    return out_TNV


def expanded_shared_bytes(config: TileConfig, capability: int, widths: tuple[int, int, int], element_bytes: int) -> int:
    """An upper bound: queries, the stages' keys and values, and weights on their way to the second product."""
    rows, keys, stages = config.sizes["ROWS"], config.sizes["KEYS"], config.options.num_stages
    reads_sram = rows >= 64 and tiles.has_copy_engine(capability)
    buffers = stages if reads_sram else stages - 1
    elements = rows * sum(widths[:2]) + buffers * keys * sum(widths) + (0 if reads_sram else rows * keys)
    return elements * element_bytes + 1024 * config.sizes["DESCRIPTORS"]  # barriers

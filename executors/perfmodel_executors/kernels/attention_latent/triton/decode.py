"""Decodes over pages of latents: every latent is read once for all query heads, and is key and value at once.

The up-projection of keys is absorbed into the queries before, that of values into the output after (`reference`); in
between each query head has R + r elements, and meets

    s_j = q_c . c_j + q_r . r_j,    out = sum_j softmax(s)_j c_j     bytes = b (R + r) C  for C tokens of context

A program has some query heads of a sequence as the rows of its tile, and walks over tiles of tokens: a tile of latents
is loaded once, multiplied into the scores and, transposed, into the sums. R and r are powers of two in all models that
have them (512 and 64), and are two products, so that nothing is padded. The context is split where sequences do not
fill the machine, as in `attention_decode`, whose second kernel combines the parts.

The largest tile has 64 rows and 512 columns of sums: 128 registers of each of 256 threads.
"""

__all__ = ["attention_latent_decode", "latent_shared_bytes"]

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.attention_decode.triton import combine_splits, num_splits_for
from perfmodel_executors.kernels.attention_latent.heads import LatentHeads
from perfmodel_executors.kernels.attention_latent.pages import LatentPages
from perfmodel_executors.kernels.kv_pages.triton import page_buffers, token_rows
from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.tiles import TileConfig, compute_units, padded, pick

_CANDIDATES = [
    TileConfig({"ROWS": 64, "TILE": 64}, Options(num_warps=8, num_stages=2)),
    TileConfig({"ROWS": 64, "TILE": 64}, Options(num_warps=8, num_stages=3)),
    TileConfig({"ROWS": 64, "TILE": 32}, Options(num_warps=8, num_stages=3)),
    TileConfig({"ROWS": 16, "TILE": 64}, Options(num_warps=8, num_stages=2)),
    TileConfig({"ROWS": 16, "TILE": 32}, Options(num_warps=4, num_stages=3)),
    TileConfig({"ROWS": 16, "TILE": 16}, Options(num_warps=4, num_stages=2)),
]
_HOPPER_ROWS = 64  # of its products
_NOWHERE = 1 << 30  # bytes that no device has
_LEAST_ROWS = 16  # that a matrix product has


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def _attention_latent_kernel(
    q_ptr, latents_ptr, tables_ptr, contexts_ptr, out_ptr, lse_ptr, table_stride, num_splits, scale_log2,
    N: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, RANK_PAD: tl.constexpr, ROTATED_PAD: tl.constexpr,
    PAGE: tl.constexpr, IS_SPLIT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
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
    q_row = ((seq * N + head) * (RANK + ROTATED))[:, None]
    q = tl.load(q_ptr + q_row + column[None, :], mask=is_row[:, None] & (column < RANK)[None, :], other=0.0)
    q_mask = is_row[:, None] & (rotated < ROTATED)[None, :]
    q_rotated = tl.load(q_ptr + q_row + RANK + rotated[None, :], mask=q_mask, other=0.0)
    table_ptr = tables_ptr + seq * table_stride

    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK_PAD], tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        is_seen = position < end
        rows = token_rows(table_ptr, position, is_seen, PAGE, True).to(tl.int64)[:, None] * (RANK + ROTATED)
        latents = tl.load(
            latents_ptr + rows + column[None, :], mask=is_seen[:, None] & (column < RANK)[None, :], other=0.0
        )
        keys = tl.load(
            latents_ptr + rows + RANK + rotated[None, :],
            mask=is_seen[:, None] & (rotated < ROTATED)[None, :],
            other=0.0,
        )
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
    """One new token per sequence, [D, N, V]; the reference says what the arguments are.

    num_splits: programs that share one sequence and tile of heads; by default `num_splits_for` the shapes
    """
    keys_NPR, values_NVR, scale = heads
    num_nope = keys_NPR.shape[1]
    absorbed_DNR = torch.bmm(q_DNH[..., :num_nope].transpose(0, 1), keys_NPR).transpose(0, 1)
    q_DNW = torch.cat((absorbed_DNR, q_DNH[..., num_nope:]), dim=-1)
    sums_DNR = _weighted_latents(
        q_DNW, pages, block_tables_DM, context_lens_D, keys_NPR.shape[2], scale, num_splits, config
    )
    return torch.bmm(sums_DNR.transpose(0, 1), values_NVR.transpose(1, 2)).transpose(0, 1)


def _weighted_latents(
    q_DNW: Tensor,
    pages: LatentPages,
    block_tables_DM: Tensor,
    context_lens_D: Tensor,
    rank: int,
    scale: float,
    num_splits: int | None,
    config: TileConfig | None,
) -> Tensor:
    """The latents of each sequence, weighted for each head, [D, N, R]."""
    num_seqs, num_heads, width = q_DNW.shape
    most_tokens = block_tables_DM.shape[1] * pages.block_size
    tiles = triton.cdiv(num_heads, _HOPPER_ROWS)
    splits = num_splits or num_splits_for(num_seqs * tiles, most_tokens, compute_units(q_DNW.device))
    out_DNR = q_DNW.new_empty(num_seqs, num_heads, rank)
    part = out_DNR if splits == 1 else q_DNW.new_empty(num_seqs, num_heads, splits, rank, dtype=torch.float32)
    lse = None if splits == 1 else q_DNW.new_empty(num_seqs, num_heads, splits, dtype=torch.float32)
    args = (
        q_DNW, pages.latents_BSW, block_tables_DM, context_lens_D, part, lse,
        block_tables_DM.stride(0), splits, scale * math.log2(math.e),
    )  # fmt: skip
    widths = (padded(rank), padded(width - rank))
    constants = {
        "N": num_heads, "RANK": rank, "ROTATED": width - rank, "RANK_PAD": widths[0], "ROTATED_PAD": widths[1],
        "PAGE": pages.block_size, "IS_SPLIT": splits > 1,
    }  # fmt: skip

    def run(config: TileConfig) -> None:
        grid = (triton.cdiv(num_heads, config.sizes["ROWS"]), splits, num_seqs)
        launch(_attention_latent_kernel, grid, *args, options=config.options, **constants, **config.sizes)

    if config is None:
        problem = (triton.next_power_of_2(num_seqs), splits.bit_length(), most_tokens.bit_length())
        key = (*problem, *constants.values(), q_DNW.dtype)

        def needed(config: TileConfig, capability: int) -> int:
            return latent_shared_bytes(config, capability, widths, q_DNW.element_size())

        most_rows = max(_LEAST_ROWS, triton.next_power_of_2(num_heads))
        listed = [each for each in _CANDIDATES if each.sizes["ROWS"] <= most_rows]
        config = pick("attention_latent_decode", key, lambda: listed, needed, run, q_DNW.device)
    run(config)
    if lse is not None:
        combine_splits(part, lse, out_DNR)
    return out_DNR


def latent_shared_bytes(config: TileConfig, capability: int, widths: tuple[int, int], element_bytes: int) -> int:
    """Shared memory of a thread block: queries, the stages' latents and the ids of their blocks, and weights on their
    way to the second product.

    Hopper's products take weights from registers, and their latents must outlive their issue. More than any device has
    for 64 rows elsewhere: the sums would fill the registers of Ampere's products, and pass through SRAM on Blackwell.
    """
    rows, tile, stages = config.sizes["ROWS"], config.sizes["TILE"], config.options.num_stages
    runs_ahead = rows >= _HOPPER_ROWS
    if runs_ahead and not 90 <= capability < 100:
        return _NOWHERE
    latents = tile * sum(widths) * (page_buffers(stages) + runs_ahead)
    ids = 16 * tile if stages > 2 else 0
    return (rows * sum(widths) + latents + (0 if runs_ahead else rows * tile)) * element_bytes + ids

"""Attention of single new tokens over paged keys and values, with the KV length split where the machine is not filled.

The query heads of a KV head are the rows of one tile (at least 16, of which the tensor cores need all), so keys and
values are read once:

    bytes = b_kv K (H + H_v) C + b N (H + H_v) D    C: visible tokens of all D sequences

With splits (flash-decoding) each program takes a share of the context, and a second kernel combines what they found.

Beside a window the first tokens of a text may be seen, too (StreamingLLM's sinks). They are tiles before those of the
window, whose queries are turned back by as many positions as lie between what a sequence has and what it keeps.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.attention_prefill import PLAIN, AttentionRule
from perfmodel_executors.kernels.kv_pages import KVPages
from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.tiles import TileConfig, compute_units, padded, pick
from perfmodel_executors.kernels.triton import kv_pages
from perfmodel_executors.kernels.triton.kv_pages import load_pages, load_pairs, token_rows

_MAX_ROWS = 64  # query heads of one program
_MAX_SPLITS = 64
_SPLIT_TOKENS = 256  # the least that is worth a program of its own
_BLOCKS_PER_UNIT = 2  # that the trusted configuration keeps resident
_WASTE = 0.9  # of the best attainable filling; fewer splits are taken within it, for they combine faster

# Tokens, warps, stages.
_TILES = ((64, 4, 5), (128, 4, 3), (64, 4, 3), (128, 8, 5), (32, 2, 5), (32, 4, 7), (32, 4, 3), (16, 4, 2))
_CANDIDATES = [TileConfig({"TILE": tokens}, Options(warps, stages)) for tokens, warps, stages in _TILES]
_QUANTIZED = _CANDIDATES[1]  # to trust first


class FirstTokens(NamedTuple):
    """`num` first tokens that are seen beside a window, at the distance that they would have if a text had no more
    than `most_tokens`. rope: cosines and sines of positions, None: without RoPE; is_rolling: the pages hold no
    more, as a ring."""

    num: int = 0
    most_tokens: int = 0
    rope: Tensor | None = None
    is_rolling: bool = False


NO_SINKS = FirstTokens()
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def soft_capped(scores, CAP: tl.constexpr):
    """c tanh(s / c) = c (1 - 2 / (exp(2 s / c) + 1)) of scores in units of log2, `CAP` in natural ones; no overflow."""
    power = tl.exp2(scores * (2.0 / CAP))
    return (CAP * _LOG2_E) * (1.0 - 2.0 / (power + 1.0))


@triton.jit
def begin_softmax(sinks_ptr, query_head, has_sink, LEAST: tl.constexpr, ROWS: tl.constexpr):
    """(largest score, sum of powers) before any key: a sink is where the running softmax begins, with a sum of one."""
    largest = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + query_head, mask=has_sink, other=0.0).to(tl.float32)
        largest = tl.where(has_sink, sink * _LOG2_E, largest)
        total = tl.where(has_sink, 1.0, total)
    return largest, total


@triton.jit
def _turned_back(q_ptr, rope_ptr, is_row, H: tl.constexpr, H_PAD: tl.constexpr):
    """Queries rotated back by the position whose cosines and sines `rope_ptr` has."""
    column = tl.arange(0, H_PAD)[None, :]
    mask = is_row[:, None] & (column < H)
    x = tl.load(q_ptr + column, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(q_ptr + (column + H // 2) % H, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(rope_ptr + column % (H // 2)).to(tl.float32)
    sin = tl.load(rope_ptr + column % (H // 2) + H // 2).to(tl.float32)
    return x * cos + tl.where(column < H // 2, other, -other) * sin


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def _attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, tables_ptr, contexts_ptr, sinks_ptr, rope_ptr, out_ptr, lse_ptr,
    q_stride, table_stride, num_splits, scale_log2,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
    FIRST: tl.constexpr, ROLLS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr,
    ROWS: tl.constexpr, H_PAD: tl.constexpr, V_PAD: tl.constexpr, IS_SPLIT: tl.constexpr, PAIRED: tl.constexpr,
    BY_BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = N // K
    head = tl.program_id(0) % K
    member = tl.program_id(0) // K * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    context = tl.load(contexts_ptr + seq).to(tl.int32)
    ahead = tl.maximum(context - WINDOW - FIRST, 0)
    if ROLLS:  # the pages are a ring, of whose order a softmax knows nothing
        context = tl.minimum(context, WINDOW + FIRST)

    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    if CHUNK > 0:
        first = tl.maximum(first, tl.maximum(context - 1, 0) // CHUNK * CHUNK)
    if FIRST > 0:
        first = tl.maximum(first, FIRST)
    window_base = first // TILE * TILE
    base = window_base - tl.cdiv(FIRST, TILE) * TILE
    share = tl.cdiv(tl.cdiv(context - base, TILE), num_splits) * TILE
    begin = base + split * share
    end = tl.minimum(begin + share, context)

    own: tl.constexpr = q_ptr.dtype.element_ty
    DTYPE: tl.constexpr = own if FORMAT == "plain" or own == tl.float32 else tl.float16
    column = tl.arange(0, H_PAD)
    is_row = member < GROUP
    query = (head * GROUP + member)[:, None]
    q = tl.load(
        q_ptr + seq * q_stride + query * H + column[None, :], mask=is_row[:, None] & (column < H)[None, :], other=0.0
    ).to(DTYPE)
    if FIRST > 0 and rope_ptr is not None:
        q_first = _turned_back(q_ptr + seq * q_stride + query * H, rope_ptr + ahead * H, is_row, H, H_PAD).to(DTYPE)
    table_ptr = tables_ptr + seq * table_stride

    # One program of the splits has the sink, so that it is counted once.
    has_sink = is_row & (split == 0)
    largest, total = begin_softmax(sinks_ptr, head * GROUP + member, has_sink, -float("inf"), ROWS)
    acc = tl.zeros([ROWS, V_PAD // 2 if PAIRED else V_PAD], tl.float32)
    odd_acc = acc
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        is_seen = position < end
        if WINDOW > 0 or CHUNK > 0:
            is_seen = is_seen & (position >= first)
        queries = q
        if FIRST > 0:
            is_first = start < window_base
            position = tl.where(is_first, position - base, position)
            is_seen = tl.where(is_first, position < tl.minimum(context, FIRST), is_seen)
            if rope_ptr is not None:
                queries = tl.where(is_first, q_first, q)
        rows = token_rows(table_ptr, position, is_seen, PAGE, True)
        k = load_pages(k_ptr, rows, head, is_seen, K, H, H_PAD, FORMAT, DTYPE, True)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale_log2
        if FORMAT == "int8":
            scale_rows = (rows // PAGE * K + head) * PAGE + rows % PAGE
            scores *= tl.load(k_scale_ptr + scale_rows, mask=is_seen, other=0.0)[None, :]
        if CAP > 0:
            scores = soft_capped(scores, CAP)
        scores = tl.where(is_seen[None, :], scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, axis=1)
        if FORMAT == "int8":
            weights *= tl.load(v_scale_ptr + scale_rows, mask=is_seen, other=0.0)[None, :]
        if PAIRED:
            v, odd_v = load_pairs(v_ptr, rows, head, is_seen, K, HV, V_PAD, FORMAT, DTYPE, BY_BITS)
            odd_acc = tl.dot(weights.to(DTYPE), odd_v, odd_acc * shrink[:, None], input_precision="ieee")
        else:
            v = load_pages(v_ptr, rows, head, is_seen, K, HV, V_PAD, FORMAT, DTYPE, True)
        acc = tl.dot(weights.to(DTYPE), v, acc * shrink[:, None], input_precision="ieee")
        largest = larger

    if PAIRED:
        acc = tl.reshape(tl.join(acc, odd_acc), (ROWS, V_PAD))
    # A program without tokens has a sum of zero: its result is zero, its weight in the combination too.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    row = seq * N + query
    out_column = tl.arange(0, V_PAD)[None, :]
    out_mask = is_row[:, None] & (out_column < HV)
    if IS_SPLIT:
        row = row * num_splits + split
        lse = tl.where(total > 0, largest + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))
        tl.store(lse_ptr + row, lse[:, None], mask=is_row[:, None])
        is_weighed = begin < end
        if sinks_ptr is not None:
            is_weighed = is_weighed | (split == 0)
        tl.store(out_ptr + row * HV + out_column, acc, mask=out_mask & is_weighed)
    else:
        tl.store(out_ptr + row * HV + out_column, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    partial_ptr, lse_ptr, out_ptr, num_splits, HV: tl.constexpr, V_PAD: tl.constexpr, SPLITS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    lse = tl.load(lse_ptr + row * num_splits + split, mask=split < num_splits, other=-float("inf"))
    weight = tl.exp2(lse - tl.maximum(tl.max(lse, axis=0), -1.0e30))  # finite: zero, not NaN, where no part has tokens
    column = tl.arange(0, V_PAD)
    mask = (weight > 0)[:, None] & (column < HV)[None, :]
    rows = (row * num_splits + split)[:, None]
    parts = tl.load(partial_ptr + rows * HV + column[None, :], mask=mask, other=0.0)
    total = tl.sum(weight, axis=0)
    out = tl.sum(parts * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * HV + column, out.to(out_ptr.dtype.element_ty), mask=column < HV)


def attention_decode(
    q_DNH: Tensor,
    pages: KVPages,
    block_tables_DM: Tensor,
    context_lens_D: Tensor,
    rule: AttentionRule = PLAIN,
    *,
    num_splits: int | None = None,
    config: TileConfig | None = None,
    sinks: FirstTokens = NO_SINKS,
) -> Tensor:
    """softmax(q k^T / sqrt(H)) v for each sequence, [D, N, H_v]; zero for a context of zero tokens. num_splits:
    programs that share one sequence and KV head; by default `num_splits_for` the shapes; sinks: seen beside the rule's
    window."""
    num_seqs, num_heads, head_dim = q_DNH.shape
    kv_heads, v_dim = pages.num_kv_heads, pages.v_BSKH.shape[3]
    q_DNH = q_DNH if q_DNH.stride()[1:] == (head_dim, 1) else q_DNH.contiguous()
    group = num_heads // kv_heads
    rows = min(_MAX_ROWS, max(16, triton.next_power_of_2(group)))
    programs = kv_heads * triton.cdiv(group, rows)
    length = min(block_tables_DM.shape[1] * pages.block_size, sinks.most_tokens or (1 << 31))
    splits = num_splits or num_splits_for(num_seqs * programs, length, compute_units(q_DNH.device))
    form = kv_pages.format_of(pages.dtype, q_DNH.device)
    is_paired = form != "plain" and v_dim % 2 == 0
    out_DNH = q_DNH.new_empty(num_seqs, num_heads, v_dim)
    part, lse = split_buffers(out_DNH, splits)
    widths = (padded(head_dim), padded(v_dim))
    values = pages.v_BSKH.view(torch.int16) if is_paired else kv_pages.raw(pages.v_BSKH, form)
    args = (
        q_DNH, kv_pages.raw(pages.k_BSKH, form), values, pages.k_scale_BKS, pages.v_scale_BKS,
        block_tables_DM, context_lens_D, rule.sinks_N, sinks.rope, part, lse,
        q_DNH.stride(0), block_tables_DM.stride(0), splits, math.log2(math.e) / math.sqrt(head_dim),
    )  # fmt: skip
    constants = {
        "N": num_heads, "K": kv_heads, "H": head_dim, "HV": v_dim, "PAGE": pages.block_size, "FORMAT": form,
        "FIRST": sinks.num, "ROLLS": sinks.is_rolling, "WINDOW": rule.window or 0, "CHUNK": rule.chunk or 0,
        "CAP": rule.cap or 0.0, "ROWS": rows, "IS_SPLIT": splits > 1, "H_PAD": widths[0], "V_PAD": widths[1],
        "PAIRED": is_paired, "BY_BITS": q_DNH.device.type != "cpu" and form != "fp8_bits",
    }  # fmt: skip

    def run(config: TileConfig) -> None:
        grid = (programs, splits, num_seqs)
        launch(_attention_decode_kernel, grid, *args, options=config.options, **constants, **config.sizes)

    problem = (triton.next_power_of_2(num_seqs), splits.bit_length(), length.bit_length())
    key = (*problem, tuple(constants.values()), q_DNH.dtype, pages.dtype)
    product = kv_pages.product_dtype(q_DNH, pages).itemsize
    law = partial(shared_bytes, widths=widths, rows=rows, product=product, stored=pages.dtype.itemsize)
    # Half the bytes a token: twice the tokens a tile.
    listed = sorted(_CANDIDATES, key=lambda candidate: candidate != _QUANTIZED) if pages.is_quantized else _CANDIDATES
    run(config or pick("attention_decode", key, lambda: listed, law, run, q_DNH.device))
    if lse is not None:
        combine_splits(part, lse, out_DNH)
    return out_DNH


attention_softmax_decode = attention_decode


def split_buffers(out_DNH: Tensor, splits: int) -> tuple[Tensor, Tensor | None]:
    """Where splits write their results and softmax sums (log2): the output itself, and none, for a single one."""
    if splits == 1:
        return out_DNH, None
    num_seqs, num_heads, dim = out_DNH.shape
    part = out_DNH.new_empty(num_seqs, num_heads, splits, dim, dtype=torch.float32)
    return part, out_DNH.new_empty(num_seqs, num_heads, splits, dtype=torch.float32)


def combine_splits(part_DNSH: Tensor, lse_DNS: Tensor, out_DNH: Tensor) -> None:
    """out = the splits' results, weighted by their softmax sums (log2)."""
    num_seqs, num_heads, splits, dim = part_DNSH.shape
    sizes = {"HV": dim, "V_PAD": padded(dim), "SPLITS": triton.next_power_of_2(splits)}
    options = Options(num_warps=4, num_stages=1)
    launch(_combine_kernel, (num_seqs * num_heads,), part_DNSH, lse_DNS, out_DNH, splits, options=options, **sizes)


def num_splits_for(num_programs: int, most_tokens: int, num_units: int) -> int:
    """The fewest parts of the context that fill the machine nearly as well as any number does; num_programs: without
    splits."""
    slots = num_units * _BLOCKS_PER_UNIT
    most = max(1, min(_MAX_SPLITS, most_tokens // _SPLIT_TOKENS))

    def filled(splits: int) -> float:
        waves = num_programs * splits / slots
        return waves / math.ceil(waves)

    best = max(filled(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if filled(splits) >= _WASTE * best)


def shared_bytes(
    config: TileConfig, capability: int, widths: tuple[int, int], rows: int, product: int, stored: int
) -> int:
    """An upper bound: queries, buffers of keys, values, their block ids and scales, and what reductions exchange."""
    tile, buffers = config.sizes["TILE"], kv_pages.page_buffers(config.options.num_stages)
    per_token = sum(widths) * stored + 8 + (16 if stored == 1 else 0)
    return rows * max(widths) * product + buffers * tile * per_token + 4096

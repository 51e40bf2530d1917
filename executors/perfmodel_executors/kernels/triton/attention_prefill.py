"""Flash attention of prompt chunks over paged keys and values.

A program has a tile of queries of one KV head: the heads of its group side by side for each token, so that keys and
values are read once for all of them and short chunks (and trees of drafted tokens) still fill a tile.

    FLOPs = 2 (H + H_v) N pairs    HBM bytes = b N (H + H_v) T + b_kv K (H + H_v) keys, re-read from L2 by later tiles
"""

import math
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.attention_prefill import PLAIN, AttentionRule, check_tree
from perfmodel_executors.kernels.kv_pages import Chunks, KVPages
from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.tiles import TileConfig, capability_of, padded, pick
from perfmodel_executors.kernels.triton import kv_pages
from perfmodel_executors.kernels.triton.attention_decode import begin_softmax, soft_capped
from perfmodel_executors.kernels.triton.kv_pages import load_pages, token_rows
from perfmodel_executors.kernels.triton.segments import num_tiles, tile_of_segment

_ROWS = (16, 32, 64, 128)
_WIDE = 128  # heads above take twice the registers for their sums


def candidates_for(
    rows: int, group: int, width: int, capability: int | None, is_quantized: bool = False
) -> list[TileConfig]:
    """Candidates for chunks of `rows` query rows (tokens times heads of a group) and heads `width` wide. Chunks that
    fill no tile of 128 rows get a smaller one, but never less than one token's `group`."""
    least = 1 << (group - 1).bit_length()
    size = max(least, next((size for size in _ROWS if size >= rows), _ROWS[-1]))
    small = max(least, 64)
    if size < _ROWS[-1]:
        sizes = [(size, keys, 4, 3) for keys in ((32, 16) if width > _WIDE else (64, 128, 32))] + [(size, 16, 4, 2)]
    elif _reads_from_sram(capability):
        large = [(size, 128, 8, 3), (size, 64, 8, 3), (size, 64, 8, 5), (small, 64, 4, 3), (small, 128, 4, 3)]
        # Quantised keys and values pass through registers to be widened.
        first = 1 if is_quantized or width > _WIDE else 0
        sizes = [*large[first:], *large[:first], (small, 32, 4, 2)]
    elif width > _WIDE:
        sizes = [(small, 32, 8, 3), (small, 16, 4, 3), (size, 32, 8, 2)]
    else:
        sizes = [(small, 32, 4, 3), (size, 32, 8, 3), (small, 64, 4, 3), (size, 64, 8, 3), (small, 32, 4, 2)]
    return [TileConfig({"ROWS": r, "KEYS": k}, Options(warps, stages)) for r, k, warps, stages in sizes]


def shared_bytes(config: TileConfig, capability: int, widths: tuple[int, int], product: int, stored: int) -> int:
    """An upper bound: queries, and the pipeline's buffers of keys, values, block ids and scales. Where the tensor cores
    read SRAM, one more buffer is filled meanwhile; what they read of quantised pages is a widened copy."""
    rows, keys = config.sizes["ROWS"], config.sizes["KEYS"]
    buffers = kv_pages.page_buffers(config.options.num_stages)
    widened = exchanged = 0
    if rows >= 64 and _reads_from_sram(capability):
        buffers += 1 if stored == product else 0
        widened = keys * sum(widths) * product if stored != product else 0
    else:
        exchanged = rows * keys * product
    per_token = sum(widths) * stored + 8 + (16 if stored == 1 else 0)
    return rows * max(widths) * product + buffers * keys * per_token + widened + exchanged + 4096


def _reads_from_sram(capability: int | None) -> bool:
    return capability is None or 90 <= capability < 120


# The running maximum begins finite, so that a query that sees nothing of its first tile takes exp2(-inf), not NaN.
LEAST = tl.constexpr(-1.0e30)


@triton.jit
def attend_keys(
    acc, largest, total, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head, begin, end, scale_log2,
    query_position, low, high, prefix, ancestors, own_row,
    K: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, IS_TREE: tl.constexpr, H_PAD: tl.constexpr, V_PAD: tl.constexpr, KEYS: tl.constexpr,
    CAP: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr = 0, RING: tl.constexpr = 0,
):  # fmt: skip
    """The running softmax over keys [begin, end); masked: only keys [low, high) exist, and what each query sees.
    own_row: where keys lie by their positions, of the one at 0; None: in pages, of which all but the `FIRST` share
    `RING` places in turn, if it is not 0."""
    for start in range(begin, end, KEYS):
        position = start + tl.arange(0, KEYS)
        is_inside = (position >= low) & (position < high)
        if own_row is not None:
            rows = own_row + position
        elif RING > 0:
            place = tl.where(position < FIRST, position, FIRST + (position - FIRST) % RING)
            rows = token_rows(table_ptr, place, is_inside, PAGE, MASKED)
        else:
            rows = token_rows(table_ptr, position, is_inside, PAGE, MASKED)
        k = load_pages(k_ptr, rows, head, is_inside, K, H, H_PAD, FORMAT, q.dtype, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if FORMAT == "int8":
            scale_rows = (rows // PAGE * K + head) * PAGE + rows % PAGE
            scores *= tl.load(k_scale_ptr + scale_rows, mask=is_inside, other=0.0)[None, :]
        factor = scale_log2
        if CAP > 0:
            scores = soft_capped(scores * scale_log2, CAP)
            factor = 1.0
        if MASKED:
            if IS_TREE:
                node = tl.maximum(position - prefix, 0)
                is_ancestor = ((ancestors[:, None] >> tl.minimum(node, 63)[None, :]) & 1) > 0
                is_seen = (position < prefix)[None, :] | is_ancestor
            else:
                is_seen = position[None, :] <= query_position[:, None]
                if WINDOW > 0:
                    is_seen = is_seen & (position[None, :] > query_position[:, None] - WINDOW)
                if CHUNK > 0:
                    is_seen = is_seen & (position[None, :] >= (query_position // CHUNK * CHUNK)[:, None])
            scores = tl.where(is_seen & is_inside[None, :], scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1) * factor)
        weights = tl.exp2(scores * factor - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, axis=1)
        if FORMAT == "int8":
            weights *= tl.load(v_scale_ptr + scale_rows, mask=is_inside, other=0.0)[None, :]
        v = load_pages(v_ptr, rows, head, is_inside, K, HV, V_PAD, FORMAT, q.dtype, MASKED)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        largest = larger
    return acc, largest, total


@triton.jit(do_not_specialize=["table_stride", "num_chunks"])
def _attention_prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, tables_ptr, starts_ptr, computed_ptr, ancestors_ptr, nodes_ptr,
    sinks_ptr, out_ptr, q_stride, table_stride, num_chunks, scale_log2,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, IS_TREE: tl.constexpr, HAS_NODES: tl.constexpr,
    CAP: tl.constexpr, H_PAD: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = N // K
    TOKENS: tl.constexpr = ROWS // GROUP
    own: tl.constexpr = q_ptr.dtype.element_ty
    DTYPE: tl.constexpr = own if FORMAT == "plain" or own == tl.float32 else tl.float16
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)

    chunk, begin, length = tile_of_segment(starts_ptr, num_chunks, tile, TOKENS)
    first_token = (tile - begin // TOKENS - chunk) * TOKENS
    if first_token >= length:
        return
    prefix = tl.load(computed_ptr + chunk).to(tl.int32)
    table_ptr = tables_ptr + chunk * table_stride

    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    is_row = (row < TOKENS * GROUP) & (token < length)
    query_row = (begin + token).to(tl.int64)
    member = head * GROUP + row % GROUP
    column = tl.arange(0, H_PAD)
    q = tl.load(
        q_ptr + (query_row * q_stride + member * H)[:, None] + column[None, :],
        mask=is_row[:, None] & (column < H)[None, :],
        other=0.0,
    ).to(DTYPE)

    first = prefix + first_token  # positions of the tile's first and last query
    last = prefix + tl.minimum(first_token + TOKENS, length) - 1
    low = 0  # the first key that any query sees, and the first of those that all see
    low_for_all = 0
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0)
        low_for_all = tl.maximum(last - WINDOW + 1, 0)
    if CHUNK > 0:
        low = tl.maximum(low, first // CHUNK * CHUNK)
        low_for_all = tl.maximum(low_for_all, last // CHUNK * CHUNK)
    high = last + 1  # behind the last key that any query sees
    high_for_all = first + 1
    ancestors = row
    if IS_TREE:
        high = prefix + length
        if HAS_NODES:
            high = prefix + tl.load(nodes_ptr + chunk).to(tl.int32)
        high_for_all = prefix
        ancestors = tl.load(ancestors_ptr + query_row, mask=is_row, other=1)
    from_all = tl.cdiv(low_for_all, KEYS) * KEYS
    to_all = tl.maximum(high_for_all // KEYS * KEYS, from_all)

    largest, total = begin_softmax(sinks_ptr, member, is_row, LEAST, ROWS)
    acc = tl.zeros([ROWS, V_PAD], tl.float32)
    if WINDOW > 0 or CHUNK > 0:
        acc, largest, total = attend_keys(
            acc, largest, total, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head, low // KEYS * KEYS,
            tl.minimum(from_all, high), scale_log2, prefix + token, low, high, prefix, ancestors, None,
            K, H, HV, PAGE, FORMAT, WINDOW, CHUNK, IS_TREE, H_PAD, V_PAD, KEYS, CAP, True,
        )  # fmt: skip
    acc, largest, total = attend_keys(
        acc, largest, total, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head, from_all, to_all, scale_log2,
        prefix + token, low, high, prefix, ancestors, None,
        K, H, HV, PAGE, FORMAT, WINDOW, CHUNK, IS_TREE, H_PAD, V_PAD, KEYS, CAP, False,
    )  # fmt: skip
    acc, largest, total = attend_keys(
        acc, largest, total, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head, to_all, high, scale_log2,
        prefix + token, low, high, prefix, ancestors, None,
        K, H, HV, PAGE, FORMAT, WINDOW, CHUNK, IS_TREE, H_PAD, V_PAD, KEYS, CAP, True,
    )  # fmt: skip

    out_column = tl.arange(0, V_PAD)
    out = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    out_rows = (query_row * N + member)[:, None] * HV
    tl.store(out_ptr + out_rows + out_column[None, :], out, mask=is_row[:, None] & (out_column < HV)[None, :])


def attention_prefill(
    q_TNH: Tensor, pages: KVPages, chunks: Chunks, rule: AttentionRule = PLAIN, *, config: TileConfig | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(H)) v for each chunk, [T, N, H_v]: the reference says what the arguments are."""
    check_tree(chunks, rule)
    num_tokens, num_heads, head_dim = q_TNH.shape
    kv_heads, v_dim, num_chunks = pages.num_kv_heads, pages.v_BSKH.shape[3], len(chunks.tables_GM)
    group = num_heads // kv_heads
    q_TNH = q_TNH if q_TNH.stride()[1:] == (head_dim, 1) else q_TNH.contiguous()
    out_TNH = q_TNH.new_empty(num_tokens, num_heads, v_dim)
    form = kv_pages.format_of(pages.dtype, q_TNH.device)
    args = (
        q_TNH, kv_pages.raw(pages.k_BSKH, form), kv_pages.raw(pages.v_BSKH, form), pages.k_scale_BKS, pages.v_scale_BKS,
        *chunks, rule.sinks_N, out_TNH,
        q_TNH.stride(0), chunks.tables_GM.stride(0), num_chunks, math.log2(math.e) / math.sqrt(head_dim),
    )  # fmt: skip
    widths = (padded(head_dim), padded(v_dim))
    constants = {
        "N": num_heads, "K": kv_heads, "H": head_dim, "HV": v_dim, "PAGE": pages.block_size, "FORMAT": form,
        "WINDOW": rule.window or 0, "CHUNK": rule.chunk or 0, "IS_TREE": chunks.ancestors_T is not None,
        "HAS_NODES": chunks.nodes_G is not None, "CAP": rule.cap or 0.0, "H_PAD": widths[0], "V_PAD": widths[1],
    }  # fmt: skip

    def run(config: TileConfig) -> None:
        tiles = num_tiles(num_tokens, num_chunks, config.sizes["ROWS"] // group)
        launch(_attention_prefill_kernel, (tiles, kv_heads), *args, options=config.options, **constants, **config.sizes)

    rows, capability = -(-num_tokens // num_chunks) * group, capability_of(q_TNH.device)
    listing = partial(candidates_for, rows, group, max(widths), capability, pages.is_quantized)
    problem = (num_tokens.bit_length(), num_chunks.bit_length(), tuple(constants.values()))
    product = kv_pages.product_dtype(q_TNH, pages).itemsize
    law = partial(shared_bytes, widths=widths, product=product, stored=pages.dtype.itemsize)
    key = (*problem, q_TNH.dtype, pages.dtype)
    run(config or pick("attention_prefill", key, listing, law, run, q_TNH.device))
    return out_TNH


attention_softmax_prefill = attention_prefill

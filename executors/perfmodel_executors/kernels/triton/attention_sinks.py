"""A window and the first tokens of a text (the reference says at which distance they are seen). A decode is that of
attention over pages. Of a prompt's chunk the keys before it lie in pages, maybe a ring, its own behind one another; the
running softmax goes over the first tokens and over the window, of either what lies in pages and what is the chunk's
own."""

import math
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.attention_prefill import AttentionRule
from perfmodel_executors.kernels.attention_sinks import Ring, as_stored
from perfmodel_executors.kernels.kv_pages import Chunks, KVPages
from perfmodel_executors.kernels.launch import launch
from perfmodel_executors.kernels.tiles import TileConfig, capability_of, padded, pick, pipelined_bytes
from perfmodel_executors.kernels.triton import kv_pages
from perfmodel_executors.kernels.triton.attention_decode import FirstTokens, attention_decode
from perfmodel_executors.kernels.triton.attention_prefill import LEAST, attend_keys, candidates_for
from perfmodel_executors.kernels.triton.segments import num_tiles, tile_of_segment


@triton.jit(do_not_specialize=["table_stride", "num_chunks"])
def _prefill_kernel(
    q_ptr, q_sinks_ptr, own_k_ptr, own_v_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, tables_ptr, starts_ptr,
    computed_ptr, out_ptr, table_stride, num_chunks, scale_log2,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
    WINDOW: tl.constexpr, FIRST: tl.constexpr, RING: tl.constexpr, H_PAD: tl.constexpr, V_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
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
    before = tl.load(computed_ptr + chunk).to(tl.int32)
    table_ptr = tables_ptr + chunk * table_stride
    own_row = begin - before

    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    is_row = (row < TOKENS * GROUP) & (token < length)
    out_row = (begin + token).to(tl.int64) * N + head * GROUP + row % GROUP
    column = tl.arange(0, H_PAD)
    q_at = out_row[:, None] * H + column[None, :]
    q_mask = is_row[:, None] & (column < H)[None, :]
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0).to(DTYPE)
    position = before + token
    end = before + tl.minimum(first_token + TOKENS, length)
    low = tl.maximum(before + first_token - WINDOW + 1, FIRST)  # of the window of the tile's first query

    acc = tl.zeros([ROWS, V_PAD], tl.float32)
    largest = tl.full([ROWS], LEAST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if FIRST > 0:
        q_sinks = tl.load(q_sinks_ptr + q_at, mask=q_mask, other=0.0).to(DTYPE)
        kept = tl.minimum(before, FIRST)
        acc, largest, total = attend_keys(
            acc, largest, total, q_sinks, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head, 0, kept, scale_log2,
            position, 0, kept, 0, row, None,
            K, H, HV, PAGE, FORMAT, 0, 0, False, H_PAD, V_PAD, KEYS, 0, True,
        )  # fmt: skip
        acc, largest, total = attend_keys(
            acc, largest, total, q_sinks, own_k_ptr, own_v_ptr, None, None, None, head, before, tl.minimum(end, FIRST),
            scale_log2, position, before, tl.minimum(end, FIRST), 0, row, own_row,
            K, H, HV, PAGE, "plain", 0, 0, False, H_PAD, V_PAD, KEYS, 0, True,
        )  # fmt: skip
    acc, largest, total = attend_keys(
        acc, largest, total, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head, low, before, scale_log2,
        position, low, before, 0, row, None,
        K, H, HV, PAGE, FORMAT, WINDOW, 0, False, H_PAD, V_PAD, KEYS, 0, True, FIRST, RING,
    )  # fmt: skip
    low = tl.maximum(low, before)
    acc, largest, total = attend_keys(
        acc, largest, total, q, own_k_ptr, own_v_ptr, None, None, None, head, low, end, scale_log2,
        position, low, end, 0, row, own_row,
        K, H, HV, PAGE, "plain", WINDOW, 0, False, H_PAD, V_PAD, KEYS, 0, True,
    )  # fmt: skip
    out_column = tl.arange(0, V_PAD)[None, :]
    out = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row[:, None] * HV + out_column, out, mask=is_row[:, None] & (out_column < HV))


def _shared_bytes(config: TileConfig, capability: int, widths: tuple[int, int], product: int) -> int:
    """An upper bound. A chunk's own keys and values wait for no block table, so every stage of the pipeline is theirs;
    beside them are both queries and, where warps multiply, what these exchange."""
    rows, keys = config.sizes["ROWS"], config.sizes["KEYS"]
    own = pipelined_bytes(keys * sum(widths) * product, config, capability)
    return 2 * rows * max(widths) * product + own + rows * keys * product + 4096


def attention_sinks_prefill(
    q_TNH: Tensor,
    q_sinks_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    pages: KVPages,
    chunks: Chunks,
    ring: Ring,
    is_rolling: bool,
    *,
    config: TileConfig | None = None,
) -> Tensor:
    """[T, N, H_v]; the reference says what the arguments are."""
    (num_tokens, num_heads, head_dim), (_, kv_heads, v_dim) = q_TNH.shape, v_TKH.shape
    group, num_chunks = num_heads // kv_heads, len(chunks.tables_GM)
    form = kv_pages.format_of(pages.dtype, q_TNH.device)
    out_TNH = q_TNH.new_empty(num_tokens, num_heads, v_dim)
    own = (as_stored(x, pages.dtype).contiguous() for x in (k_TKH, v_TKH))
    args = (
        q_TNH.contiguous(), q_sinks_TNH.contiguous(), *own,
        kv_pages.raw(pages.k_BSKH, form), kv_pages.raw(pages.v_BSKH, form), pages.k_scale_BKS, pages.v_scale_BKS,
        *chunks[:3], out_TNH, chunks.tables_GM.stride(0), num_chunks, math.log2(math.e) / math.sqrt(head_dim),
    )  # fmt: skip
    widths = (padded(head_dim), padded(v_dim))
    constants = {
        "N": num_heads, "K": kv_heads, "H": head_dim, "HV": v_dim, "PAGE": pages.block_size, "FORMAT": form,
        "WINDOW": ring.window, "FIRST": ring.sinks, "RING": ring.window if is_rolling else 0,
        "H_PAD": widths[0], "V_PAD": widths[1],
    }  # fmt: skip

    def run(config: TileConfig) -> None:
        grid = (num_tiles(num_tokens, num_chunks, config.sizes["ROWS"] // group), kv_heads)
        launch(_prefill_kernel, grid, *args, options=config.options, **constants, **config.sizes)

    rows, capability = -(-num_tokens // num_chunks) * group, capability_of(q_TNH.device)
    listing = partial(candidates_for, rows, group, max(widths), capability, pages.is_quantized)
    law = partial(_shared_bytes, widths=widths, product=q_TNH.itemsize)
    key = (num_tokens.bit_length(), num_chunks.bit_length(), tuple(constants.values()), q_TNH.dtype, pages.dtype)
    run(config or pick("attention_sinks_prefill", key, listing, law, run, q_TNH.device))
    return out_TNH


def attention_sinks_decode(
    q_DNH: Tensor,
    pages: KVPages,
    block_tables_DM: Tensor,
    context_lens_D: Tensor,
    ring: Ring,
    is_rolling: bool,
    rope_table_PH: Tensor | None,
) -> Tensor:
    """[D, N, H_v]; the reference says what the arguments are."""
    first = FirstTokens(ring.sinks, ring.size, rope_table_PH, is_rolling)
    return attention_decode(q_DNH, pages, block_tables_DM, context_lens_D, AttentionRule(ring.window), sinks=first)

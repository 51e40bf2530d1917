"""Prompts through a scan, in tiles of 64 tokens: what runs from tile to tile, and what all tiles do at once.

    erase (the delta rule)    [W | U] of every tile (`erase`)
    states                    from tile to tile: S' = e^g S + K^T (e^(g_end - g) w), of what its tokens write
    outputs                   every tile: (Q K^T e^(g_t - g_s)) w + e^g Q S

A program of the second has some columns of the state of one head of one sequence in registers and walks over its
tiles: two products a tile at most, in a chain. It leaves behind the state before each tile, so that the third needs no
order. What tokens write is b v, or U - W S under the delta rule, which then lies where U lay.
"""

__all__ = ["scan_prefill"]

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.scan.inputs import ScanInputs
from perfmodel_executors.kernels.scan.triton.erase import TILE, erase_terms
from perfmodel_executors.kernels.segments.triton import num_tiles, tile_of_segment
from perfmodel_executors.kernels.tiles import padded

_LOG2_E = tl.constexpr(1.4426950408889634)
_STATES = Options(num_warps=4, num_stages=2)
_OUTPUTS = Options(num_warps=4, num_stages=1)
_STATE_COLUMNS = 32  # of a program that walks: a long prompt alone has heads times four of them
_OUTPUT_COLUMNS = 64


@triton.jit
def _scan_states_kernel(
    k_ptr, v_ptr, decay_ptr, beta_ptr, w_ptr, u_ptr, rows_ptr, starts_ptr, states_ptr, before_ptr, k_stride, v_stride,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ERASES: tl.constexpr, K_PAD: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    begin = tl.load(starts_ptr + chunk).to(tl.int32)
    count = tl.load(starts_ptr + chunk + 1).to(tl.int32) - begin
    tile = (begin // TILE + chunk).to(tl.int64)
    k_row = tl.arange(0, K_PAD)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = k_row[:, None] * V + column[None, :]
    mask = (k_row < K)[:, None] & (column < V)[None, :]
    state_ptrs = states_ptr + (tl.load(rows_ptr + chunk) * H + head) * (K * V) + inside
    state = tl.load(state_ptrs, mask=mask, other=0.0).to(tl.float32)
    for first in range(0, count, TILE):
        before = before_ptr + ((tile + first // TILE) * H + head) * (K * V) + inside
        tl.store(before, state.to(before_ptr.dtype.element_ty), mask=mask)
        token = first + tl.arange(0, TILE)
        is_token = token < count
        own = (begin + token).to(tl.int64)
        is_k = is_token[:, None] & (k_row < K)[None, :]
        is_v = is_token[:, None] & (column < V)[None, :]
        k = tl.load(k_ptr + own[:, None] * k_stride + head // (H // G) * K + k_row[None, :], mask=is_k, other=0.0)
        sums = tl.cumsum(tl.load(decay_ptr + own * H + head, mask=is_token, other=0.0) * _LOG2_E, axis=0)
        if ERASES:
            w = tl.load(w_ptr + (own * H + head)[:, None] * K + k_row[None, :], mask=is_k, other=0.0)
            u_ptrs = u_ptr + (own * H + head)[:, None] * V + column[None, :]
            written = tl.load(u_ptrs, mask=is_v, other=0.0).to(tl.float32)
            written -= tl.dot(w, state.to(w.dtype), input_precision="ieee")
            tl.store(u_ptrs, written.to(u_ptr.dtype.element_ty), mask=is_v)
        else:
            v = tl.load(v_ptr + own[:, None] * v_stride + head * V + column[None, :], mask=is_v, other=0.0)
            beta = tl.load(beta_ptr + own * H + head, mask=is_token, other=0.0)
            written = v.to(tl.float32) * beta[:, None]
        to_end = tl.sum(tl.where(tl.arange(0, TILE) == TILE - 1, sums, 0.0), axis=0)
        written *= tl.exp2(to_end - sums)[:, None]
        state = tl.dot(tl.trans(k), written.to(k.dtype), state * tl.exp2(to_end), input_precision="ieee")
    tl.store(state_ptrs, state.to(states_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_chunks"])
def _scan_outputs_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, skip_ptr, u_ptr, starts_ptr, before_ptr, out_ptr, num_chunks,
    q_stride, k_stride, v_stride,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ERASES: tl.constexpr, K_PAD: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    tile = tl.program_id(2)
    chunk, begin, count = tile_of_segment(starts_ptr, num_chunks, tile, TILE)
    first = (tile - begin // TILE - chunk) * TILE
    if first >= count:
        return
    token = first + tl.arange(0, TILE)
    is_token = token < count
    own = (begin + token).to(tl.int64)
    k_row = tl.arange(0, K_PAD)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_k = is_token[:, None] & (k_row < K)[None, :]
    is_v = is_token[:, None] & (column < V)[None, :]
    place = head // (H // G) * K + k_row[None, :]
    q = tl.load(q_ptr + own[:, None] * q_stride + place, mask=is_k, other=0.0)
    k = tl.load(k_ptr + own[:, None] * k_stride + place, mask=is_k, other=0.0)
    sums = tl.cumsum(tl.load(decay_ptr + own * H + head, mask=is_token, other=0.0) * _LOG2_E, axis=0)
    before = before_ptr + (tile.to(tl.int64) * H + head) * (K * V) + k_row[:, None] * V + column[None, :]
    state = tl.load(before, mask=(k_row < K)[:, None] & (column < V)[None, :], other=0.0)
    out = tl.dot(q, state, input_precision="ieee") * tl.exp2(sums)[:, None]

    row = tl.arange(0, TILE)
    is_past = row[None, :] <= row[:, None]
    between = tl.exp2(tl.where(is_past, sums[:, None] - sums[None, :], 0.0))
    scores = tl.where(is_past, tl.dot(q, tl.trans(k), input_precision="ieee") * between, 0.0)
    if ERASES:
        written = tl.load(u_ptr + (own * H + head)[:, None] * V + column[None, :], mask=is_v, other=0.0)
        out = tl.dot(scores.to(k.dtype), written, out, input_precision="ieee")
    else:
        v = tl.load(v_ptr + own[:, None] * v_stride + head * V + column[None, :], mask=is_v, other=0.0)
        beta = tl.load(beta_ptr + own * H + head, mask=is_token, other=0.0)
        out = tl.dot((scores * beta[None, :]).to(k.dtype), v, out, input_precision="ieee")
        if skip_ptr is not None:
            out += tl.load(skip_ptr + head) * v.to(tl.float32)
    tl.store(out_ptr + (own * H + head)[:, None] * V + column[None, :], out.to(out_ptr.dtype.element_ty), mask=is_v)


def scan_prefill(inputs: ScanInputs, rows_G: Tensor, starts_G: Tensor, states_RHKV: Tensor) -> Tensor:
    """Chunks of sequences behind one another, [T, H, V]; the reference says what the arguments are."""
    q_TGK, k_TGK, v_THV, decay_TH, beta_TH, skip_H = inputs[:6]
    (num_tokens, heads, values), (groups, keys) = v_THV.shape, q_TGK.shape[1:]
    num_chunks = len(rows_G)
    tiles = num_tiles(num_tokens, num_chunks, TILE)
    w_THK, u_THV = erase_terms(inputs, starts_G) if inputs.erases else (None, None)
    before = v_THV.new_empty(tiles, heads, keys, values)
    out_THV = torch.empty(num_tokens, heads, values, dtype=v_THV.dtype, device=v_THV.device)
    sizes = {"H": heads, "G": groups, "K": keys, "V": values, "ERASES": inputs.erases, "K_PAD": padded(keys)}
    strides = (k_TGK.stride(0), v_THV.stride(0))
    columns = min(_STATE_COLUMNS, padded(values))
    launch(
        _scan_states_kernel, (triton.cdiv(values, columns), heads, num_chunks),
        k_TGK, v_THV, decay_TH, beta_TH, w_THK, u_THV, rows_G, starts_G, states_RHKV, before, *strides,
        options=_STATES, **sizes, TILE=TILE, COLUMNS=columns,
    )  # fmt: skip
    columns = min(_OUTPUT_COLUMNS, padded(values))
    launch(
        _scan_outputs_kernel, (triton.cdiv(values, columns), heads, tiles),
        q_TGK, k_TGK, v_THV, decay_TH, beta_TH, skip_H, u_THV, starts_G, before, out_THV, num_chunks, q_TGK.stride(0),
        *strides, options=_OUTPUTS, **sizes, TILE=TILE, COLUMNS=columns,
    )  # fmt: skip
    return out_THV

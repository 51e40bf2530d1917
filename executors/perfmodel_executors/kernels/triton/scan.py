"""Scans in tiles of 64 tokens: what runs from tile to tile, and what all tiles do at once.

    step                      a decode: bound by reading each state once and writing it once
    erase (the delta rule)    [W | U] of the WY form, of every tile: what its tokens write, but for the state before it

            (I + L) [W | U] = [b k e^g | b v],    L_ts = b_t k_t . k_s e^(g_t - g_s) for s < t

    states                    from tile to tile: S' = e^g S + K^T (e^(g_end - g) w), of what its tokens write
    outputs                   every tile: (Q K^T e^(g_t - g_s)) w + e^g Q S

What tokens write is b v, or U - W S under the delta rule, which then lies where U lay.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.scan import ScanInputs
from perfmodel_executors.kernels.tiles import padded
from perfmodel_executors.kernels.triton.segments import num_tiles, tile_of_segment

_OPTIONS = Options(num_warps=4, num_stages=1)
_MAX_ELEMENTS = 4096  # of a program's part of a state: 32 registers of each thread
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scan_step_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, skip_ptr, rows_ptr, states_ptr, out_ptr, q_stride, k_stride, v_stride,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ERASES: tl.constexpr, K_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k_row = tl.arange(0, K_PAD)
    is_column, is_row = column < V, k_row < K
    place = head // (H // G) * K + k_row
    q = tl.load(q_ptr + seq * q_stride + place, mask=is_row, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + seq * k_stride + place, mask=is_row, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + seq * v_stride + head * V + column, mask=is_column, other=0.0).to(tl.float32)
    decay = tl.exp2(tl.load(decay_ptr + seq * H + head) * _LOG2_E)
    beta = tl.load(beta_ptr + seq * H + head)

    state_row = tl.load(rows_ptr + seq) * H + head
    state_ptrs = states_ptr + (state_row * K + k_row)[:, None] * V + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    state = tl.load(state_ptrs, mask=mask, other=0.0).to(tl.float32) * decay
    written = v
    if ERASES:
        written = v - tl.sum(state * k[:, None], axis=0)
    state += k[:, None] * (written * beta)[None, :]
    tl.store(state_ptrs, state.to(states_ptr.dtype.element_ty), mask=mask)
    out = tl.sum(state * q[:, None], axis=0)
    if skip_ptr is not None:
        out += tl.load(skip_ptr + head) * v
    tl.store(out_ptr + (seq * H + head) * V + column, out.to(out_ptr.dtype.element_ty), mask=is_column)


def scan_decode(inputs: ScanInputs, rows_D: Tensor, states_RHKV: Tensor) -> Tensor:
    q_DGK, k_DGK, v_DHV = inputs[:3]
    (num_seqs, heads, values), (groups, keys) = v_DHV.shape, q_DGK.shape[1:]
    out_DHV = v_DHV.new_empty(num_seqs, heads, values)
    args = (*inputs[:6], rows_D, states_RHKV, out_DHV, q_DGK.stride(0), k_DGK.stride(0), v_DHV.stride(0))
    k_pad = triton.next_power_of_2(keys)
    columns = min(triton.next_power_of_2(values), max(16, _MAX_ELEMENTS // k_pad))
    sizes = {"H": heads, "G": groups, "K": keys, "V": values, "ERASES": inputs.erases, "K_PAD": k_pad}
    grid = (triton.cdiv(values, columns), heads, num_seqs)
    launch(_scan_step_kernel, grid, *args, options=_OPTIONS, **sizes, COLUMNS=columns)
    return out_DHV


TILE = 64  # tokens: four blocks
_BLOCK = tl.constexpr(16)
# Of the products that make the inverse, which is rounded to the keys' 16 bits afterwards: TF32 has as many bits as fp16
# and three more than bf16. In three such products for one (tf32x3) fragments spill.
_PRECISION = "tf32"


@triton.jit
def _inverse(lower, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 = X of a strictly lower triangular [TILE, TILE], in two parts, as rows of sixteen:

        D = (I + L_diagonal)^-1      row by row; the rows of all blocks of sixteen at once
        X = (I - N) (I + N^2) D      with N = D L_rest, whose fourth power is zero in a tile of four blocks

    Powers of the whole L would cancel where keys are alike (entries of 10^18 for 64 equal keys, in sums that are 1); in
    blocks, D takes them away before anything is squared.
    """
    row = tl.arange(0, TILE)[:, None]
    column = tl.arange(0, TILE)[None, :]
    is_near = row // _BLOCK == column // _BLOCK
    near = tl.where(is_near, lower, 0.0)
    # Without its diagonal of ones, D is what follows; row i of each block is made of the rows before it.
    inverse = -near
    for i in range(2, _BLOCK):
        is_row = (row % _BLOCK == i) & is_near
        line = tl.sum(tl.where(is_row, -near, 0.0), axis=0)
        weighed = tl.reshape(line, (TILE, 1))
        line += tl.sum(weighed * inverse, axis=0)
        inverse = tl.where(is_row, line[None, :], inverse)
    eye = tl.where(row == column, 1.0, 0.0)
    inverse += eye
    rest = tl.dot(inverse, lower - near, input_precision=PRECISION)
    squared = tl.dot(rest, rest, input_precision=PRECISION)
    return tl.dot(tl.dot(eye - rest, eye + squared, input_precision=PRECISION), inverse, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_chunks"])
def _erase_terms_kernel(
    k_ptr, v_ptr, decay_ptr, beta_ptr, starts_ptr, w_ptr, u_ptr, num_chunks, k_stride, v_stride,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.program_id(1)
    chunk, begin, count = tile_of_segment(starts_ptr, num_chunks, tile, TILE)
    token = (tile - begin // TILE - chunk) * TILE + tl.arange(0, TILE)
    if (tile - begin // TILE - chunk) * TILE >= count:
        return
    is_token = token < count
    own = (begin + token).to(tl.int64)
    k_column = tl.arange(0, K_PAD)
    v_column = tl.arange(0, V_PAD)
    is_k = is_token[:, None] & (k_column < K)[None, :]
    is_v = is_token[:, None] & (v_column < V)[None, :]
    k = tl.load(k_ptr + own[:, None] * k_stride + head // (H // G) * K + k_column[None, :], mask=is_k, other=0.0)
    beta = tl.load(beta_ptr + own * H + head, mask=is_token, other=0.0)[:, None]
    sums = tl.cumsum(tl.load(decay_ptr + own * H + head, mask=is_token, other=0.0) * _LOG2_E, axis=0)

    row = tl.arange(0, TILE)[:, None]
    column = tl.arange(0, TILE)[None, :]
    is_before = column < row
    between = tl.exp2(tl.where(is_before, sums[:, None] - sums[None, :], 0.0))
    lower = tl.dot(k, tl.trans(k), input_precision="ieee") * between * beta
    inverse = _inverse(tl.where(is_before, lower, 0.0), TILE, PRECISION).to(k.dtype)

    right = (k.to(tl.float32) * (beta * tl.exp2(sums)[:, None])).to(k.dtype)
    w = tl.dot(inverse, right, input_precision="ieee")
    tl.store(w_ptr + (own * H + head)[:, None] * K + k_column[None, :], w.to(w_ptr.dtype.element_ty), mask=is_k)
    v = tl.load(v_ptr + own[:, None] * v_stride + head * V + v_column[None, :], mask=is_v, other=0.0)
    u = tl.dot(inverse, (v.to(tl.float32) * beta).to(k.dtype), input_precision="ieee")
    tl.store(u_ptr + (own * H + head)[:, None] * V + v_column[None, :], u.to(u_ptr.dtype.element_ty), mask=is_v)


_STATES = Options(num_warps=4, num_stages=2)
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
    q_TGK, k_TGK, v_THV, decay_TH, beta_TH, skip_H = inputs[:6]
    (num_tokens, heads, values), (groups, keys) = v_THV.shape, q_TGK.shape[1:]
    num_chunks = len(rows_G)
    tiles = num_tiles(num_tokens, num_chunks, TILE)
    sizes = {"H": heads, "G": groups, "K": keys, "V": values, "K_PAD": padded(keys), "TILE": TILE}
    strides = (k_TGK.stride(0), v_THV.stride(0))
    w_THK, u_THV = None, None
    if inputs.erases:
        w_THK, u_THV = (v_THV.new_empty(num_tokens, heads, width) for width in (keys, values))
        precision = "ieee" if v_THV.dtype.itemsize == 4 else _PRECISION
        args = (k_TGK, v_THV, decay_TH, beta_TH, starts_G, w_THK, u_THV, num_chunks, *strides)
        own = {"V_PAD": padded(values), "PRECISION": precision}
        launch(_erase_terms_kernel, (heads, tiles), *args, options=_OPTIONS, **sizes, **own)
    before = v_THV.new_empty(tiles, heads, keys, values)
    out_THV = torch.empty(num_tokens, heads, values, dtype=v_THV.dtype, device=v_THV.device)
    sizes["ERASES"] = inputs.erases
    columns = min(_STATE_COLUMNS, padded(values))
    launch(
        _scan_states_kernel, (triton.cdiv(values, columns), heads, num_chunks),
        k_TGK, v_THV, decay_TH, beta_TH, w_THK, u_THV, rows_G, starts_G, states_RHKV, before, *strides,
        options=_STATES, **sizes, COLUMNS=columns,
    )  # fmt: skip
    columns = min(_OUTPUT_COLUMNS, padded(values))
    launch(
        _scan_outputs_kernel, (triton.cdiv(values, columns), heads, tiles),
        q_TGK, k_TGK, v_THV, decay_TH, beta_TH, skip_H, u_THV, starts_G, before, out_THV, num_chunks, q_TGK.stride(0),
        *strides, options=_OPTIONS, **sizes, COLUMNS=columns,
    )  # fmt: skip
    return out_THV

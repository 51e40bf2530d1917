"""The causal convolution on a GPU: bound by reading x once and writing as much. A program has some channels of a tile
of tokens of one sequence (`segments`); for each tap it loads the tile again from caches, a token further back."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.triton.segments import num_tiles, tile_of_segment

_OPTIONS = Options(num_warps=4, num_stages=1)
_TOKENS = 16
_CHANNELS = 64
_DECODE_CHANNELS = 256


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _causal_conv_decode_kernel(
    x_ptr, rows_ptr, inputs_ptr, weight_ptr, bias_ptr, out_ptr, x_stride,
    K: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < K
    x = tl.load(x_ptr + seq * x_stride + channel, mask=mask, other=0.0)
    left = inputs_ptr + (tl.load(rows_ptr + seq) * K + channel) * (TAPS - 1)
    acc = x.to(tl.float32) * tl.load(weight_ptr + channel * TAPS + TAPS - 1, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        earlier = tl.load(left + tap, mask=mask, other=0.0)
        acc += earlier.to(tl.float32) * tl.load(weight_ptr + channel * TAPS + tap, mask=mask, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(left + tap - 1, earlier, mask=mask)
    tl.store(left + TAPS - 2, x, mask=mask)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + seq * K + channel, _silu(acc).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_chunks"])
def _causal_conv_prefill_kernel(
    x_ptr, rows_ptr, starts_ptr, inputs_ptr, weight_ptr, bias_ptr, out_ptr, num_chunks, x_stride,
    K: tl.constexpr, TAPS: tl.constexpr, LEFT: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    chunk, begin, count = tile_of_segment(starts_ptr, num_chunks, tile, TOKENS)
    first_token = (tile - begin // TOKENS - chunk) * TOKENS
    if first_token >= count:
        return
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = (channel < K)[None, :]
    token = first_token + tl.arange(0, TOKENS)
    left = inputs_ptr + (tl.load(rows_ptr + chunk) * K + channel)[None, :] * (TAPS - 1)
    acc = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        source = token - (TAPS - 1) + tap
        is_new = (source >= 0) & (token < count)
        x_ptrs = x_ptr + (begin + source).to(tl.int64)[:, None] * x_stride + channel[None, :]
        x = tl.load(x_ptrs, mask=is_new[:, None] & is_channel, other=0.0).to(tl.float32)
        if first_token == 0:
            is_left = (source < 0) & (token < count)
            at = (source + TAPS - 1)[:, None]
            x += tl.load(left + at, mask=is_left[:, None] & is_channel, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=channel < K, other=0.0).to(tl.float32)
        acc += x * weight[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + channel, mask=channel < K, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + (begin + token).to(tl.int64)[:, None] * K + channel[None, :]
    tl.store(out_ptrs, _silu(acc).to(out_ptr.dtype.element_ty), mask=(token < count)[:, None] & is_channel)
    if first_token == 0:
        place = tl.arange(0, LEFT)
        last = count - (TAPS - 1) + place
        is_place = (place < TAPS - 1)[:, None] & is_channel
        is_last_new = (last >= 0)[:, None]
        new_ptrs = x_ptr + (begin + last).to(tl.int64)[:, None] * x_stride + channel[None, :]
        new = tl.load(new_ptrs, mask=is_last_new & is_place, other=0.0)
        old = tl.load(left + (last + TAPS - 1)[:, None], mask=(last < 0)[:, None] & is_place, other=0.0)
        # All have read what the sequence left before any of them writes.
        tl.debug_barrier()
        tl.store(left + place[:, None], tl.where(is_last_new, new, old), mask=is_place)


def causal_conv_decode(
    x_DK: Tensor, rows_D: Tensor, inputs_RKW: Tensor, weight_KW: Tensor, bias_K: Tensor | None
) -> Tensor:
    (num_seqs, channels), taps = x_DK.shape, weight_KW.shape[1]
    out_DK = torch.empty(num_seqs, channels, dtype=x_DK.dtype, device=x_DK.device)
    args = (x_DK, rows_D, inputs_RKW, weight_KW, bias_K, out_DK, x_DK.stride(0))
    sizes = {"K": channels, "TAPS": taps, "CHANNELS": _DECODE_CHANNELS}
    grid = (triton.cdiv(channels, _DECODE_CHANNELS), num_seqs)
    launch(_causal_conv_decode_kernel, grid, *args, options=_OPTIONS, **sizes)
    return out_DK


def causal_conv_prefill(
    x_TK: Tensor, rows_G: Tensor, starts_G: Tensor, inputs_RKW: Tensor, weight_KW: Tensor, bias_K: Tensor | None
) -> Tensor:
    (num_tokens, channels), taps = x_TK.shape, weight_KW.shape[1]
    out_TK = torch.empty(num_tokens, channels, dtype=x_TK.dtype, device=x_TK.device)
    args = (x_TK, rows_G, starts_G, inputs_RKW, weight_KW, bias_K, out_TK, len(rows_G), x_TK.stride(0))
    sizes = {"K": channels, "TAPS": taps, "LEFT": triton.next_power_of_2(max(2, taps - 1))}
    grid = (triton.cdiv(channels, _CHANNELS), num_tiles(num_tokens, len(rows_G), _TOKENS))
    tiles = {"TOKENS": _TOKENS, "CHANNELS": _CHANNELS}
    launch(_causal_conv_prefill_kernel, grid, *args, options=_OPTIONS, **sizes, **tiles)
    return out_TK

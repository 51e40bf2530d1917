"""RoPE and the paged KV write in one kernel: q, k and v are read once, the rotated q and the pages written once.

    bytes = b T ((2 N + K) H + K H_v) + b_kv T K (H + H_v)

A program takes a few heads of a few tokens: heads of one token share its rotation, and a token's heads are contiguous.
The rotation runs in fp32 and is rounded once (the reference rounds each product to the activations' dtype).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.kv_pages import FP8, INT8_MAX, MIN_SCALE, KVPages
from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.triton.kv_pages import encode_fp8, encode_int8, raw

_HEADS = 4  # of a program
_MANY_TOKENS = 512  # from here on, programs of several tokens still fill the machine
_INT8_MAX = tl.constexpr(INT8_MAX)
_MIN_SCALE = tl.constexpr(MIN_SCALE)


@triton.jit
def _rotated(x_ptr, cos_sin_ptr, token, row, is_row, H: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr):
    """Both halves of heads [tokens, heads, HALF] in fp32, and the mask of their elements."""
    column = tl.arange(0, HALF)[None, None, :]
    mask = is_row & (column < H // 2)
    first = tl.load(x_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + row + H // 2 + column, mask=mask, other=0.0).to(tl.float32)
    if ROPE:
        table = cos_sin_ptr + token * H + column
        cos = tl.load(table, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(table + H // 2, mask=mask, other=0.0).to(tl.float32)
        first, second = first * cos - second * sin, second * cos + first * sin
    return first, second, mask


@triton.jit
def _int8_scale(amax, scale_ptr, slot, head, is_row, K: tl.constexpr, PAGE: tl.constexpr):
    """Stores the scales [tokens, heads, 1] of rows whose largest magnitudes are given, and returns them."""
    scale = tl.maximum(tl.math.div_rn(amax, _INT8_MAX), _MIN_SCALE)
    tl.store(scale_ptr + (slot // PAGE * K + head) * PAGE + slot % PAGE, scale, mask=is_row)
    return scale


@triton.jit
def _encoded(x, scale, pages_ptr, FORMAT: tl.constexpr):
    if FORMAT == "fp8":
        return encode_fp8(x)
    elif FORMAT == "int8":
        return encode_int8(x, scale)
    else:
        return x.to(pages_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_kv_write_kernel(
    q_ptr, k_ptr, v_ptr, cos_sin_ptr, slots_ptr, out_ptr, k_pages_ptr, v_pages_ptr, k_scale_ptr, v_scale_ptr,
    num_tokens, q_stride, k_stride, v_stride,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
    ROPE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None, None]
    is_token = token < num_tokens
    half = tl.arange(0, HALF)[None, None, :]
    kv_programs: tl.constexpr = (K + HEADS - 1) // HEADS
    program = tl.program_id(1)
    if kv_programs > 0 and program < kv_programs:
        head = (program * HEADS + tl.arange(0, HEADS))[None, :, None]
        is_row = is_token & (head < K)
        slot = tl.load(slots_ptr + token, mask=is_token, other=0).to(tl.int64)
        row = token * k_stride + head * H
        first, second, mask = _rotated(k_ptr, cos_sin_ptr, token, row, is_row, H, HALF, ROPE)
        column = tl.arange(0, V_PAD)[None, None, :]
        v_mask = is_row & (column < HV)
        v = tl.load(v_ptr + token * v_stride + head * HV + column, mask=v_mask, other=0.0).to(tl.float32)
        k_scale = 1.0
        v_scale = 1.0
        if FORMAT == "int8":
            # Quantised is what the activations' dtype holds, as when k is rotated and written by two kernels.
            first = first.to(k_ptr.dtype.element_ty).to(tl.float32)
            second = second.to(k_ptr.dtype.element_ty).to(tl.float32)
            amax = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=2, keep_dims=True)
            k_scale = _int8_scale(amax, k_scale_ptr, slot, head, is_row, K, PAGE)
            v_amax = tl.max(tl.abs(v), axis=2, keep_dims=True)
            v_scale = _int8_scale(v_amax, v_scale_ptr, slot, head, is_row, K, PAGE)
        k_target = k_pages_ptr + (slot * K + head) * H + half
        tl.store(k_target, _encoded(first, k_scale, k_pages_ptr, FORMAT), mask=mask)
        tl.store(k_target + H // 2, _encoded(second, k_scale, k_pages_ptr, FORMAT), mask=mask)
        v_target = v_pages_ptr + (slot * K + head) * HV + column
        tl.store(v_target, _encoded(v, v_scale, v_pages_ptr, FORMAT), mask=v_mask)
    else:
        head = ((program - kv_programs) * HEADS + tl.arange(0, HEADS))[None, :, None]
        row = token * q_stride + head * H
        first, second, mask = _rotated(q_ptr, cos_sin_ptr, token, row, is_token & (head < N), H, HALF, ROPE)
        target = out_ptr + (token * N + head) * H + half
        tl.store(target, first.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(target + H // 2, second.to(out_ptr.dtype.element_ty), mask=mask)


def rope_kv_write(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cos_sin_TH: Tensor | None, pages: KVPages, slots_T: Tensor
) -> Tensor:
    """The rotated queries (the given ones for a None table); keys and values go to their slots of `pages`."""
    num_tokens, num_heads, head_dim = q_TNH.shape
    kv_heads, v_dim = v_TKH.shape[1:]
    q_TNH, k_TKH, v_TKH = (_with_whole_rows(x) for x in (q_TNH, k_TKH, v_TKH))
    out_TNH = q_TNH if cos_sin_TH is None else torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    form = {FP8: "fp8", torch.int8: "int8"}.get(pages.dtype, "plain")
    k_BSKH, v_BSKH = (raw(p, "fp8_bits" if form == "fp8" else form) for p in pages[:2])
    tokens, options = _block(num_tokens, head_dim)
    programs = triton.cdiv(kv_heads, _HEADS) + (0 if cos_sin_TH is None else triton.cdiv(num_heads, _HEADS))
    args = (q_TNH, k_TKH, v_TKH, cos_sin_TH, slots_T, out_TNH, k_BSKH, v_BSKH, pages.k_scale_BKS, pages.v_scale_BKS)
    strides = (num_tokens, q_TNH.stride(0), k_TKH.stride(0), v_TKH.stride(0))
    launch(
        _rope_kv_write_kernel, (triton.cdiv(num_tokens, tokens), programs), *args, *strides, options=options,
        N=num_heads, K=kv_heads, H=head_dim, HV=v_dim, PAGE=pages.block_size, FORMAT=form,
        ROPE=cos_sin_TH is not None, TOKENS=tokens, HEADS=_HEADS, HALF=triton.next_power_of_2(head_dim // 2),
        V_PAD=triton.next_power_of_2(v_dim),
    )  # fmt: skip
    return out_TNH


def rope(x_TNH: Tensor, cos_sin_TH: Tensor) -> Tensor:
    """x rotated, in its own memory's order but contiguous; `cos_sin_TH`: see `rope_table`."""
    num_tokens, num_heads, head_dim = x_TNH.shape
    x_TNH = _with_whole_rows(x_TNH)
    out_TNH = torch.empty_like(x_TNH, memory_format=torch.contiguous_format)
    tokens, options = _block(num_tokens, head_dim)
    # Without keys there are programs for queries alone; what the others would read is not looked at.
    launch(
        _rope_kv_write_kernel, (triton.cdiv(num_tokens, tokens), triton.cdiv(num_heads, _HEADS)),
        x_TNH, x_TNH, x_TNH, cos_sin_TH, None, out_TNH, out_TNH, out_TNH, None, None,
        num_tokens, x_TNH.stride(0), 0, 0, options=options,
        N=num_heads, K=0, H=head_dim, HV=head_dim, PAGE=1, FORMAT="plain", ROPE=True, TOKENS=tokens, HEADS=_HEADS,
        HALF=triton.next_power_of_2(head_dim // 2), V_PAD=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return out_TNH


def kv_write(k_TKH: Tensor, v_TKH: Tensor, pages: KVPages, slots_T: Tensor) -> None:
    """Keys and values go to their slots of `pages`, quantised as these are."""
    rope_kv_write(k_TKH, k_TKH, v_TKH, None, pages, slots_T)


def _with_whole_rows(x_TNH: Tensor) -> Tensor:
    """x with a token's heads side by side; tokens may lie apart (q, k and v of one projection)."""
    return x_TNH if x_TNH.stride()[1:] == (x_TNH.shape[2], 1) else x_TNH.contiguous()


def _block(num_tokens: int, head_dim: int) -> tuple[int, Options]:
    """Tokens of a program, and warps with 32 elements a thread: four loads of 16 bytes."""
    tokens = 8 if num_tokens >= _MANY_TOKENS else 1
    elements = tokens * _HEADS * triton.next_power_of_2(head_dim)
    return tokens, Options(num_warps=max(1, min(8, elements // 1024)), num_stages=1)

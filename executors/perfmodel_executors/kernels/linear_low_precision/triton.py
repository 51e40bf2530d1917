"""y = (q(x) W^T) * token scale * output scale + b, on the 8-bit tensor cores: two kernels, or three.

The first quantises x, a token each program (one read of x, the row stays in registers between the largest magnitude and
the rounding). The second multiplies, W on the left as in `linear` for few tokens, and scales its sums. With few tiles K
is cut into slices, which a third adds up. e4m3 needs sm_89; Hopper sums FP8 products with fewer bits than fp32 has.
"""

__all__ = ["linear_fp8", "linear_w8a8", "low_precision_shared_bytes", "quantize_tokens"]

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.split_k.triton import (
    add_slices,
    num_slices,
    own_blocks,
    slice_buffer,
    store_transposed,
)
from perfmodel_executors.kernels.tiles import TileConfig, pick
from perfmodel_executors.kernels.weight_formats.containers import Fp8Weight, Int8Weight
from perfmodel_executors.kernels.weight_formats.quantize import FP8_MAX, INT8_MAX
from perfmodel_executors.kernels.weight_formats.triton import add_products_8bit, check_format

_FEW_TOKENS = 64
_LEAST_TOKENS = 16  # columns of a tile
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves fp32 no bits below one, rounded to nearest even

# BLOCK_N, BLOCK_K, warps, stages.
_FEW_TOKENS_TILES = ((64, 256, 4, 4), (128, 128, 4, 4), (64, 128, 4, 5), (128, 256, 4, 3), (64, 128, 4, 3))
# BLOCK_M, then as above.
_MANY_TOKENS_TILES = ((128, 128, 128, 8, 3), (256, 128, 128, 8, 3), (128, 128, 128, 4, 3), (64, 128, 128, 4, 3))


@triton.jit
def _quantize_tokens_kernel(
    x_ptr, values_ptr, scales_ptr, K, x_stride,
    LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr, ROUNDS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=0), LARGEST), 1e-12)
    values = tl.div_rn(x, scale)
    if IS_INTEGER:
        codes = ((values + _ROUNDER) - _ROUNDER).to(tl.int8)
    else:
        values = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
        if (
            ROUNDS_FIRST
        ):  # to e4m3's four significant bits: the interpreter's own cast loses the carry into the exponent
            bits = values.to(tl.int32, bitcast=True)
            bits += 0x7FFFF + ((bits >> 20) & 1)
            values = (bits & -0x100000).to(tl.float32, bitcast=True)
        codes = values.to(values_ptr.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(values_ptr + row * K + k, codes, mask=k < K)
    tl.store(scales_ptr + row, scale)


@triton.jit(do_not_specialize=["M"])
def _scaled_product_kernel(
    x_ptr, x_scales_ptr, values_ptr, scales_ptr, bias_ptr, out_ptr, M, N, K, values_stride, slice_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    sums: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    first, last = own_blocks(tl.cdiv(K, BLOCK_K), SPLIT_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=sums)
    x_ptrs = x_ptr + (m % M).to(tl.int64)[None, :] * K + k[:, None]
    values_ptrs = values_ptr + (n % N).to(tl.int64)[:, None] * values_stride + k[None, :]
    acc = add_products_8bit(acc, x_ptrs, values_ptrs, K, first, last, BLOCK_K, EVEN_K)
    x_scales = tl.load(x_scales_ptr + m, mask=m < M, other=0.0)
    scales = tl.load(scales_ptr + n, mask=n < N, other=0.0)
    scaled = acc.to(tl.float32) * x_scales[None, :] * scales[:, None]
    store_transposed(scaled, bias_ptr, out_ptr, m, n, M, N, slice_stride, SPLIT_K)


def linear_w8a8(
    x_MK: Tensor, weight: Int8Weight, bias_N: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """The product [M, N] in x's dtype."""
    return _linear("linear_w8a8", x_MK, weight, bias_N, config)


def linear_fp8(
    x_MK: Tensor, weight: Fp8Weight, bias_N: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """The product [M, N] in x's dtype.

    Raises PerfmodelError on a device without FP8 tensor cores.
    """
    check_format(weight, x_MK.device)
    return _linear("linear_fp8", x_MK, weight, bias_N, config)


def low_precision_shared_bytes(config: TileConfig, capability: int, is_integer: bool) -> int:
    """Shared memory of a thread block: both operands, a byte an element; 16 for the barriers of tensor memory.

    Blackwell's tensor memory takes no integers: INT8 runs there as on Ampere.
    """
    sizes, stages = config.sizes, config.options.num_stages
    operands = (sizes["BLOCK_M"] + sizes["BLOCK_N"]) * sizes["BLOCK_K"]
    if not 90 <= capability < (100 if is_integer else 120):
        return operands * (stages - 1)
    return operands * stages + (16 if capability >= 100 else 0)


def _linear(
    kernel: str, x_MK: Tensor, weight: Int8Weight | Fp8Weight, bias_N: Tensor | None, config: TileConfig | None
) -> Tensor:
    (m, k), n = x_MK.shape, weight.shape[0]
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    quantized = quantize_tokens(x_MK, weight.values_NK.dtype)
    y_MN = torch.empty(m, n, dtype=x_MK.dtype, device=x_MK.device)
    run = partial(_multiply, *quantized, weight, bias_N, y_MN)
    if config is None:
        problem = (triton.next_power_of_2(m), n, k, x_MK.dtype)
        candidates = partial(_candidates, m, n, k, x_MK.device)
        law = partial(low_precision_shared_bytes, is_integer=isinstance(weight, Int8Weight))
        config = pick(kernel, problem, candidates, law, run, x_MK.device)
    run(config)
    return y_MN


def quantize_tokens(x_MK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x in `dtype` [M, K], fp32 scales [M])."""
    m, k = x_MK.shape
    values_MK = torch.empty(m, k, dtype=dtype, device=x_MK.device)
    scales_M = torch.empty(m, dtype=torch.float32, device=x_MK.device)
    block = triton.next_power_of_2(k)
    options = Options(num_warps=max(1, min(16, block // 512)), num_stages=1)
    is_integer = dtype == torch.int8
    constants = {"LARGEST": INT8_MAX if is_integer else FP8_MAX, "IS_INTEGER": is_integer}
    args = (x_MK, values_MK, scales_M, k, x_MK.stride(0))
    rounds_first = x_MK.device.type == "cpu"
    launch(_quantize_tokens_kernel, (m,), *args, options=options, ROUNDS_FIRST=rounds_first, BLOCK=block, **constants)
    return values_MK, scales_M


def _multiply(
    values_MK: Tensor,
    scales_M: Tensor,
    weight: Int8Weight | Fp8Weight,
    bias_N: Tensor | None,
    y_MN: Tensor,
    config: TileConfig,
) -> None:
    (m, k), n, sizes = values_MK.shape, y_MN.shape[1], config.sizes
    out = slice_buffer(y_MN, sizes["SPLIT_K"])
    tensors = (values_MK, scales_M, weight.values_NK, weight.scales_N, bias_N, out)
    args = (*tensors, m, n, k, weight.values_NK.stride(0), m * n)
    grid = (triton.cdiv(n, sizes["BLOCK_N"]), sizes["SPLIT_K"], triton.cdiv(m, sizes["BLOCK_M"]))
    even = k % sizes["BLOCK_K"] == 0
    launch(_scaled_product_kernel, grid, *args, options=config.options, EVEN_K=even, **sizes)
    if sizes["SPLIT_K"] > 1:
        add_slices(out, bias_N, y_MN)


def _candidates(m: int, n: int, k: int, device: torch.device) -> Iterator[TileConfig]:
    few, block_m = m <= _FEW_TOKENS, max(_LEAST_TOKENS, triton.next_power_of_2(m))
    tiles = [(block_m, *tile) for tile in _FEW_TOKENS_TILES] if few else _MANY_TOKENS_TILES
    for block_m, block_n, block_k, warps, stages in tiles:
        blocks = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
        slices = num_slices(blocks, triton.cdiv(k, block_k), device, blocks_per_unit=2 if few else 1)
        sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "SPLIT_K": slices}
        yield TileConfig(sizes, Options(warps, stages))

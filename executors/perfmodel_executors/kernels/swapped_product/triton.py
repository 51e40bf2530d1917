"""y^T = W x^T: W is the left operand, so that it fills the 64 to 128 rows that a tensor-core instruction has and the
tokens its columns, of which 8 are enough. Nothing of W is read twice while the tokens are few.

Tensor cores take fragments of the left operand from registers, where codes are widened on their way from SRAM: how is
the format's (`weight_formats`). With few tiles K is cut into slices, which a second kernel adds up.
"""

__all__ = ["swapped_product"]

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import launch
from perfmodel_executors.kernels.split_k.triton import add_slices, own_blocks, slice_buffer
from perfmodel_executors.kernels.swapped_product.tiling import candidates, shared_bytes
from perfmodel_executors.kernels.tiles import TileConfig, pick
from perfmodel_executors.kernels.weight_formats.operand import Operand
from perfmodel_executors.kernels.weight_formats.triton import scaled, tile_sums


@triton.jit(do_not_specialize=["M"])
def _swapped_product_kernel(
    x_ptr, x_scales_ptr, x_stride, values_ptr, row_scales_ptr, group_scales_ptr, zeros_ptr, row_stride, bias_ptr,
    out_ptr, M, N, K, slice_stride,
    FORMAT: tl.constexpr, GROUP_SIZE: tl.constexpr, EVEN_K: tl.constexpr, BY_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, last = own_blocks(tl.cdiv(K, BLOCK_K), SPLIT_K)
    # Rows beyond the end wrap around: they are computed and not stored, which is cheaper than a mask in the loop.
    sums = tile_sums(
        x_ptr, x_scales_ptr, M, x_stride, m % M, values_ptr, group_scales_ptr, zeros_ptr, row_stride, n % N, N, K,
        first, last, FORMAT, GROUP_SIZE, EVEN_K, BY_BITS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    sums = scaled(sums, x_scales_ptr, tl.minimum(m, M - 1), row_scales_ptr, tl.minimum(n, N - 1), FORMAT)
    if SPLIT_K > 1:
        out_ptr += tl.program_id(1).to(tl.int64) * slice_stride
    elif bias_ptr is not None:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


def swapped_product(
    kernel: str,
    x_MK: Tensor,
    operand: Operand,
    bias_N: Tensor | None = None,
    config: TileConfig | None = None,
    codes: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The product [M, N] in x's dtype.

    kernel:  the operator, under whose name tiles are tuned
    x_MK:    the activations; their rows may lie apart, their elements not
    operand: the weight
    bias_N:  added to each row, if there is one
    config:  the tile, instead of the one that fits the problem
    codes:   x in the weight's format, and the scales of its rows, where activations are quantised
    """
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    m, (n, k) = len(x_MK), operand.shape
    y_MN = torch.empty(m, n, dtype=x_MK.dtype, device=x_MK.device)
    run = partial(_run, x_MK, operand, bias_N, codes, y_MN)
    if config is None:
        problem = (triton.next_power_of_2(m), n, k, x_MK.dtype, *operand.problem)
        law = partial(shared_bytes, operand, x_MK.element_size())
        config = pick(kernel, problem, partial(candidates, operand, m, x_MK.device), law, run, x_MK.device)
    run(config)
    return y_MN


def _run(
    x_MK: Tensor,
    operand: Operand,
    bias_N: Tensor | None,
    codes: tuple[Tensor, Tensor] | None,
    y_MN: Tensor,
    config: TileConfig,
) -> None:
    (m, k), n, sizes = x_MK.shape, y_MN.shape[1], config.sizes
    values_MK, scales_M = codes or (x_MK, None)
    out = slice_buffer(y_MN, sizes["SPLIT_K"])
    launch(
        _swapped_product_kernel,
        (triton.cdiv(n, sizes["BLOCK_N"]), sizes["SPLIT_K"], triton.cdiv(m, sizes["BLOCK_M"])),
        *(values_MK, scales_M, values_MK.stride(0), *operand.arguments, bias_N, out, m, n, k, m * n),
        options=config.options,
        **operand.constants(x_MK, sizes["BLOCK_K"]),
        **sizes,
    )
    if sizes["SPLIT_K"] > 1:
        add_slices(out, bias_N, y_MN)

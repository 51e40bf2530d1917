"""y^T = dequantised(W) x^T: codes are widened in registers, on their way from SRAM to the tensor cores.

W is the left operand, whose fragments tensor cores take from registers (as in `linear` for few tokens). How codes
become the activations' dtype is in `weight_formats`.

Up to eight tokens a tile has eight columns, and Hopper runs the instructions of Ampere, which let a thread read
its codes as words; its own instructions want them two by two.
"""

__all__ = ["linear_w4a16", "linear_w8a16", "w4a16_shared_bytes", "w8a16_shared_bytes"]

from collections.abc import Callable, Iterator
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
from perfmodel_executors.kernels.weight_formats.containers import Fp8Weight, Int4Weight, Int8Weight
from perfmodel_executors.kernels.weight_formats.triton import add_products_4bit, add_products_8bit, check_format

_FEW_TOKENS = 64

# BLOCK_N, BLOCK_K (w8a16) or groups (w4a16), warps, stages.
_FEW_TOKENS_W8 = ((64, 256, 4, 4), (64, 128, 4, 5), (128, 128, 4, 4), (32, 256, 2, 4), (64, 128, 4, 3))
_FEW_TOKENS_W4 = ((64, 2, 4, 4), (64, 1, 4, 5), (128, 1, 4, 4), (32, 2, 2, 4), (64, 1, 4, 3))
# BLOCK_M, then as above.
_MANY_TOKENS_W8 = ((128, 128, 64, 8, 4), (256, 128, 64, 8, 3), (64, 128, 64, 4, 4), (64, 64, 64, 4, 3))
_MANY_TOKENS_W4 = ((128, 128, 1, 8, 3), (64, 128, 1, 8, 3), (64, 64, 1, 4, 3))


@triton.jit(do_not_specialize=["M"])
def _w8a16_kernel(
    x_ptr, values_ptr, scales_ptr, bias_ptr, out_ptr, M, N, K, x_stride, values_stride, slice_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first, last = own_blocks(tl.cdiv(K, BLOCK_K), SPLIT_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    x_ptrs = x_ptr + (m % M).to(tl.int64)[None, :] * x_stride + k[:, None]
    values_ptrs = values_ptr + (n % N).to(tl.int64)[:, None] * values_stride + k[None, :]
    acc = add_products_8bit(acc, x_ptrs, values_ptrs, K, first, last, BLOCK_K, EVEN_K)
    acc *= tl.load(scales_ptr + n, mask=n < N, other=0.0)[:, None]
    store_transposed(acc, bias_ptr, out_ptr, m, n, M, N, slice_stride, SPLIT_K)


@triton.jit(do_not_specialize=["M"])
def _w4a16_kernel(
    x_ptr, packed_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, M, N, num_groups, x_stride, packed_stride,
    slice_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SPLIT_K: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, GROUP_SIZE // 2)
    first, last = own_blocks(num_groups // GROUPS, SPLIT_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    x_ptrs = x_ptr + (m % M).to(tl.int64)[None, :] * x_stride + k[:, None]
    packed_ptrs = packed_ptr + (n % N).to(tl.int64)[:, None] * packed_stride + k[None, :]
    acc = add_products_4bit(
        acc, x_ptrs, packed_ptrs, scales_ptr, zeros_ptr, n % N, N, first, last, GROUPS, GROUP_SIZE, BY_BITS
    )
    store_transposed(acc, bias_ptr, out_ptr, m, n, M, N, slice_stride, SPLIT_K)


def linear_w8a16(
    x_MK: Tensor, weight: Int8Weight | Fp8Weight, bias_N: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """The product [M, N] in x's dtype.

    Raises PerfmodelError for e4m3 on a device that knows no such numbers.
    """
    check_format(weight, x_MK.device)
    m, (n, k) = x_MK.shape[0], weight.shape
    law = partial(w8a16_shared_bytes, element_bytes=x_MK.element_size())
    candidates = partial(_w8a16_candidates, m, n, k, x_MK.device)
    problem = (n, k, x_MK.dtype, weight.values_NK.dtype)
    return _linear("linear_w8a16", _run_w8a16, x_MK, weight, bias_N, config, problem, candidates, law)


def linear_w4a16(
    x_MK: Tensor, weight: Int4Weight, bias_N: Tensor | None = None, config: TileConfig | None = None
) -> Tensor:
    """The product [M, N] in x's dtype."""
    m, (n, k) = x_MK.shape[0], weight.shape
    law = partial(w4a16_shared_bytes, element_bytes=x_MK.element_size(), group_size=weight.group_size)
    candidates = partial(_w4a16_candidates, m, n, k // weight.group_size, x_MK.device)
    problem = (n, k, x_MK.dtype, weight.group_size, weight.zeros_GN is None)
    return _linear("linear_w4a16", _run_w4a16, x_MK, weight, bias_N, config, problem, candidates, law)


def w8a16_shared_bytes(config: TileConfig, capability: int, element_bytes: int) -> int:
    """Shared memory of a thread block. Codes leave their stage for registers before the product; x stays through it.

    16 bytes are the barriers of tensor memory.
    """
    sizes, stages = config.sizes, config.options.num_stages
    codes = sizes["BLOCK_N"] * sizes["BLOCK_K"]
    x = sizes["BLOCK_M"] * sizes["BLOCK_K"] * element_bytes
    if not _runs_ahead(config, capability):
        return (codes + x) * (stages - 1)
    return codes * (stages - 1) + x * stages + (16 if capability >= 100 else 0)


def w4a16_shared_bytes(config: TileConfig, capability: int, element_bytes: int, group_size: int) -> int:
    """Shared memory of a thread block; each group of an iteration has its own codes and x.

    A block with a thread for each output passes the scales through SRAM; where tensor memory holds the sums of a group,
    the next one waits for them.
    """
    sizes, stages = config.sizes, config.options.num_stages
    codes, x = sizes["BLOCK_N"] * group_size // 2, sizes["BLOCK_M"] * group_size * element_bytes
    codes, x = codes * sizes["GROUPS"], x * sizes["GROUPS"]
    if _runs_ahead(config, capability) and capability >= 100:
        return (codes + x) * (stages - 1) + 8
    scales = element_bytes * sizes["BLOCK_N"] if sizes["BLOCK_N"] == 32 * config.options.num_warps else 0
    return codes * (stages - 1) + x * (stages if _runs_ahead(config, capability) else stages - 1) + scales


def _runs_ahead(config: TileConfig, capability: int) -> bool:
    """Whether the product is an asynchronous instruction (Hopper, Blackwell), whose operands must outlive its issue."""
    return 90 <= capability < 120 and config.sizes["BLOCK_N"] >= 64 and config.sizes["BLOCK_M"] >= 16


def _linear(
    kernel: str,
    run: Callable[..., None],
    x_MK: Tensor,
    weight: Int8Weight | Fp8Weight | Int4Weight,
    bias_N: Tensor | None,
    config: TileConfig | None,
    problem: tuple[object, ...],
    candidates: Callable[[], Iterator[TileConfig]],
    law: Callable[[TileConfig, int], int],
) -> Tensor:
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    y_MN = torch.empty(x_MK.shape[0], weight.shape[0], dtype=x_MK.dtype, device=x_MK.device)
    runner = partial(run, x_MK, weight, bias_N, y_MN)
    if config is None:
        key = (triton.next_power_of_2(x_MK.shape[0]), *problem)
        config = pick(kernel, key, candidates, law, runner, x_MK.device)
    runner(config)
    return y_MN


def _run_w8a16(
    x_MK: Tensor, weight: Int8Weight | Fp8Weight, bias_N: Tensor | None, y_MN: Tensor, config: TileConfig
) -> None:
    (m, k), n, values_NK = x_MK.shape, y_MN.shape[1], weight.values_NK
    out = slice_buffer(y_MN, config.sizes["SPLIT_K"])
    strides = (x_MK.stride(0), values_NK.stride(0), m * n)
    args = (x_MK, values_NK, weight.scales_N, bias_N, out, m, n, k, *strides)
    even = k % config.sizes["BLOCK_K"] == 0
    launch(_w8a16_kernel, _grid(m, n, config), *args, options=config.options, EVEN_K=even, **config.sizes)
    if config.sizes["SPLIT_K"] > 1:
        add_slices(out, bias_N, y_MN)


def _run_w4a16(x_MK: Tensor, weight: Int4Weight, bias_N: Tensor | None, y_MN: Tensor, config: TileConfig) -> None:
    (m, k), n, packed_NJ = x_MK.shape, y_MN.shape[1], weight.packed_NJ
    out = slice_buffer(y_MN, config.sizes["SPLIT_K"])
    tensors = (x_MK, packed_NJ, weight.scales_GN, weight.zeros_GN, bias_N, out)
    args = (*tensors, m, n, k // weight.group_size, x_MK.stride(0), packed_NJ.stride(0), m * n)
    by_bits = x_MK.device.type != "cpu" and x_MK.dtype in (torch.bfloat16, torch.float16)
    constants = {"GROUP_SIZE": weight.group_size, "BY_BITS": by_bits, **config.sizes}
    launch(_w4a16_kernel, _grid(m, n, config), *args, options=config.options, **constants)
    if config.sizes["SPLIT_K"] > 1:
        add_slices(out, bias_N, y_MN)


def _grid(m: int, n: int, config: TileConfig) -> tuple[int, int, int]:
    sizes = config.sizes
    return triton.cdiv(n, sizes["BLOCK_N"]), sizes["SPLIT_K"], triton.cdiv(m, sizes["BLOCK_M"])


def _w8a16_candidates(m: int, n: int, k: int, device: torch.device) -> Iterator[TileConfig]:
    few, block_m = m <= _FEW_TOKENS, max(8, triton.next_power_of_2(m))
    tiles = [(block_m, *tile) for tile in _FEW_TOKENS_W8] if few else _MANY_TOKENS_W8
    for block_m, block_n, block_k, warps, stages in tiles:
        blocks = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
        slices = num_slices(blocks, triton.cdiv(k, block_k), device, blocks_per_unit=3 if few else 1)
        sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "SPLIT_K": slices}
        yield TileConfig(sizes, Options(warps, stages))


def _w4a16_candidates(m: int, n: int, num_groups: int, device: torch.device) -> Iterator[TileConfig]:
    few, block_m = m <= _FEW_TOKENS, max(8, triton.next_power_of_2(m))
    tiles = [(block_m, *tile) for tile in _FEW_TOKENS_W4] if few else _MANY_TOKENS_W4
    for block_m, block_n, groups, warps, stages in tiles:
        groups = groups if num_groups % groups == 0 else 1
        blocks = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
        slices = num_slices(blocks, num_groups // groups, device, blocks_per_unit=4 if few else 1)
        sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "GROUPS": groups, "SPLIT_K": slices}
        yield TileConfig(sizes, Options(warps, stages))

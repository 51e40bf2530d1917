"""Sums of the slices of a product: workspace, number of slices, and the kernel that adds them up in order.

One addition order, so equal inputs give equal bits; no host synchronisation, no counters that outlive a call.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.tiles import compute_units

_LEAST_BLOCKS = 4  # of K in a slice: a pipeline of fewer never fills
_MOST_SLICES = 32
_GROUP = tl.constexpr(8)  # tiles of tokens that are walked together, so that the L2 cache gives them their rows of W


@triton.jit
def grouped_tile(tiles_m, tiles_n):
    """(row, column) of this program's tile, in groups of rows."""
    tile = tl.program_id(0)
    group = tile // (_GROUP * tiles_n)
    rows = tl.minimum(tiles_m - group * _GROUP, _GROUP)
    return group * _GROUP + tile % (_GROUP * tiles_n) % rows, tile % (_GROUP * tiles_n) // rows


@triton.jit
def own_blocks(num_blocks, SPLIT_K: tl.constexpr):
    """(first, last + 1) of the blocks of K in this program's slice."""
    blocks = tl.cdiv(num_blocks, SPLIT_K)
    first = tl.program_id(1) * blocks
    return first, tl.minimum(first + blocks, num_blocks)


@triton.jit
def _add_slices_kernel(sums_ptr, bias_ptr, y_ptr, elements, N, SLICES: tl.constexpr, BLOCK: tl.constexpr):
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = element < elements
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for piece in tl.static_range(SLICES):
        total += tl.load(sums_ptr + piece * elements + element, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + element % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + element, total.to(y_ptr.dtype.element_ty), mask=mask)


def num_slices(tiles: int, blocks_of_k: int, device: torch.device, blocks_per_unit: int) -> int:
    """How many slices make `tiles` output tiles fill the device; each has four blocks of K or more, none is empty.

    blocks_per_unit: how many thread blocks a compute unit should have
    """
    wanted = blocks_per_unit * compute_units(device) // max(1, tiles)
    slices = max(1, min(wanted, blocks_of_k // _LEAST_BLOCKS, _MOST_SLICES))
    return -(-blocks_of_k // -(-blocks_of_k // slices))


def slice_buffer(y_MN: Tensor, slices: int) -> Tensor:
    """Where the product goes: y itself, or fp32 [slices, M, N]."""
    if slices == 1:
        return y_MN
    return torch.empty(slices, *y_MN.shape, dtype=torch.float32, device=y_MN.device)


def add_slices(sums_SMN: Tensor, bias_N: Tensor | None, y_MN: Tensor) -> None:
    """y = the sum of the slices + bias."""
    elements, block = y_MN.numel(), 512
    grid = (triton.cdiv(elements, block),)
    args = (sums_SMN, bias_N, y_MN, elements, y_MN.shape[1])
    launch(_add_slices_kernel, grid, *args, options=Options(num_warps=4), SLICES=sums_SMN.shape[0], BLOCK=block)

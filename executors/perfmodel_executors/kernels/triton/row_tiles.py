"""Tiles of whole rows: by addresses that each thread computes (cp.async), or by the copy engine of sm_90 and newer,
whose descriptor is made once a program (tensor descriptors).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def row_tiles(matrix_ptr, num_rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """What `tile_rows` takes tiles of `ROWS` rows from: of a matrix with `WIDTH` elements a row, without gaps."""
    if DESCRIPTORS:
        return tl.make_tensor_descriptor(matrix_ptr, [num_rows, WIDTH], [WIDTH, 1], [ROWS, WIDTH])
    else:
        return matrix_ptr


@triton.jit
def tile_rows(matrix, row, ROWS: tl.constexpr, WIDTH: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """[ROWS, WIDTH] from `row` on."""
    if DESCRIPTORS:
        return matrix.load([row, 0])
    else:
        rows = row.to(tl.int64) + tl.arange(0, ROWS)
        return tl.load(matrix + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])


def has_copy_engine(capability: int) -> bool:
    """Whether the compiler uses it there; 90 for sm_90."""
    return 90 <= capability < 120


def provide_scratch(device: torch.device) -> None:
    """Before a launch: global memory in which a kernel writes its descriptors."""
    if device.type == "cuda":
        triton.set_allocator(_scratch)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")

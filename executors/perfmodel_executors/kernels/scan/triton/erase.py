"""What tokens of a tile write under the gated delta rule, but for the state before the tile: [W | U] of the WY form.

    (I + L) [W | U] = [b k e^g | b v],    L_ts = b_t k_t . k_s e^(g_t - g_s) for s < t

The inverse X of I + L, in two parts, as rows of sixteen:

    D = (I + L_diagonal)^-1      row by row; the rows of all blocks of sixteen at once
    X = (I - N) (I + N^2) D      with N = D L_rest, whose fourth power is zero in a tile of four blocks

Powers of the whole L would cancel where keys are alike (entries of 10^18 for 64 equal keys, in sums that are 1); in
blocks, D takes them away before anything is squared.
"""

__all__ = ["TILE", "erase_terms"]

import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.scan.inputs import ScanInputs
from perfmodel_executors.kernels.segments.triton import num_tiles, tile_of_segment
from perfmodel_executors.kernels.tiles import padded

TILE = 64  # tokens: four blocks
_BLOCK = tl.constexpr(16)
_LOG2_E = tl.constexpr(1.4426950408889634)
_OPTIONS = Options(num_warps=4, num_stages=1)
# Of the products that make the inverse, which is rounded to the keys' 16 bits afterwards: TF32 has as many bits as fp16
# and three more than bf16. In three such products for one (tf32x3) fragments spill.
_PRECISION = "tf32"


@triton.jit
def _inverse(lower, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular [TILE, TILE]."""
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


def erase_terms(inputs: ScanInputs, starts_G: Tensor) -> tuple[Tensor, Tensor]:
    """(W [T, H, K], U [T, H, V]) in the dtype of the values."""
    _, k_TGK, v_THV = inputs[:3]
    (num_tokens, heads, values), (groups, keys) = v_THV.shape, k_TGK.shape[1:]
    num_chunks = len(starts_G) - 1
    w_THK, u_THV = (v_THV.new_empty(num_tokens, heads, width) for width in (keys, values))
    args = (
        k_TGK, v_THV, inputs.log_decay_TH, inputs.beta_TH, starts_G, w_THK, u_THV, num_chunks,
        k_TGK.stride(0), v_THV.stride(0),
    )  # fmt: skip
    sizes = {
        "H": heads, "G": groups, "K": keys, "V": values, "K_PAD": padded(keys), "V_PAD": padded(values), "TILE": TILE,
        "PRECISION": "ieee" if v_THV.dtype.itemsize == 4 else _PRECISION,
    }  # fmt: skip
    grid = (heads, num_tiles(num_tokens, num_chunks, TILE))
    launch(_erase_terms_kernel, grid, *args, options=_OPTIONS, **sizes)
    return w_THK, u_THV

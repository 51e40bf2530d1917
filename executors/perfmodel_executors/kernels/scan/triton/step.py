"""One step of a scan: bound by reading each state once and writing it once.

A program has some columns of the state of a sequence's head in registers, decays it, writes the new value to its key
and multiplies it by the query; rows of the state are reduced across threads.
"""

__all__ = ["scan_decode"]

import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.scan.inputs import ScanInputs

_OPTIONS = Options(num_warps=4, num_stages=1)
_MOST_ELEMENTS = 4096  # of a program's part of a state: 32 registers of each thread
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
    """One new token per sequence, [D, H, V]; the reference says what the arguments are."""
    q_DGK, k_DGK, v_DHV = inputs[:3]
    (num_seqs, heads, values), (groups, keys) = v_DHV.shape, q_DGK.shape[1:]
    out_DHV = v_DHV.new_empty(num_seqs, heads, values)
    args = (*inputs[:6], rows_D, states_RHKV, out_DHV, q_DGK.stride(0), k_DGK.stride(0), v_DHV.stride(0))
    k_pad = triton.next_power_of_2(keys)
    columns = min(triton.next_power_of_2(values), max(16, _MOST_ELEMENTS // k_pad))
    sizes = {"H": heads, "G": groups, "K": keys, "V": values, "ERASES": inputs.erases, "K_PAD": k_pad}
    grid = (triton.cdiv(values, columns), heads, num_seqs)
    launch(_scan_step_kernel, grid, *args, options=_OPTIONS, **sizes, COLUMNS=columns)
    return out_DHV

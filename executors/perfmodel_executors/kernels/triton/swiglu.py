"""Activations, gated and plain, in one pass: each program takes a piece of a row, 16 bytes a thread and load. Bytes:
3 T F b gated (reads gate and up, writes their product), 2 T F b plain, of elements of b bytes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch

_WARPS = 4
_BLOCK = 2048  # elements of a program: two vectors of eight for each thread and operand


@triton.jit
def act(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "sigmoid":
        return tl.sigmoid(x)
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # (1 + tanh z) / 2 = sigmoid(2 z)
        tl.static_assert(ACTIVATION == "gelu_new" or ACTIVATION == "gelu_pytorch_tanh", "unknown activation")
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def act_gated(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) * up in fp32; gpt-oss clamps both, and adds one to up."""
    if ACTIVATION == "swiglu_oai":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return (up + 1.0) * gate * tl.sigmoid(1.702 * gate)
    else:
        return act(gate, ACTIVATION) * up


@triton.jit
def _activate_kernel(
    x_ptr, y_ptr, columns, pieces, x_stride, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    value = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + columns + column, mask=mask, other=0.0).to(tl.float32)
        value = act_gated(value, up, ACTIVATION)
    else:
        value = act(value, ACTIVATION)
    tl.store(y_ptr + row * columns + column, value.to(y_ptr.dtype.element_ty), mask=mask)


def activate(up_TF: Tensor, activation: str, gated: bool) -> Tensor:
    up_TF = up_TF if up_TF.stride(1) == 1 else up_TF.contiguous()
    rows, width = up_TF.shape
    columns = width // 2 if gated else width
    y_TF = torch.empty(rows, columns, dtype=up_TF.dtype, device=up_TF.device)
    block = min(_BLOCK, triton.next_power_of_2(columns))
    pieces = triton.cdiv(columns, block)
    args = (up_TF, y_TF, columns, pieces, up_TF.stride(0))
    constants = {"ACTIVATION": activation, "GATED": gated, "BLOCK": block}
    launch(_activate_kernel, (rows * pieces,), *args, options=Options(_WARPS, 1), **constants)
    return y_TF

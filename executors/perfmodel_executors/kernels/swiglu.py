"""Activations: gated (act(gate) * up, SwiGLU when act is SiLU) and plain."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.ops.elementwise import activation as activation_work
from perfmodel_executors.kernels.problem import Inputs, Problem

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
}


def activate(up_TF: Tensor, activation: str, gated: bool) -> Tensor:
    """act(gate) * up for a gated block, whose input is [gate | up] and twice as wide; act(up) for a plain one."""
    if not gated:
        return ACTIVATIONS[activation](up_TF)
    gate, up = up_TF.chunk(2, dim=-1)
    if activation == "swiglu_oai":  # both within +-7 (gpt-oss; its modelling file in transformers)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return ACTIVATIONS[activation](gate) * up


_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_BYTES = 2  # of an element of a serving problem


def tiny(dtype: torch.dtype) -> list[Problem]:
    shapes = ((3, 40, True), (2, 129, False))
    plain = [_problem(*shape, name, dtype) for name in ACTIVATIONS for shape in shapes]
    return [*plain, _problem(3, 40, True, "swiglu_oai", dtype)]


def serving() -> list[Problem]:
    shapes = ((64, 14336), (2048, 14336), (8192, 14336), (4096, 28672))
    return [_problem(*shape, True, "silu", torch.bfloat16) for shape in shapes]


def _problem(rows: int, columns: int, gated: bool, name: str, dtype: torch.dtype) -> Problem:
    def make(inputs: Inputs) -> tuple[Tensor | str | bool, ...]:
        return inputs.normal(rows, (1 + gated) * columns, dtype=dtype), name, gated

    sizes: dict[str, int | float | str] = {"tokens": rows, "size": columns, "function": name, "gated": int(gated)}
    sizes["dtype"] = str(dtype).removeprefix("torch.")
    work = activation_work(rows, columns, _BYTES, function=name, is_gated=gated, is_fused=True)
    return Problem("activate", sizes, make, work, _TOLERANCE[dtype], {"torch": activate})

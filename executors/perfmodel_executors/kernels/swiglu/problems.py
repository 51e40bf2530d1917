"""Activations between the halves of a feed-forward block."""

__all__ = ["serving", "tiny"]

import torch
from torch import Tensor

from perfmodel.ops.elementwise import activation as activation_work
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.swiglu.reference import ACTIVATIONS, activate

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_BYTES = 2  # of an element of a serving problem


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Every activation, gated and plain."""
    shapes = ((3, 40, True), (2, 129, False))
    plain = [_problem(*shape, name, dtype) for name in ACTIVATIONS for shape in shapes]
    return [*plain, _problem(3, 40, True, "swiglu_oai", dtype)]


def serving() -> list[Problem]:
    """A decode batch, chunks, and sizes beyond the L2."""
    shapes = ((64, 14336), (2048, 14336), (8192, 14336), (4096, 28672))
    return [_problem(*shape, True, "silu", torch.bfloat16) for shape in shapes]


def _problem(rows: int, columns: int, gated: bool, name: str, dtype: torch.dtype) -> Problem:
    def make(inputs: Inputs) -> tuple[Tensor | str | bool, ...]:
        return inputs.normal(rows, (1 + gated) * columns, dtype=dtype), name, gated

    return Problem(
        "activate",
        {
            "tokens": rows,
            "size": columns,
            "function": name,
            "gated": int(gated),
            "dtype": str(dtype).removeprefix("torch."),
        },
        make,
        activation_work(rows, columns, _BYTES, function=name, is_gated=gated, is_fused=True),
        _TOLERANCE[dtype],
        {"torch": activate},
    )

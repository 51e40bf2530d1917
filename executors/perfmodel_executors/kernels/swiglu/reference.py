"""Activations: gated (act(gate) * up, SwiGLU when act is SiLU) and plain."""

__all__ = ["ACTIVATIONS", "activate"]

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def _relu2(x: Tensor) -> Tensor:
    return functional.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": _relu2,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
}


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(1.702 gate), both within +-7 (gpt-oss; its modelling file in transformers)."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def activate(up_TF: Tensor, activation: str, gated: bool) -> Tensor:
    """act(gate) * up for a gated block, whose input is [gate | up] and twice as wide; act(up) for a plain one."""
    if activation == "swiglu_oai":
        return _clamped(*up_TF.chunk(2, dim=-1))
    act = ACTIVATIONS[activation]
    if not gated:
        return act(up_TF)
    gate, up = up_TF.chunk(2, dim=-1)
    return act(gate) * up

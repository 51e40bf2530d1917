"""The product that a quantised one is compared with: by the same weight in the activations' dtype."""

__all__ = ["dense_product", "dense_weight"]

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.kernels.weight_formats.containers import MatrixWeight
from perfmodel_executors.kernels.weight_formats.dequantize import dequantize

_known: WeakKeyDictionary[MatrixWeight, Tensor] = WeakKeyDictionary()


def dense_product(x_MK: Tensor, weight: MatrixWeight, bias_N: Tensor | None = None) -> Tensor:
    """The library's product."""
    return functional.linear(x_MK, dense_weight(weight, x_MK.dtype), bias_N)


def dense_weight(weight: MatrixWeight, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`, expanded once, at its first call: the expansion is not what is timed."""
    if weight not in _known:
        _known[weight] = dequantize(weight).to(dtype)
    return _known[weight]

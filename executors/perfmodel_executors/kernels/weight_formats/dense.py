"""The product that a quantised one is compared with: by the same weight in the activations' dtype."""

__all__ = ["dense_product", "dense_weight"]

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.kernels.weight_formats.containers import Fp8Weight, Int4Weight, Int8Weight
from perfmodel_executors.kernels.weight_formats.dequantize import dequantize

_known: WeakKeyDictionary[Int8Weight | Int4Weight | Fp8Weight, Tensor] = WeakKeyDictionary()


def dense_product(x_MK: Tensor, weight: Int8Weight | Int4Weight | Fp8Weight, bias_N: Tensor | None = None) -> Tensor:
    """The library's product."""
    return functional.linear(x_MK, dense_weight(weight, x_MK.dtype), bias_N)


def dense_weight(weight: Int8Weight | Int4Weight | Fp8Weight, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`, expanded once, at its first call: the expansion is not what is timed."""
    if weight not in _known:
        _known[weight] = dequantize(weight).to(dtype)
    return _known[weight]

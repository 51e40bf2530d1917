"""Formats that the processor cannot multiply, emulated: the values in the activations' dtype, remembered.

Expanding on each call would take ten times as long as the product on a CPU. The memory is that of a dense weight.
"""

__all__ = ["expanded"]

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from perfmodel_executors.kernels.weight_formats.containers import (
    BlockFp8Weight,
    Fp4Weight,
    Fp8Weight,
    Sparse24Weight,
)
from perfmodel_executors.kernels.weight_formats.dequantize import dequantize

_Emulated = Fp8Weight | BlockFp8Weight | Fp4Weight | Sparse24Weight

_known: WeakKeyDictionary[_Emulated, dict[torch.dtype, Tensor]] = WeakKeyDictionary()


def expanded(weight: _Emulated, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`: e4m3 values without the scales of their rows, else what the weight stands for."""
    by_dtype = _known.setdefault(weight, {})
    if dtype not in by_dtype:
        values = weight.values_NK if isinstance(weight, Fp8Weight) else dequantize(weight)
        by_dtype[dtype] = values.to(dtype)
    return by_dtype[dtype]

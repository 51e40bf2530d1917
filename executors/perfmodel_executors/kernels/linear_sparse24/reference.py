"""y = x W^T + b for a 2:4 sparse weight.

On a GPU, torch's semi-structured kernels (cuSPARSELt or CUTLASS), which drive the sparse tensor cores of sm_80 and
newer in fp16 and bf16. There is no Triton kernel: Triton's `tl.dot` has no sparse matrix instruction, and a dense
product of the decompressed weight saves nothing but bytes. Elsewhere the dense product, exact and no faster.
"""

__all__ = ["linear_sparse24"]

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.weight_formats.containers import Sparse24Weight
from perfmodel_executors.kernels.weight_formats.dequantize import dequantize
from perfmodel_executors.kernels.weight_formats.expanded import expanded

_LEAST_CAPABILITY = (8, 0)

_compressed: WeakKeyDictionary[Sparse24Weight, Any] = WeakKeyDictionary()


def linear_sparse24(x_MK: Tensor, weight: Sparse24Weight, bias_N: Tensor | None = None) -> Tensor:
    """The product [M, N] in x's dtype.

    Raises PerfmodelError on a GPU without sparse tensor cores for this dtype.
    """
    if x_MK.device.type != "cuda":
        return functional.linear(x_MK, expanded(weight, x_MK.dtype), bias_N)
    if weight not in _compressed:
        _compressed[weight] = _compress(weight, x_MK.device)
    return functional.linear(x_MK, _compressed[weight], bias_N)


def _compress(weight: Sparse24Weight, device: torch.device) -> Any:
    """The weight as torch's sparse kernels read it; made once for each weight."""
    capability = torch.cuda.get_device_capability(device)
    dtype = weight.values_NJ.dtype
    if capability < _LEAST_CAPABILITY or dtype not in (torch.float16, torch.bfloat16):
        raise PerfmodelError(
            f"2:4 sparse products need sm_80 or newer and float16 or bfloat16; this is "
            f"sm_{capability[0]}{capability[1]} with {str(dtype).removeprefix('torch.')}. Use a dense weight."
        )
    return torch.sparse.to_sparse_semi_structured(dequantize(weight).to(dtype))

"""Products with weights that no kernel here reads: llama.cpp's blocks, signs, and 2:4 sparse ones.

`linear_gguf`: y = x W^T + b, W in llama.cpp's blocks: some rows at a time are unpacked to x's dtype and multiplied.

So no more than those rows is ever held in full, and on a CPU they are still in its cache when they are multiplied. Each
call unpacks anew: a constant, whatever the number of tokens.

`linear_signs`: y = (q(x) S^T) * token scale * scale + b, S ternary or binary, q(x) in INT8 for each token by its
largest.

Codes are 0, 1, 2 (or 0, 1) and stand for codes - 1 (or 2 codes - 1), so that a field of a byte is multiplied as it is
and what the offset adds is the sum of the token's codes. Few tokens: a product for each field, whose codes take two
passes over the bytes; many: all fields laid side by side for one product.

Source: Wang et al. 2023 (BitNet), Ma et al. 2024 (BitNet b1.58); 2 bits a weight as in bitnet.cpp's I2_S.

`linear_sparse24`: y = x W^T + b for a 2:4 sparse weight.

On a GPU, torch's semi-structured kernels (cuSPARSELt or CUTLASS), which drive the sparse tensor cores of sm_80 and
newer in fp16 and bf16. There is no Triton kernel: Triton's `tl.dot` has no sparse matrix instruction, and a dense
product of the decompressed weight saves nothing but bytes. Elsewhere the dense product, exact and no faster.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.errors import PerfmodelError
from perfmodel_executors.kernels.linear_low_precision import int8_product, quantize_tokens_int8
from perfmodel_executors.kernels.weight_formats.containers import GgufWeight, SignsWeight, Sparse24Weight
from perfmodel_executors.kernels.weight_formats.dequantize import dequantize, expanded, sign_fields
from perfmodel_executors.kernels.weight_formats.gguf_reading import unpack_blocks

_WEIGHTS_AT_ONCE = 2**19  # 2 MB in fp32; an eighth of that takes twice as long, for each operation has its own cost


def linear_gguf(x_MK: Tensor, weight: GgufWeight, bias_N: Tensor | None = None) -> Tensor:
    """The product [M, N] in x's dtype."""
    n, k = weight.shape
    rows = max(1, _WEIGHTS_AT_ONCE // k)
    product_MN = torch.empty(len(x_MK), n, dtype=x_MK.dtype, device=x_MK.device)
    for begin in range(0, n, rows):
        part = slice(begin, begin + rows)
        values_RK = unpack_blocks(weight.blocks_NJ[part], weight.form).to(x_MK.dtype)
        product_MN[:, part] = functional.linear(x_MK, values_RK, None if bias_N is None else bias_N[part])
    return product_MN


_MOST_TOKENS_BY_FIELD = 32


def linear_signs(x_MK: Tensor, weight: SignsWeight, bias_N: Tensor | None = None) -> Tensor:
    """The product [M, N] in x's dtype."""
    codes_MK, scales_M = quantize_tokens_int8(x_MK)
    if len(x_MK) <= _MOST_TOKENS_BY_FIELD:
        width = weight.bytes_NJ.shape[1]
        parts = (codes_MK[:, i * width : (i + 1) * width].contiguous() for i in range(weight.per_byte))
        product_MN = None
        for part_MJ, field_NJ in zip(parts, sign_fields(weight), strict=True):
            own_MN = int8_product(part_MJ, field_NJ)
            product_MN = own_MN if product_MN is None else product_MN.add_(own_MN)
    else:
        product_MN = int8_product(codes_MK, torch.cat(list(sign_fields(weight)), dim=1))
    assert product_MN is not None
    sums_M1 = codes_MK.sum(dim=1, keepdim=True, dtype=torch.int32)
    signed_MN = product_MN - sums_M1 if weight.bits == 2 else 2 * product_MN - sums_M1
    scaled_MN = signed_MN.float() * (scales_M[:, None] * weight.scale)
    return (scaled_MN if bias_N is None else scaled_MN + bias_N).to(x_MK.dtype)


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

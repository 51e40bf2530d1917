"""y = x dequantised(W)^T + b, W in INT8, e4m3, INT4 or 4-bit floats.

Scales for each output multiply the product, not the weight: the same result, N M multiplications in place of N K.
On a CPU with few tokens, torch's kernels that read the packed weight; they are slower than dequantising beyond
the limits below (measured in bf16 on AVX512, 2048 x 2048), and in fp32 always.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.ops.linear import gemm
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.weight_formats.containers import Fp4Weight, Fp8Weight, Int4Weight, Int8Weight
from perfmodel_executors.kernels.weight_formats.dequantize import dense_product, dequantize, expanded, int4_codes
from perfmodel_executors.kernels.weight_formats.samples import FORMATS

_MOST_TOKENS_INT8 = 16
_INT8_CPU_STEP = 16  # inputs that torch's kernel takes at once: where they do not divide K it reads beyond the weight
_MOST_TOKENS_INT4 = 512
_INT4_CPU_GROUPS = (32, 64, 128, 256)

_cpu_packings: WeakKeyDictionary[Int4Weight, tuple[Tensor, Tensor]] = WeakKeyDictionary()


def linear_w8a16(x_MK: Tensor, weight: Int8Weight | Fp8Weight, bias_N: Tensor | None = None) -> Tensor:
    """The product [M, N] in x's dtype."""
    dtype, is_cpu = x_MK.dtype, x_MK.device.type == "cpu"
    if isinstance(weight, Fp8Weight):
        product_MN = functional.linear(x_MK, expanded(weight, dtype))
    elif is_cpu and dtype == torch.bfloat16 and len(x_MK) <= _MOST_TOKENS_INT8 and not x_MK.shape[1] % _INT8_CPU_STEP:
        ones_N = torch.ones(len(weight.values_NK), dtype=dtype)
        product_MN = torch._weight_int8pack_mm(x_MK.contiguous(), weight.values_NK, ones_N)
    else:
        product_MN = functional.linear(x_MK, weight.values_NK.to(dtype))
    scaled_MN = product_MN * weight.scales_N
    return (scaled_MN if bias_N is None else scaled_MN + bias_N).to(dtype)


def linear_w4a16(x_MK: Tensor, weight: Int4Weight | Fp4Weight, bias_N: Tensor | None = None) -> Tensor:
    """The product [M, N] in x's dtype."""
    if isinstance(weight, Fp4Weight):
        return functional.linear(x_MK, expanded(weight, x_MK.dtype), bias_N)
    n, k = weight.shape
    is_packed = x_MK.device.type == "cpu" and x_MK.dtype == torch.bfloat16 and len(x_MK) <= _MOST_TOKENS_INT4
    if not is_packed or n % 32 or k % 32 or weight.group_size not in _INT4_CPU_GROUPS:
        return functional.linear(x_MK, dequantize(weight).to(x_MK.dtype), bias_N)
    packed, scales_and_zeros = _cpu_packing(weight)
    product_MN = torch._weight_int4pack_mm_for_cpu(x_MK.contiguous(), packed, weight.group_size, scales_and_zeros)
    if weight.zeros_GN is not None:
        # (q - zero) s = (q - 8) s + (8 - zero) s; the second does not depend on the input's place in its group.
        sums_MG = x_MK.float().view(len(x_MK), -1, weight.group_size).sum(dim=2)
        product_MN = product_MN + sums_MG @ ((8.0 - weight.zeros_GN.float()) * weight.scales_GN.float())
    return (product_MN if bias_N is None else product_MN + bias_N).to(x_MK.dtype)


def _cpu_packing(weight: Int4Weight) -> tuple[Tensor, Tensor]:
    """torch's own layout of the codes, and [K / G, N, 2] scales with what it adds (0); made once for each weight."""
    known = _cpu_packings.get(weight)
    if known is None:
        packed = torch._convert_weight_to_int4pack_for_cpu(int4_codes(weight).to(torch.int32), 1)
        scales_GN = weight.scales_GN.to(torch.bfloat16)
        known = packed, torch.stack((scales_GN, torch.zeros_like(scales_GN)), dim=2).contiguous()
        _cpu_packings[weight] = known
    return known


_TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
_SERVED = ("int8_wo", "int4_wo", "w4a16_mxfp4", "w4a16_nvfp4")
_SHAPES = ((14336, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
_TOKENS = (1, 8, 16, 64, 512, 4096)


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Few and many tokens, several slices, odd sizes."""
    return [
        _problem("int8_wo", 3, 72, 1100, dtype, has_bias=True),
        _problem("int8_wo", 70, 40, 144, dtype),
        _problem("fp8_wo", 5, 40, 144, dtype),
        _problem("int4_wo", 3, 72, 1024, dtype, has_bias=True),
        _problem("int4_wo", 70, 40, 384, dtype),
        _problem("int4_wo_zeros", 9, 40, 192, dtype, has_bias=True),
        _problem("w4a16_mxfp4", 3, 72, 1088, dtype, has_bias=True),
        _problem("w4a16_mxfp4", 70, 40, 192, dtype),
        _problem("w4a16_nvfp4", 5, 72, 320, dtype, has_bias=True),
        *(_problem(form, 260, 40, 192, dtype, has_bias=True) for form in ("int8_wo", "int4_wo_zeros", *_SERVED[2:])),
    ]


def serving() -> list[Problem]:
    """Decode batches and a chunk of a prompt, at the sizes of an 8B model."""
    return [_problem(f, m, n, k, torch.bfloat16) for f in _SERVED for n, k in _SHAPES for m in _TOKENS]


def _problem(name: str, m: int, n: int, k: int, dtype: torch.dtype, has_bias: bool = False) -> Problem:
    found = FORMATS[name]
    operator = "linear_w8a16" if "8" in name else "linear_w4a16"

    def make(inputs: Inputs) -> tuple[object, ...]:
        x_MK = inputs.normal(m, k, dtype=dtype)
        return x_MK, found.make(inputs, n, k, dtype), inputs.normal(n, dtype=dtype) if has_bias else None

    return Problem(
        operator,
        {"m": m, "n": n, "k": k, "gemm_dtype": name, "dtype": str(dtype).removeprefix("torch.")},
        make,
        gemm(operator, m, n, k, found.form, has_bias=has_bias),
        _TOLERANCE[dtype],
        {"dense": dense_product},
    )

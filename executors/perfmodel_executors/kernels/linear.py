"""y = x W^T + b, weights [out, in], plain and in fewer bits; activations as they are, or quantised on the way.

Scales for each output multiply the product, not the weight: the same result, N M multiplications in place of N K.
Quantised activations, in INT8 (-127..127, accumulated in int32) or e4m3 (accumulated in fp32), have a scale for each
token by its largest, for each token and 128 inputs (blocks), or one known beforehand (SmoothQuant):

    y = (q(x) W^T) * token scale * output scale + b
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.errors import PerfmodelError
from perfmodel.models.number_formats import bytes_per_weight
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm
from perfmodel_executors.kernels import weight_formats as formats
from perfmodel_executors.kernels.gguf_blocks import unpack_blocks
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.stored_rows import Stacked


def linear(x_TC: Tensor, weight_DC: Tensor, bias_D: Tensor | None = None) -> Tensor:
    """The product, in x's dtype (accumulated in fp32 by the BLAS)."""
    return functional.linear(x_TC, weight_DC, bias_D)


# On a CPU with few tokens, torch's kernels that read the packed weight; they are slower than dequantising beyond these
# limits (measured in bf16 on AVX512, 2048 x 2048), and in fp32 always.
_MAX_TOKENS_INT8 = 16
_INT8_CPU_STEP = 16  # inputs that torch's kernel takes at once: where they do not divide K it reads beyond the weight
_MAX_TOKENS_INT4 = 512
_INT4_CPU_GROUPS = (32, 64, 128, 256)

_cpu_packings: WeakKeyDictionary[formats.Int4Weight, tuple[Tensor, Tensor]] = WeakKeyDictionary()


def linear_w8a16(x_MK: Tensor, weight: formats.Int8Weight | formats.Fp8Weight, bias_N: Tensor | None = None) -> Tensor:
    dtype, is_cpu = x_MK.dtype, x_MK.device.type == "cpu"
    if isinstance(weight, formats.Fp8Weight):
        product_MN = functional.linear(x_MK, formats.expanded(weight, dtype))
    elif is_cpu and dtype == torch.bfloat16 and len(x_MK) <= _MAX_TOKENS_INT8 and not x_MK.shape[1] % _INT8_CPU_STEP:
        ones_N = torch.ones(len(weight.values_NK), dtype=dtype)
        product_MN = torch._weight_int8pack_mm(x_MK.contiguous(), weight.values_NK, ones_N)
    else:
        product_MN = functional.linear(x_MK, weight.values_NK.to(dtype))
    scaled_MN = product_MN * weight.scales_N
    return (scaled_MN if bias_N is None else scaled_MN + bias_N).to(dtype)


def linear_w4a16(x_MK: Tensor, weight: formats.Int4Weight | formats.Fp4Weight, bias_N: Tensor | None = None) -> Tensor:
    if isinstance(weight, formats.Fp4Weight):
        return functional.linear(x_MK, formats.expanded(weight, x_MK.dtype), bias_N)
    n, k = weight.shape
    is_packed = x_MK.device.type == "cpu" and x_MK.dtype == torch.bfloat16 and len(x_MK) <= _MAX_TOKENS_INT4
    if not is_packed or n % 32 or k % 32 or weight.group_size not in _INT4_CPU_GROUPS:
        return functional.linear(x_MK, formats.dequantize(weight).to(x_MK.dtype), bias_N)
    if weight not in _cpu_packings:  # torch's own layout of the codes, and [K / G, N, 2] scales with what it adds (0)
        codes = torch._convert_weight_to_int4pack_for_cpu(weight.codes().to(torch.int32), 1)
        scales_GN = weight.scales_GN.to(torch.bfloat16)
        _cpu_packings[weight] = codes, torch.stack((scales_GN, torch.zeros_like(scales_GN)), dim=2).contiguous()
    codes, scales_and_zeros = _cpu_packings[weight]
    product_MN = torch._weight_int4pack_mm_for_cpu(x_MK.contiguous(), codes, weight.group_size, scales_and_zeros)
    if weight.zeros_GN is not None:
        # (q - zero) s = (q - 8) s + (8 - zero) s; the second does not depend on the input's place in its group.
        sums_MG = x_MK.float().view(len(x_MK), -1, weight.group_size).sum(dim=2)
        product_MN = product_MN + sums_MG @ ((8.0 - weight.zeros_GN.float()) * weight.scales_GN.float())
    return (product_MN if bias_N is None else product_MN + bias_N).to(x_MK.dtype)


_TINY = 1e-12  # in place of the scale of a token of zeros
_CUDA_LEAST_ROWS = 32  # cuBLAS refuses INT8 products of 16 rows and fewer,
_CUDA_UNIT = 8  # and inputs and outputs that are no multiples of this


def quantize_tokens_int8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(codes int8 [M, K], scales fp32 [M]); x is codes * scales."""
    wide, scales_M = _token_scales(x_MK, formats.INT8_MAX)
    return (wide / scales_M[:, None]).round_().to(torch.int8), scales_M


def quantize_tokens_fp8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [M, K], scales fp32 [M]); x is values * scales."""
    wide, scales_M = _token_scales(x_MK, formats.FP8_MAX)
    return (wide / scales_M[:, None]).clamp_(-formats.FP8_MAX, formats.FP8_MAX).to(torch.float8_e4m3fn), scales_M


def _token_scales(x_MK: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Rounded once: by a number, CUDA's division would be a product with its reciprocal, and round otherwise."""
    wide = x_MK.float()
    largest_M = wide.abs().amax(dim=1)
    return wide, (largest_M / largest_M.new_tensor(most)).clamp_min(_TINY)


def int8_product(codes_MK: Tensor, values_NK: Tensor) -> Tensor:
    """codes values^T, both INT8, in int32 [M, N]."""
    (rows, inputs), outputs = codes_MK.shape, len(values_NK)
    if codes_MK.device.type == "cuda":
        more = -inputs % _CUDA_UNIT
        codes_MK = functional.pad(codes_MK, (0, more, 0, max(0, _CUDA_LEAST_ROWS - rows)))
        values_NK = functional.pad(values_NK, (0, more, 0, -outputs % _CUDA_UNIT))
    return torch._int_mm(codes_MK, values_NK.T)[:rows, :outputs]


def _scaled(
    product_MN: Tensor, scales_M: Tensor, scales_N: Tensor, bias_N: Tensor | None, dtype: torch.dtype
) -> Tensor:
    scaled_MN = product_MN.float() * scales_M[:, None] * scales_N
    return (scaled_MN if bias_N is None else scaled_MN + bias_N).to(dtype)


def linear_w8a8(x_MK: Tensor, weight: formats.Int8Weight, bias_N: Tensor | None = None) -> Tensor:
    codes_MK, scales_M = quantize_tokens_int8(x_MK)
    return _scaled(int8_product(codes_MK, weight.values_NK), scales_M, weight.scales_N, bias_N, x_MK.dtype)


def linear_w8a8_static(x_MK: Tensor, weight: formats.Int8Weight, bias_N: Tensor | None = None) -> Tensor:
    """As `linear_w8a8`, with the weight's scale for all activations; what exceeds it saturates."""
    assert weight.input_scale is not None
    codes_MK = (x_MK.float() / weight.input_scale).round_().clamp_(-formats.INT8_MAX, formats.INT8_MAX).to(torch.int8)
    scales_M = weight.input_scale.expand(len(x_MK))
    return _scaled(int8_product(codes_MK, weight.values_NK), scales_M, weight.scales_N, bias_N, x_MK.dtype)


def linear_w4a8(x_MK: Tensor, weight: formats.Int4Int8Weight, bias_N: Tensor | None = None) -> Tensor:
    """As `linear_w8a8`, by the INT8 numbers that the codes are unpacked to at each call."""
    codes_MK, scales_M = quantize_tokens_int8(x_MK)
    return _scaled(int8_product(codes_MK, weight.int8_values()), scales_M, weight.row_scales_N, bias_N, x_MK.dtype)


def linear_fp8(x_MK: Tensor, weight: formats.Fp8Weight, bias_N: Tensor | None = None) -> Tensor:
    """The product [M, N] in x's dtype; emulated in bf16, which holds every e4m3 value, or in x's dtype if wider."""
    values_MK, scales_M = quantize_tokens_fp8(x_MK)
    dtype = torch.float32 if x_MK.dtype == torch.float32 else torch.bfloat16
    product_MN = functional.linear(values_MK.to(dtype), formats.expanded(weight, dtype))
    return _scaled(product_MN, scales_M, weight.scales_N, bias_N, x_MK.dtype)


def linear_fp8_block(x_MK: Tensor, weight: formats.BlockFp8Weight, bias_N: Tensor | None = None) -> Tensor:
    """The product [M, N] in x's dtype: x to e4m3 in groups of 128 and back, then by what the weight stands for."""
    m, k = x_MK.shape
    groups = functional.pad(x_MK, (0, -k % formats.FP8_BLOCK)).reshape(-1, formats.FP8_BLOCK)
    values, scales = quantize_tokens_fp8(groups)
    rounded_MK = (values.float() * scales[:, None]).view(m, -1)[:, :k]
    return functional.linear(rounded_MK.to(x_MK.dtype), formats.expanded(weight, x_MK.dtype), bias_N)


_WEIGHTS_AT_ONCE = 2**19  # 2 MB in fp32; an eighth of that takes twice as long, for each operation has its own cost


def linear_gguf(x_MK: Tensor, weight: formats.GgufWeight, bias_N: Tensor | None = None) -> Tensor:
    """The product in x's dtype; rows are unpacked some at a time, so that they are still in the CPU's cache then."""
    n, k = weight.shape
    rows = max(1, _WEIGHTS_AT_ONCE // k)
    product_MN = torch.empty(len(x_MK), n, dtype=x_MK.dtype, device=x_MK.device)
    for begin in range(0, n, rows):
        part = slice(begin, begin + rows)
        values_RK = unpack_blocks(weight.blocks_NJ[part], weight.form).to(x_MK.dtype)
        product_MN[:, part] = functional.linear(x_MK, values_RK, None if bias_N is None else bias_N[part])
    return product_MN


_MAX_TOKENS_BY_FIELD = 32


def linear_signs(x_MK: Tensor, weight: formats.SignsWeight, bias_N: Tensor | None = None) -> Tensor:
    """y = (q(x) S^T) * token scale * scale + b, S ternary or binary. Few tokens: a product for each field of a byte;
    many: all fields side by side. Source: Wang et al. 2023 (BitNet), Ma et al. 2024 (BitNet b1.58)."""
    codes_MK, scales_M = quantize_tokens_int8(x_MK)
    fields = weight.fields()
    if len(x_MK) <= _MAX_TOKENS_BY_FIELD:
        parts = codes_MK.chunk(len(fields), dim=1)
        products = [int8_product(part.contiguous(), field) for part, field in zip(parts, fields, strict=True)]
        product_MN = sum(products[1:], start=products[0])
    else:
        product_MN = int8_product(codes_MK, torch.cat(fields, dim=1))
    sums_M1 = codes_MK.sum(dim=1, keepdim=True, dtype=torch.int32)
    signed_MN = product_MN - sums_M1 if weight.bits == 2 else 2 * product_MN - sums_M1
    scaled_MN = signed_MN.float() * (scales_M[:, None] * weight.scale)
    return (scaled_MN if bias_N is None else scaled_MN + bias_N).to(x_MK.dtype)


_MIN_CAPABILITY_24 = (8, 0)

_compressed: WeakKeyDictionary[formats.Sparse24Weight, Any] = WeakKeyDictionary()


def linear_sparse24(x_MK: Tensor, weight: formats.Sparse24Weight, bias_N: Tensor | None = None) -> Tensor:
    """On a GPU by torch's semi-structured kernels, for sm_80 and newer in fp16 and bf16; elsewhere dense, exact and no
    faster. Raises PerfmodelError on a GPU without sparse tensor cores for this dtype."""
    if x_MK.device.type != "cuda":
        return functional.linear(x_MK, formats.expanded(weight, x_MK.dtype), bias_N)
    if weight not in _compressed:
        capability, dtype = torch.cuda.get_device_capability(x_MK.device), weight.values_NJ.dtype
        if capability < _MIN_CAPABILITY_24 or dtype not in (torch.float16, torch.bfloat16):
            raise PerfmodelError(
                f"2:4 sparse products need sm_80 or newer and float16 or bfloat16; this is "
                f"sm_{capability[0]}{capability[1]} with {str(dtype).removeprefix('torch.')}. Use a dense weight."
            )
        _compressed[weight] = torch.sparse.to_sparse_semi_structured(formats.dequantize(weight).to(dtype))
    return functional.linear(x_MK, _compressed[weight], bias_N)


_for_library: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()


def dense_weight(weight: formats.MatrixWeight, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`, for products that quantised ones are compared with; expanded at its first call, untimed."""
    if weight not in _for_library:
        _for_library[weight] = formats.dequantize(weight).to(dtype)
    return _for_library[weight]


def _dense_product(x_MK: Tensor, weight: formats.MatrixWeight, bias_N: Tensor | None = None) -> Tensor:
    return functional.linear(x_MK, dense_weight(weight, x_MK.dtype), bias_N)


def _scaled_mm(x_MK: Tensor, weight: formats.Fp8Weight, bias_N: Tensor | None = None) -> Tensor:
    values_MK, scales_M = quantize_tokens_fp8(x_MK)
    scales = (scales_M[:, None], weight.scales_N[None, :])
    return torch._scaled_mm(values_MK, weight.values_NK.T, *scales, bias_N, out_dtype=x_MK.dtype, use_fast_accum=True)


_INPUT_SCALE = 1 / 50  # of normal inputs in INT8: what is beyond 2.5 deviations saturates


class SampleFormat(NamedTuple):
    """Weights of problems: the operator for them, what the cost model counts, and a maker of a weight [n, k] for
    activations of a dtype, of random codes, scaled so that a product of normal inputs is of order one."""

    operator: str
    form: LinearFormat
    make: Callable[[Inputs, int, int, torch.dtype], Stacked]


def _int8(
    inputs: Inputs, n: int, k: int, _: torch.dtype, *, quantizes_input: bool, input_scale: float | None = None
) -> formats.Int8Weight:
    codes = inputs.integers(-127, 128, n, k, dtype=torch.int8)
    scales = inputs.normal(n, dtype=torch.float32, scale=k**-0.5 / 64)
    known = None if input_scale is None else inputs.of([input_scale], torch.float32)[0]
    return formats.Int8Weight(codes, scales, quantizes_input, input_scale=known)


def _fp8(inputs: Inputs, n: int, k: int, _: torch.dtype, *, quantizes_input: bool) -> formats.Fp8Weight:
    values = inputs.normal(n, k, dtype=torch.float8_e4m3fn)
    return formats.Fp8Weight(values, inputs.normal(n, dtype=torch.float32, scale=k**-0.5), quantizes_input)


def _int4(
    inputs: Inputs, n: int, k: int, dtype: torch.dtype, *, group: int, has_zeros: bool = False
) -> formats.Int4Weight:
    zeros = inputs.integers(0, 16, k // group, n, dtype=torch.uint8) if has_zeros else None
    scales = inputs.normal(k // group, n, dtype=dtype, scale=k**-0.5 / 4)
    return formats.Int4Weight(inputs.integers(0, 256, n, k // 2, dtype=torch.uint8), scales, zeros, group)


def _fp8_block(inputs: Inputs, n: int, k: int, _: torch.dtype) -> formats.BlockFp8Weight:
    blocks = (-(-n // formats.FP8_BLOCK), -(-k // formats.FP8_BLOCK))
    scales = inputs.normal(*blocks, dtype=torch.float32, scale=k**-0.5)
    return formats.BlockFp8Weight(inputs.normal(n, k, dtype=torch.float8_e4m3fn), scales)


def _fp4(inputs: Inputs, n: int, k: int, _: torch.dtype, *, group: int) -> formats.Fp4Weight:
    codes, is_mx = inputs.integers(0, 256, n, k // 2, dtype=torch.uint8), group == 32
    scales = inputs.integers(*((117, 125) if is_mx else (1, 127)), k // group, n, dtype=torch.uint8)
    rows = None if is_mx else inputs.normal(n, dtype=torch.float32, scale=k**-0.5 / 448)
    return formats.Fp4Weight(codes, scales, rows)


def _weight_only(weights: str, group: int = 0) -> LinearFormat:
    return LinearFormat("bf16", bytes_per_weight(weights, group), 2.0, 2.0, name=f"{weights}_wo")


def _both(rate: str) -> LinearFormat:
    return LinearFormat(rate, bytes_per_weight(rate), bytes_per_weight(rate), 2.0, quantizes_input=True)


# By the names of tables of measured kernels (`gemm_dtype`, `moe_dtype`).
FORMATS: Mapping[str, SampleFormat] = {
    "int8_wo": SampleFormat("linear_w8a16", _weight_only("int8"), partial(_int8, quantizes_input=False)),
    "fp8_wo": SampleFormat("linear_w8a16", _weight_only("fp8"), partial(_fp8, quantizes_input=False)),
    "int4_wo": SampleFormat("linear_w4a16", _weight_only("int4", 128), partial(_int4, group=128)),
    "int4_wo_zeros": SampleFormat("linear_w4a16", _weight_only("int4", 64), partial(_int4, group=64, has_zeros=True)),
    "int4_wo_32": SampleFormat("linear_w4a16", _weight_only("int4", 32), partial(_int4, group=32)),
    "int8": SampleFormat("linear_w8a8", _both("int8"), partial(_int8, quantizes_input=True)),
    "int8_static": SampleFormat(
        "linear_w8a8_static", _both("int8"), partial(_int8, quantizes_input=True, input_scale=_INPUT_SCALE)
    ),
    "fp8": SampleFormat("linear_fp8", _both("fp8"), partial(_fp8, quantizes_input=True)),
    "fp8_block": SampleFormat("linear_fp8_block", _both("fp8")._replace(name="fp8_block"), _fp8_block),
    "w4a16_mxfp4": SampleFormat("linear_w4a16", _weight_only("mxfp4"), partial(_fp4, group=32)),
    "w4a16_nvfp4": SampleFormat("linear_w4a16", _weight_only("nvfp4"), partial(_fp4, group=16)),
}
BF16 = LinearFormat("bf16", 2.0, 2.0, 2.0)
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_TOLERANCE_WEIGHT_ONLY = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# Beside rounding of the result: a value on the edge between two codes may go either way.
_TOLERANCE_BOTH = {torch.float32: 4e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_SHAPES = ((14336, 4096), (4096, 14336), (6144, 4096), (4096, 4096))  # n, k of an 8B model: up, down, qkv, out

# Odd sizes, few and many tokens, several slices of K: format (None: plain), m, n, k, whether there is a bias.
_TINY_SIZES: tuple[tuple[str | None, int, int, int, bool], ...] = (
    *((None, 1, 48, 144, False), (None, 5, 72, 1100, True), (None, 70, 130, 80, True), (None, 130, 40, 600, False)),
    *(("int8_wo", 3, 72, 1100, True), ("int8_wo", 70, 40, 144, False), ("fp8_wo", 5, 40, 144, False)),
    *(("int4_wo", 3, 72, 1024, True), ("int4_wo", 70, 40, 384, False), ("int4_wo_zeros", 9, 40, 192, True)),
    *(("w4a16_mxfp4", 3, 72, 1088, True), ("w4a16_mxfp4", 70, 40, 192, False), ("w4a16_nvfp4", 5, 72, 320, True)),
    *((form, 260, 40, 192, True) for form in ("int8_wo", "int4_wo_zeros", "w4a16_mxfp4", "w4a16_nvfp4")),
    *((form, 3, 72, 1100, True) for form in ("int8", "int8_static", "fp8")),
    *((form, 70, 40, 144, False) for form in ("int8", "int8_static", "fp8", "fp8_block")),
    ("fp8_block", 3, 200, 600, True),
)


def tiny(dtype: torch.dtype) -> list[Problem]:
    return [_problem(form, m, n, k, dtype, has_bias) for form, m, n, k, has_bias in _TINY_SIZES]


def serving() -> list[Problem]:
    lists: tuple[tuple[tuple[str | None, ...], tuple[tuple[int, int], ...], tuple[int, ...]], ...] = (
        ((None,), (*_SHAPES, (28672, 8192)), (1, 8, 16, 64, 128, 512, 4096)),
        (("int8_wo", "int4_wo", "w4a16_mxfp4", "w4a16_nvfp4"), _SHAPES, (1, 8, 16, 64, 512, 4096)),
        (("int8", "fp8", "fp8_block"), _SHAPES, (1, 8, 64, 512, 4096)),
        (("int8_static",), _SHAPES[:1], (1, 8, 64, 512, 4096)),
    )
    sizes = (own for forms, shapes, tokens in lists for own in product(forms, shapes, tokens))
    return [_problem(form, m, n, k, torch.bfloat16) for form, (n, k), m in sizes]


def _problem(name: str | None, m: int, n: int, k: int, dtype: torch.dtype, has_bias: bool = False) -> Problem:
    sample, dtype_name = None if name is None else FORMATS[name], str(dtype).removeprefix("torch.")

    def make(inputs: Inputs) -> tuple[object, ...]:
        x_MK = inputs.normal(m, k, dtype=dtype)
        weight = inputs.normal(n, k, dtype=dtype, scale=k**-0.5) if sample is None else sample.make(inputs, n, k, dtype)
        return x_MK, weight, inputs.normal(n, dtype=dtype) if has_bias else None

    sizes: dict[str, int | float | str] = {"m": m, "n": n, "k": k, "gemm_dtype": name or dtype_name}
    operator, form, tolerance = "linear", BF16, _TOLERANCE
    baselines: dict[str, Callable[..., Tensor]] = {"torch linear": functional.linear}
    if sample is not None:
        operator, form, sizes["dtype"] = sample.operator, sample.form, dtype_name
        tolerance = _TOLERANCE_BOTH if form.quantizes_input else _TOLERANCE_WEIGHT_ONLY
        baselines = {"scaled_mm": _scaled_mm} if name == "fp8" else {"dense": _dense_product}
    return Problem(operator, sizes, make, gemm(operator, m, n, k, form, has_bias=has_bias), tolerance[dtype], baselines)

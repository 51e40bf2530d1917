"""Linear layers with weights in 8 or 4 bits."""

__all__ = ["serving", "tiny"]

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.gemm import gemm
from perfmodel.specs.model.quantization import bytes_per_weight
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.weight_formats import Fp8Weight, Int4Weight, Int8Weight
from perfmodel_executors.kernels.weight_formats.dense import dense_product

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
_SHAPES = ((14336, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
_TOKENS = (1, 8, 16, 64, 4096)


class _Format(NamedTuple):
    operator: str
    name: str  # of measured tables
    weight_bytes: float
    make: Callable[[Inputs, int, int, torch.dtype], Int8Weight | Int4Weight | Fp8Weight]


def _int8(inputs: Inputs, n: int, k: int, dtype: torch.dtype) -> Int8Weight:
    return Int8Weight(
        inputs.integers(-127, 128, n, k, dtype=torch.int8), inputs.normal(n, dtype=torch.float32, scale=k**-0.5 / 64)
    )


def _fp8(inputs: Inputs, n: int, k: int, dtype: torch.dtype) -> Fp8Weight:
    values = inputs.normal(n, k, dtype=torch.float8_e4m3fn)
    return Fp8Weight(values, inputs.normal(n, dtype=torch.float32, scale=k**-0.5), quantizes_input=False)


def _int4(inputs: Inputs, n: int, k: int, dtype: torch.dtype, group: int = 128, has_zeros: bool = False) -> Int4Weight:
    zeros = inputs.integers(0, 16, k // group, n, dtype=torch.uint8) if has_zeros else None
    scales = inputs.normal(k // group, n, dtype=dtype, scale=k**-0.5 / 4)
    return Int4Weight(inputs.integers(0, 256, n, k // 2, dtype=torch.uint8), scales, zeros, group)


def _int4_zeros(inputs: Inputs, n: int, k: int, dtype: torch.dtype) -> Int4Weight:
    return _int4(inputs, n, k, dtype, 64, has_zeros=True)


_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "int8": _Format("linear_w8a16", "int8_wo", bytes_per_weight("int8"), _int8),
        "fp8": _Format("linear_w8a16", "fp8_wo", bytes_per_weight("fp8"), _fp8),
        "int4": _Format("linear_w4a16", "int4_wo", bytes_per_weight("int4", 128), _int4),
        "int4_zeros": _Format("linear_w4a16", "int4_wo_zeros", bytes_per_weight("int4", 64), _int4_zeros),
    }
)


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Few and many tokens, several slices, odd sizes."""
    return [
        _problem("int8", 3, 72, 1100, dtype, has_bias=True),
        _problem("int8", 70, 40, 144, dtype),
        _problem("fp8", 5, 40, 144, dtype),
        _problem("int4", 3, 72, 1024, dtype, has_bias=True),
        _problem("int4", 70, 40, 384, dtype),
        _problem("int4_zeros", 9, 40, 192, dtype, has_bias=True),
    ]


def serving() -> list[Problem]:
    """Decode batches and a chunk of a prompt, at the sizes of an 8B model."""
    return [_problem(f, m, n, k, torch.bfloat16) for f in ("int8", "int4") for n, k in _SHAPES for m in _TOKENS]


def _problem(form: str, m: int, n: int, k: int, dtype: torch.dtype, has_bias: bool = False) -> Problem:
    found = _FORMATS[form]

    def make(inputs: Inputs) -> tuple[object, ...]:
        x_MK = inputs.normal(m, k, dtype=dtype)
        return x_MK, found.make(inputs, n, k, dtype), inputs.normal(n, dtype=dtype) if has_bias else None

    counted = LinearFormat("bf16", found.weight_bytes, 2.0, 2.0, name=found.name)
    return Problem(
        found.operator,
        {"m": m, "n": n, "k": k, "gemm_dtype": found.name, "dtype": str(dtype).removeprefix("torch.")},
        make,
        gemm(found.operator, m, n, k, counted, has_bias=has_bias),
        _TOLERANCE[dtype],
        dense_product,
    )

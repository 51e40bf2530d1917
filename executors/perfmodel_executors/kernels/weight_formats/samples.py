"""Weights in each format for problems: random codes, scaled so that a product of normal inputs is of order one.

Names are those of tables of measured kernels (`gemm_dtype`, `moe_dtype`).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from perfmodel.models.number_formats import bytes_per_weight
from perfmodel.ops.formats import LinearFormat
from perfmodel_executors.kernels.problem import Inputs
from perfmodel_executors.kernels.weight_formats.containers import (
    FP8_BLOCK,
    BlockFp8Weight,
    Fp4Weight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
)
from perfmodel_executors.kernels.weight_formats.experts import Stacked


class SampleFormat(NamedTuple):
    """What the cost model counts for it, and a weight [n, k] for activations of a dtype."""

    form: LinearFormat
    make: Callable[[Inputs, int, int, torch.dtype], Stacked]


def _int8(quantizes_input: bool) -> Callable[[Inputs, int, int, torch.dtype], Stacked]:
    def make(inputs: Inputs, n: int, k: int, _: torch.dtype) -> Int8Weight:
        codes = inputs.integers(-127, 128, n, k, dtype=torch.int8)
        return Int8Weight(codes, inputs.normal(n, dtype=torch.float32, scale=k**-0.5 / 64), quantizes_input)

    return make


def _fp8(quantizes_input: bool) -> Callable[[Inputs, int, int, torch.dtype], Stacked]:
    def make(inputs: Inputs, n: int, k: int, _: torch.dtype) -> Fp8Weight:
        values = inputs.normal(n, k, dtype=torch.float8_e4m3fn)
        return Fp8Weight(values, inputs.normal(n, dtype=torch.float32, scale=k**-0.5), quantizes_input)

    return make


def _int4(group: int, has_zeros: bool = False) -> Callable[[Inputs, int, int, torch.dtype], Stacked]:
    def make(inputs: Inputs, n: int, k: int, dtype: torch.dtype) -> Int4Weight:
        zeros = inputs.integers(0, 16, k // group, n, dtype=torch.uint8) if has_zeros else None
        scales = inputs.normal(k // group, n, dtype=dtype, scale=k**-0.5 / 4)
        return Int4Weight(inputs.integers(0, 256, n, k // 2, dtype=torch.uint8), scales, zeros, group)

    return make


def _fp8_block(inputs: Inputs, n: int, k: int, _: torch.dtype) -> BlockFp8Weight:
    blocks = (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
    scales = inputs.normal(*blocks, dtype=torch.float32, scale=k**-0.5)
    return BlockFp8Weight(inputs.normal(n, k, dtype=torch.float8_e4m3fn), scales)


def _mxfp4(inputs: Inputs, n: int, k: int, _: torch.dtype) -> Fp4Weight:
    """Scales from 2^-10 to 2^-3."""
    codes = inputs.integers(0, 256, n, k // 2, dtype=torch.uint8)
    return Fp4Weight(codes, inputs.integers(117, 125, k // 32, n, dtype=torch.uint8))


def _nvfp4(inputs: Inputs, n: int, k: int, _: torch.dtype) -> Fp4Weight:
    """Scales from the least E4M3 number to 448, below 1 / (448 sqrt k)."""
    codes = inputs.integers(0, 256, n, k // 2, dtype=torch.uint8)
    scales = inputs.integers(1, 127, k // 16, n, dtype=torch.uint8)
    return Fp4Weight(codes, scales, inputs.normal(n, dtype=torch.float32, scale=k**-0.5 / 448))


def _weight_only(weights: str, group: int = 0) -> LinearFormat:
    return LinearFormat("bf16", bytes_per_weight(weights, group), 2.0, 2.0, name=f"{weights}_wo")


def _both(rate: str) -> LinearFormat:
    return LinearFormat(rate, bytes_per_weight(rate), bytes_per_weight(rate), 2.0, quantizes_input=True)


FORMATS: Mapping[str, SampleFormat] = MappingProxyType(
    {
        "int8_wo": SampleFormat(_weight_only("int8"), _int8(quantizes_input=False)),
        "fp8_wo": SampleFormat(_weight_only("fp8"), _fp8(quantizes_input=False)),
        "int4_wo": SampleFormat(_weight_only("int4", 128), _int4(128)),
        "int4_wo_zeros": SampleFormat(_weight_only("int4", 64), _int4(64, has_zeros=True)),
        "int4_wo_32": SampleFormat(_weight_only("int4", 32), _int4(32)),
        "int8": SampleFormat(_both("int8"), _int8(quantizes_input=True)),
        "fp8": SampleFormat(_both("fp8"), _fp8(quantizes_input=True)),
        "fp8_block": SampleFormat(_both("fp8")._replace(name="fp8_block"), _fp8_block),
        "w4a16_mxfp4": SampleFormat(_weight_only("mxfp4"), _mxfp4),
        "w4a16_nvfp4": SampleFormat(_weight_only("nvfp4"), _nvfp4),
    }
)

"""Kernels compiled ahead of time, without a GPU: what they really take of the hardware."""

from perfmodel_executors.compiled.binary import BinaryFacts, read_binary, serialised_products, unsettled_products
from perfmodel_executors.compiled.build import CompiledKernel, compile_launch, compile_problem, device_limits

__all__ = [
    "BinaryFacts",
    "CompiledKernel",
    "compile_launch",
    "compile_problem",
    "device_limits",
    "read_binary",
    "serialised_products",
    "unsettled_products",
]

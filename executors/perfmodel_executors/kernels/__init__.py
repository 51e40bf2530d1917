"""Operators, a file for each: its definition in torch and its problems; what is faster has its name in `triton/`."""

from perfmodel_executors.kernels.dispatch import KERNELS, Kernels, load_kernels

__all__ = ["KERNELS", "Kernels", "load_kernels"]

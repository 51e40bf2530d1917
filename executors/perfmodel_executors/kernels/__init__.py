"""Kernels, one folder per operator: `reference.py` is the definition in torch; faster ones stand beside it."""

from perfmodel_executors.kernels.dispatch import KERNELS, Kernels, load_kernels

__all__ = ["KERNELS", "Kernels", "load_kernels"]

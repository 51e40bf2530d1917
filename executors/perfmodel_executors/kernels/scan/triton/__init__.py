"""Scans on a GPU: single steps (`step`), and prompts in tiles (`prefill`, with `erase` for the delta rule)."""

from perfmodel_executors.kernels.scan.triton.prefill import scan_prefill
from perfmodel_executors.kernels.scan.triton.step import scan_decode

__all__ = ["scan_decode", "scan_prefill"]

"""What the machine can do at best, on one thread: copy bandwidth by size and matrix-multiplication rate by dtype.

Not used by the fit (operators in a loop flatter themselves); recorded beside a calibration so that its fractions can
be put in proportion, and so that a reader knows which machine it was.
"""

__all__ = ["CpuCeilings", "measure_ceilings"]

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

_COPY_MIB = (1, 8, 64)
_GEMM_ROWS = (1, 16, 256)
_GEMM_SIDE = 1024


@dataclass(frozen=True)
class CpuCeilings:
    """copy_bytes_per_s: MiB copied -> bytes read and written per second; gemm_flops_per_s: dtype -> rows -> rate."""

    copy_bytes_per_s: dict[int, float]
    gemm_flops_per_s: dict[str, dict[int, float]]

    def __str__(self) -> str:
        copies = ", ".join(f"{rate / 1e9:.0f} GB/s at {size} MiB" for size, rate in self.copy_bytes_per_s.items())
        gemms = "; ".join(
            f"{dtype} " + ", ".join(f"{rate / 1e9:.0f} GFLOP/s at {rows} rows" for rows, rate in rates.items())
            for dtype, rates in self.gemm_flops_per_s.items()
        )
        return f"copy (read + write) {copies}; {_GEMM_SIDE} x {_GEMM_SIDE} GEMM {gemms}"


def measure_ceilings(repeats: int = 5) -> CpuCeilings:
    """Medians of thread CPU time over `repeats`; about a second in all."""
    copies = {}
    for size in _COPY_MIB:
        source = torch.ones(size << 20, dtype=torch.uint8)
        target = torch.empty_like(source)
        copies[size] = 2 * source.numel() / _seconds(partial(target.copy_, source), repeats)
    gemms: dict[str, dict[int, float]] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        weight = torch.randn(_GEMM_SIDE, _GEMM_SIDE).to(dtype)
        for rows in _GEMM_ROWS:
            x = torch.randn(rows, _GEMM_SIDE).to(dtype)
            seconds = _seconds(partial(torch.nn.functional.linear, x, weight), repeats)
            gemms.setdefault(name, {})[rows] = 2 * rows * _GEMM_SIDE**2 / seconds
    return CpuCeilings(copies, gemms)


def _seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    samples = []
    for _ in range(repeats):
        start = time.thread_time_ns()
        call()
        samples.append(time.thread_time_ns() - start)
    return max(median(samples), 1) * 1e-9

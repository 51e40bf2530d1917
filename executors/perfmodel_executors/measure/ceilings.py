"""What the machine can do at best, on one thread: copy bandwidth by size and matrix-multiplication rate by dtype.
Recorded beside a calibration for its reader; not used by the fit, as operators in a loop flatter themselves."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import NamedTuple

import torch

from perfmodel.specs.engine.offload import KvOffload
from perfmodel.specs.hardware import HardwareSpec
from perfmodel_executors.measure.device_timer import time_calls
from perfmodel_executors.measure.protocol import Measured
from perfmodel_executors.models.support import CPU
from perfmodel_executors.runner import StepRunner

_COPY_MIB = (1, 8, 64)
_GEMM_ROWS = (1, 16, 256)
_GEMM_SIDE = 1024


def measure_ceilings() -> str:
    """A sentence, in about a second: medians of bytes read and written per second by MiB, FLOP/s by dtype and rows."""
    copies = [f"{copy_rate(size, CPU) / 1e9:.0f} GB/s at {size} MiB" for size in _COPY_MIB]
    gemms = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        weight, rates = torch.randn(_GEMM_SIDE, _GEMM_SIDE).to(dtype), []
        for rows in _GEMM_ROWS:
            x = torch.randn(rows, _GEMM_SIDE).to(dtype)
            rate = 2 * rows * _GEMM_SIDE**2 / _seconds(partial(torch.nn.functional.linear, x, weight))
            rates.append(f"{rate / 1e9:.0f} GFLOP/s at {rows} rows")
        gemms.append(f"{name} {', '.join(rates)}")
    return f"copy (read + write) {', '.join(copies)}; {_GEMM_SIDE} x {_GEMM_SIDE} GEMM {'; '.join(gemms)}"


def copy_rate(mib: int, device: torch.device) -> float:
    """Bytes read and written per second, of so many MiB copied."""
    source = torch.empty(mib << 20, dtype=torch.uint8, device=device).random_(0, 255)
    return 2 * source.numel() / _seconds(partial(torch.empty_like(source).copy_, source), device)


def _seconds(call: Callable[[], object], device: torch.device = CPU) -> float:
    call()
    return time_calls([call], device).seconds


_BLOCKS = (1, 4, 16)
_NUM_SLOTS = 256  # gone through in turn, so that a copy does not find what it copied last in the nearest cache


class CopyCase(NamedTuple):
    """A copy to time: of so many blocks, to the tier or back."""

    num_blocks: int
    is_out: bool


def copy_cases(runner: StepRunner) -> dict[CopyCase, Callable[[], object]]:
    """Copies of some blocks of the runner's cache, of which it must have as many."""
    runner.copy_blocks([(0, slot) for slot in range(_NUM_SLOTS)], [])

    def copy(num_blocks: int, is_out: bool) -> Callable[[], object]:
        turns = count(step=num_blocks)

        def run() -> None:
            first = next(turns)
            blocks = [(first + i) % runner.cache.num_blocks for i in range(num_blocks)]
            slots = [(first + i) % _NUM_SLOTS for i in range(num_blocks)]
            out, back = list(zip(blocks, slots, strict=True)), list(zip(slots, blocks, strict=True))
            runner.copy_blocks(out if is_out else [], [] if is_out else back)

        return run

    sizes = [size for size in _BLOCKS if size <= runner.cache.num_blocks]
    return {CopyCase(size, is_out): copy(size, is_out) for size in sizes for is_out in (True, False)}


def with_measured_link(
    offload: KvOffload, hardware: HardwareSpec, measured: Measured[CopyCase], block_bytes: float
) -> KvOffload:
    """`offload` over the measured link: a block takes what best fits all copies, relatively; block_bytes: of one."""
    shares = [case.num_blocks / seconds for case, seconds in measured.seconds.items()]
    block_s = sum(shares) / sum(share**2 for share in shares)
    declared = offload.link_of(hardware).bandwidth_bytes_per_s
    bandwidth = max(declared, block_bytes / block_s)
    link = {"bandwidth_bytes_per_s": bandwidth, "latency_s": max(0.0, block_s - block_bytes / bandwidth)}
    return offload.model_copy(update=link)

"""How fast this machine copies KV blocks to a second tier and back: timed beside steps, in place of a link's datasheet.

One model's blocks have one size, so what a block takes is all that is learnt. Its bytes at the bandwidth that the
scenario states are taken off; the rest is a block's latency. Where nothing is left, all of it is bandwidth.
"""

__all__ = ["CopyCase", "copy_cases", "with_measured_link"]

from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from perfmodel.specs.engine.spec import KvOffload
from perfmodel.specs.hardware import HardwareSpec
from perfmodel_executors.measure.protocol import Measured
from perfmodel_executors.runner import Runner

_BLOCKS = (1, 4, 16)
_NUM_SLOTS = 256  # gone through in turn, so that a copy does not find what it copied last in the nearest cache


class CopyCase(NamedTuple):
    """A copy to time: of so many blocks, to the tier or back."""

    num_blocks: int
    is_out: bool


def copy_cases(runner: Runner) -> dict[CopyCase, Callable[[], object]]:
    """Copies of some blocks of the runner's cache, of which it must have as many."""
    runner.copy_blocks([(0, slot) for slot in range(_NUM_SLOTS)], [])
    sizes = [size for size in _BLOCKS if size <= runner.cache.num_blocks]
    return {CopyCase(size, is_out): _copy(runner, size, is_out) for size in sizes for is_out in (True, False)}


def _copy(runner: Runner, num_blocks: int, is_out: bool) -> Callable[[], object]:
    turns = count(step=num_blocks)

    def run() -> None:
        first = next(turns)
        blocks = [(first + i) % runner.cache.num_blocks for i in range(num_blocks)]
        slots = [(first + i) % _NUM_SLOTS for i in range(num_blocks)]
        if is_out:
            runner.copy_blocks(list(zip(blocks, slots, strict=True)), [])
        else:
            runner.copy_blocks([], list(zip(slots, blocks, strict=True)))

    return run


def with_measured_link(
    offload: KvOffload, hardware: HardwareSpec, measured: Measured[CopyCase], block_bytes: float
) -> KvOffload:
    """`offload` over the link that was measured: a block takes what fits all copies best, relatively.

    hardware: of the scenario; block_bytes: of a block in all layers
    """
    shares = [case.num_blocks / seconds for case, seconds in measured.seconds.items()]
    block_s = sum(shares) / sum(share**2 for share in shares)
    declared = offload.link_of(hardware).bandwidth_bytes_per_s
    bandwidth = max(declared, block_bytes / block_s)
    return offload.model_copy(
        update={"bandwidth_bytes_per_s": bandwidth, "latency_s": max(0.0, block_s - block_bytes / bandwidth)}
    )

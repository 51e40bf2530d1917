"""Processes of this machine: how many it has a use for, on any system, and their garbage collection."""

import gc
import os
import sys

_MAX_ON_WINDOWS = 60  # its WaitForMultipleObjects waits for 64 at once, a few of which are Python's own


def num_cores() -> int:
    """The cores that this process may run on, or that there are where the system does not say."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    else:
        return os.cpu_count() or 1


def num_processes(num_items: int) -> int:
    """Processes that work on so many items at once: no more than cores, items or what the system waits for."""
    most = min(num_cores(), num_items)
    return max(min(most, _MAX_ON_WINDOWS) if sys.platform == "win32" else most, 1)


def collect_rarely() -> None:
    """Fewer searches for cycles, of which simulations make few: see `perfmodel.cli.main`."""
    gc.set_threshold(100_000, 20, 20)

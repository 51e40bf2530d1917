"""What the suite is made of: tasks, each a measurement of seconds to a minute, and where they run."""

__all__ = ["Bench", "Task"]

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from perfmodel.specs.hardware import HardwareSpec
from perfmodel_executors.device import DeviceClock


@dataclass(frozen=True)
class Bench:
    """The device that is measured, its hardware file, and the kernels that run on it."""

    device: torch.device
    hardware: HardwareSpec
    backend: str

    @property
    def clock_ns(self) -> DeviceClock:
        """As serving runs are timed."""
        return DeviceClock(self.device)

    def release_memory(self) -> None:
        """Give back what the last model held."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Task:
    """One record to be.

    part, key: where the record goes
    rank:      within its part, what comes first tells most
    seconds:   a guess, so that the last task before the end of the budget is not begun in vain
    """

    part: str
    key: str
    run: Callable[[], Mapping[str, Any]] = field(repr=False)
    rank: int = 0
    seconds: float = 3.0

"""What the suite is made of: tasks, each a measurement of seconds to a minute, and where they run."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from perfmodel.specs.hardware import HardwareSpec
from perfmodel_executors.measure.energy import Counter
from perfmodel_executors.measure.protocol import DriftMeter


@dataclass(frozen=True)
class Bench:
    """The device that is measured, its hardware file, and the kernels that run on it. drift: of a machine that others
    use, too: times are restated at one speed; energy: joules that the device has drawn, None: not counted; holders: let
    go of what is kept between tasks."""

    device: torch.device
    hardware: HardwareSpec
    backend: str
    drift: DriftMeter | None = None
    energy: Counter | None = field(default=None, repr=False, compare=False)
    holders: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)

    def release_memory(self) -> None:
        for let_go in self.holders:
            let_go()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Task:
    """One record to be, at `part` and `key`. rank: within its part, the most informative first; seconds: a guess;
    group: tasks that fail alike (an operator, a model in one format); limit_s: seconds after which it hangs."""

    part: str
    key: str
    run: Callable[[], Mapping[str, Any]] = field(repr=False)
    rank: int = 0
    seconds: float = 3.0
    group: str = ""
    limit_s: float = 150.0

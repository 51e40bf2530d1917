"""The device that a scenario's hardware stands for, its clock, and a sentence for what it cannot hold."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from perfmodel.errors import DoesNotFitError, PerfmodelError, SpecError
from perfmodel.specs import load_hardware
from perfmodel.specs.hardware import HardwareSpec
from perfmodel_executors.models.support import CPU


def find_device(hardware: HardwareSpec, num_devices: int = 1) -> torch.device:
    """The first device of `num_devices` of `hardware` here; a GPU is known by the file's names and aliases.
    Raises PerfmodelError for hardware of which too little is here, or that nothing is executed on."""
    name, kind = hardware.name, hardware.kind
    if kind == "cpu":
        return CPU
    if kind != "gpu":
        raise PerfmodelError(f"{name} is a {kind}, but the executor runs on CPUs and GPUs; use --set hardware=cpu.")
    present = _present_gpus()
    if not present:
        raise PerfmodelError(f"the scenario is for {name}, but torch sees no GPU here; use --set hardware=cpu.")
    other = next((gpu for gpu in present if not hardware.is_called(gpu)), None)
    if other is not None:
        try:
            file = load_hardware(other).name
        except SpecError:
            file = "cpu"
        raise PerfmodelError(f"the scenario is for {name}, but the GPU here is {other}; use --set hardware={file}.")
    if num_devices > len(present):
        raise PerfmodelError(
            f"the scenario asks for {num_devices} devices, but {len(present)} x {present[0]} are here; lower "
            f"tensor_parallel_size."
        )
    return torch.device("cuda", 0)


def present_device(kind: str = "auto") -> tuple[torch.device, HardwareSpec]:
    """What is here, with its hardware file. kind: cuda | cpu | auto, a GPU where there is one. Raises PerfmodelError
    where there is no GPU, SpecError for a GPU without a hardware file."""
    if kind not in ("auto", "cpu", "cuda"):
        raise SpecError(f"--device {kind}: expected auto, cuda, cpu.")
    present = _present_gpus()
    if kind == "cuda" and not present:
        raise PerfmodelError("--device cuda: torch sees no GPU here; use --device cpu.")
    if kind == "cpu" or not present:
        return CPU, load_hardware("cpu")
    return torch.device("cuda", 0), load_hardware(present[0])


def default_kernels(device: torch.device) -> str:
    return "triton" if device.type == "cuda" else "torch"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


@dataclass(frozen=True)
class StepClock:
    """Nanoseconds of steps, as differences between two calls; meaning: of what."""

    read_ns: Callable[[], int]
    meaning: str

    def __call__(self) -> int:
        return self.read_ns()


def device_clock(device: torch.device = CPU) -> StepClock:
    """On a GPU the wall's time, once all its work is done; on a CPU the calling thread's CPU time."""
    if device.type == "cpu":
        return StepClock(time.thread_time_ns, "thread CPU time")

    def wall_ns() -> int:
        torch.cuda.synchronize(device)
        return time.perf_counter_ns()

    return StepClock(wall_ns, "wall time to the end of the device's work")


@contextmanager
def memory_as_a_sentence(device: torch.device) -> Iterator[None]:
    """Within, running out of the device's memory raises DoesNotFitError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise DoesNotFitError(
            f"the memory of {device_name(device)} ran out beside weights and KV blocks; lower "
            f"gpu_memory_utilization, num_gpu_blocks_override or max_num_batched_tokens."
        ) from None


def _present_gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def interprets_triton() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"

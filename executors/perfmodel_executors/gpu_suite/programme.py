"""All tasks of a device. The measuring process lists them for itself, by the same command line."""

__all__ = ["CEILINGS", "TASKS", "Part", "bench_of", "tasks_of"]

from collections.abc import Iterator
from enum import StrEnum
from functools import partial

import torch

from perfmodel_executors.device import default_kernels, present_device
from perfmodel_executors.gpu_suite.ceilings import measure_device
from perfmodel_executors.gpu_suite.kernels import kernel_tasks
from perfmodel_executors.gpu_suite.serving import serving_tasks
from perfmodel_executors.gpu_suite.steps import reference_meter, step_tasks
from perfmodel_executors.gpu_suite.task import Bench, Task


class Part(StrEnum):
    """What can be asked for alone."""

    kernels = "kernels"
    steps = "steps"
    serving = "serving"


CEILINGS = ("ceilings", "device")  # part and key

TASKS = {Part.kernels: kernel_tasks, Part.steps: step_tasks, Part.serving: serving_tasks}


def bench_of(device: str, kernels: str, reference_s: float | None = None) -> Bench:
    """The device and kernels that the command line names.

    reference_s: of an earlier run whose measurements are gone on with
    """
    place, hardware = present_device(device)
    backend = default_kernels(place) if kernels == "auto" else kernels
    if place.type != "cpu":
        return Bench(place, hardware, backend)
    torch.set_num_threads(1)
    return Bench(place, hardware, backend, reference_meter(reference_s))


def tasks_of(device: str, kernels: str, reference_s: float | None = None) -> Iterator[Task]:
    """All tasks, as the measuring process lists them for itself."""
    bench = bench_of(device, kernels, reference_s)
    yield Task(*CEILINGS, partial(measure_device, bench))
    for tasks in TASKS.values():
        yield from tasks(bench)

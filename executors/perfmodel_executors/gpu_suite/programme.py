"""All tasks of a device. The measuring process lists them for itself, by the same command line."""

from collections.abc import Iterator
from enum import StrEnum
from functools import partial

import torch

from perfmodel_executors.device import default_kernels, present_device
from perfmodel_executors.gpu_suite.parts.ceilings import measure_device
from perfmodel_executors.gpu_suite.parts.kernels import kernel_tasks
from perfmodel_executors.gpu_suite.parts.serving import pair_tasks, serving_tasks
from perfmodel_executors.gpu_suite.parts.smoke import smoke_tasks
from perfmodel_executors.gpu_suite.parts.steps import reference_meter, step_tasks
from perfmodel_executors.gpu_suite.results import Results
from perfmodel_executors.gpu_suite.runner import TaskOutcome
from perfmodel_executors.gpu_suite.task import Bench, Task


class Part(StrEnum):
    """What can be asked for alone."""

    smoke = "smoke"
    kernels = "kernels"
    steps = "steps"
    serving = "serving"
    pairs = "pairs"


CEILINGS = ("ceilings", "device")  # part and key

TASKS = {
    Part.smoke: smoke_tasks,
    Part.kernels: kernel_tasks,
    Part.steps: step_tasks,
    Part.serving: serving_tasks,
    Part.pairs: pair_tasks,
}


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


def summary_of(results: Results, outcome: TaskOutcome) -> tuple[list[str], bool]:
    """What a call came to, line by line, and whether the smoke found nothing wrong."""
    wrong = {
        part: [
            f"WRONG RESULT: {key}: differs by {record['error']:.2g}, allowed {record['tolerance']:.2g}"
            for key, record in results.part(part).items()
            if record["error"] is not None and not record["error"] <= record["tolerance"]
        ]
        for part in (Part.smoke, Part.kernels)
    }
    failures = [f"failed: {key}: {failure}" for key, failure in outcome.failures.items()]
    counts = ", ".join(f"{len(results.part(part))} of {part}" for part in TASKS)
    done = f"{sum(outcome.done.values())} measured in {outcome.elapsed_s:.0f} s, {len(outcome.left_out)} left out"
    is_right = not wrong[Part.smoke] and not outcome.num_failed.get(Part.smoke)
    return [*failures, *wrong[Part.smoke], *wrong[Part.kernels], f"{done}; in all {counts}."], is_right

"""Kernels of the suite: every operator's serving problems, right and fast."""

__all__ = ["kernel_tasks", "measure_problem"]

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perfmodel_executors.gpu_suite.task import Bench, Task
from perfmodel_executors.kernels.dispatch import KERNELS, load_kernels
from perfmodel_executors.kernels.problem import Inputs, Problem, problems_of
from perfmodel_executors.kernels.tiles import tuning
from perfmodel_executors.measure.device_timer import Timing, num_copies, time_calls


def kernel_tasks(bench: Bench) -> Iterator[Task]:
    """The problems of all operators in turns: first each one's first, so that a short budget sees every kernel."""
    kind = "serving" if bench.device.type == "cuda" else "tiny"
    by_operator = [problems_of(operator, kind, torch.float32) for operator in KERNELS]
    for rank in range(max(map(len, by_operator), default=0)):
        for problems in by_operator:
            if rank < len(problems):
                problem = problems[rank]
                yield Task("kernels", str(problem), partial(measure_problem, problem, bench), rank=rank)


def measure_problem(problem: Problem, bench: Bench) -> dict[str, Any]:
    """A KernelRecord: the kernel's time, the baseline's, and how far its result is from the reference."""
    operator = getattr(load_kernels(bench.backend), problem.operator)
    sizes = _tensors(problem.make(Inputs("meta")))
    copies = num_copies(sum(t.numel() * t.element_size() for t in sizes), bench.device)
    error = _error(problem, operator, bench)
    arguments = [problem.make(Inputs(bench.device, seed)) for seed in range(copies)]
    timing = _time(operator, arguments, bench)
    baseline = _time(problem.baseline, arguments, bench) if problem.baseline is not None else None
    work = problem.work
    return {
        "operator": problem.operator,
        "sizes": dict(problem.sizes),
        "seconds": timing.seconds,
        "p10_s": timing.p10_s,
        "p90_s": timing.p90_s,
        "flops": work.flops if work is not None else 0.0,
        "bytes": work.hbm_bytes if work is not None else 0.0,
        "rate": work.rate if work is not None else "",
        "baseline_s": baseline.seconds if baseline is not None else None,
        "error": error,
        "tolerance": problem.tolerance,
    }


def _time(operator: Any, arguments: list[tuple[Any, ...]], bench: Bench) -> Timing:
    with torch.inference_mode():
        with tuning():
            operator(*arguments[0])
        return time_calls([partial(operator, *each) for each in arguments], bench.device)


def _error(problem: Problem, operator: Any, bench: Bench) -> float | None:
    """Largest difference to the reference over its largest magnitude; None where the kernel is the reference."""
    reference = getattr(load_kernels("torch"), problem.operator)
    if operator is reference:
        return None
    ours, theirs = (problem.make(Inputs(bench.device, seed=97)) for _ in range(2))
    with torch.inference_mode(), tuning():
        actual, expected = operator(*ours), reference(*theirs)
    worst = 0.0
    for left, right in zip(_tensors((actual, ours)), _tensors((expected, theirs)), strict=True):
        if right.numel():
            scale = max(1e-6, float(right.double().abs().max()))
            worst = max(worst, float((left.double() - right.double()).abs().max()) / scale)
    return worst


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in a nest of tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return []

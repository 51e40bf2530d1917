"""Kernels of the suite: every operator's serving problems, right and fast."""

import math
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perfmodel_executors.gpu_suite.task import Bench, Task
from perfmodel_executors.kernels.dispatch import KERNELS, load_kernels
from perfmodel_executors.kernels.launch import KernelError
from perfmodel_executors.kernels.problem import Inputs, Problem, problems_of
from perfmodel_executors.kernels.tiles import tuning
from perfmodel_executors.measure.device_timer import Timing, num_copies, time_calls

_PIECE = 1 << 26  # elements compared at once
_LEAST_SCALE = 1e-6


def kernel_tasks(bench: Bench) -> Iterator[Task]:
    """The problems of all operators in turns: first each one's first, so that a short budget sees every kernel."""
    kind = "serving" if bench.device.type == "cuda" else "tiny"
    by_operator = [problems_of(operator, kind, torch.float32) for operator in KERNELS]
    for rank in range(max(map(len, by_operator), default=0)):
        for problems in by_operator:
            if rank < len(problems):
                problem = problems[rank]
                run = partial(measure_problem, problem, bench)
                yield Task("kernels", str(problem), run, rank, group=problem.operator)


def measure_problem(problem: Problem, bench: Bench) -> dict[str, Any]:
    """A KernelRecord: the kernel's time, the baseline's, and how far its result is from the reference.

    Raises KernelError for a result that is not finite where the reference is, or that differs when it is repeated.
    """
    operator = getattr(load_kernels(bench.backend), problem.operator)
    num_bytes = sum(t.numel() * t.element_size() for t in tensors_of(problem.make(Inputs("meta"))))
    error = _error(problem, operator, bench)
    arguments = [problem.make(Inputs(bench.device, seed)) for seed in range(num_copies(num_bytes, bench.device))]
    timing = _time(operator, arguments, bench)
    baselines = _baselines(problem, arguments, bench)
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
        "is_eager": timing.is_eager,
        "baseline_s": min((each["seconds"] for each in baselines.values()), default=None),
        "baselines": baselines,
        "error": error,
        "tolerance": problem.tolerance,
    }


def _time(operator: Any, arguments: list[tuple[Any, ...]], bench: Bench) -> Timing:
    with torch.inference_mode():
        with tuning():
            operator(*arguments[0])
        return time_calls([partial(operator, *each) for each in arguments], bench.device)


def _baselines(problem: Problem, arguments: list[tuple[Any, ...]], bench: Bench) -> dict[str, dict[str, Any]]:
    """BaselineTimes by name; without those that the library refuses: the kernel's own figures are kept then."""
    found: dict[str, dict[str, Any]] = {}
    for name, call in problem.baselines.items():
        try:
            timing = _time(call, arguments, bench)
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            print(f"no baseline {name} of {problem}: {reason}", file=sys.stderr, flush=True)
        else:
            found[name] = {"seconds": timing.seconds, "is_eager": timing.is_eager}
    return found


def _error(problem: Problem, operator: Any, bench: Bench) -> float | None:
    """The worst `difference` to the reference, of results and of what is written in place; None where the kernel is
    the reference."""
    reference = getattr(load_kernels("torch"), problem.operator)
    if operator is reference:
        return None
    ours, theirs = (problem.make(Inputs(bench.device, seed=97)) for _ in range(2))
    with torch.inference_mode():
        with tuning():
            actual = operator(*ours)
        check_repeats(problem, operator, Inputs(bench.device, seed=97), (actual, ours))
        expected = reference(*theirs)
        pairs = zip(tensors_of((actual, ours)), tensors_of((expected, theirs)), strict=True)
        worst = max((difference(left, right) for left, right in pairs), default=0.0)
    if not math.isfinite(worst):
        raise KernelError(f"{problem}: the result is not finite, and the reference's is.")
    return worst


def check_repeats(problem: Problem, operator: Any, inputs: Inputs, first: Any) -> None:
    """Raises KernelError where equal inputs do not give equal bits: two parts of a kernel are in a race.

    first: (results, arguments) of a call whose arguments `inputs` makes once more
    """
    arguments = problem.make(inputs)
    again = tensors_of((operator(*arguments), arguments))
    if not all(torch.equal(_bits(left), _bits(right)) for left, right in zip(tensors_of(first), again, strict=True)):
        raise KernelError(f"{problem}: the result differs when the same inputs are computed again.")


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the reference's largest magnitude; of indices, the share of those that differ.

    Not finite where only one of the two is. In fp32, piece by piece: the inputs of a serving problem take gigabytes.
    """
    if not expected.numel():
        return 0.0
    pieces = zip(*(torch.split(each.reshape(-1), _PIECE) for each in (actual, expected)), strict=True)
    if expected.dtype in (torch.int32, torch.int64):
        return sum(int((left != right).sum()) for left, right in pieces) / expected.numel()
    worst = scale = 0.0
    for left, right in ((left.float(), right.float()) for left, right in pieces):
        apart = float((left - right).abs().max())
        worst = apart if math.isnan(apart) else max(worst, apart)
        scale = max(scale, float(right.abs().max()))
        if math.isnan(worst):
            return worst
    return worst / max(scale, _LEAST_SCALE)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a nest of tuples and weight containers."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = [getattr(value, each.name) for each in fields(value)]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors_of(part)]
    return []

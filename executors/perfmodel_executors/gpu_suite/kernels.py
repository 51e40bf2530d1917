"""Kernels of the suite: every operator's serving problems, right and fast; and what the device can do at best."""

import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel_executors.gpu_suite.task import Bench, Task
from perfmodel_executors.kernels.dispatch import KERNELS, load_kernels
from perfmodel_executors.kernels.launch import KernelError
from perfmodel_executors.kernels.problem import Inputs, Problem, problems_of
from perfmodel_executors.kernels.tiles import tuning
from perfmodel_executors.measure.ceilings import copy_rate
from perfmodel_executors.measure.device_timer import Timing, num_copies, time_calls

_PIECE = 1 << 26  # elements compared at once
_MIN_SCALE = 1e-6
_STORED = frozenset({torch.int8, torch.uint8, torch.float8_e4m3fn})
_COPY_MIB = {"cuda": (32, 256, 2048), "cpu": (1, 8, 64)}
_SIDES = {"cuda": (4096, 8192), "cpu": (256, 512)}
_PRODUCTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_EMPTY_LAUNCHES = 200
_TUNING_S, _TIMED_CALLS = 3.0, 60  # of a problem: ten rounds of copies of its inputs


def kernel_tasks(bench: Bench) -> Iterator[Task]:
    """The problems of all operators in turns: first each one's first, so that a short budget sees every kernel."""
    kind = "serving" if bench.device.type == "cuda" else "tiny"
    by_operator = [problems_of(operator, kind, torch.float32) for operator in KERNELS]
    for rank in range(max(map(len, by_operator), default=0)):
        for problem in (problems[rank] for problems in by_operator if rank < len(problems)):
            run, seconds = partial(measure_problem, problem, bench), _guess_s(problem, bench)
            yield Task("kernels", str(problem), run, rank, seconds, group=problem.operator)


def _guess_s(problem: Problem, bench: Bench) -> float:
    """Tuning, and the calls that are timed at half the limit of bytes and operations, with those of libraries."""
    if problem.work is None or bench.device.type == "cpu":
        return _TUNING_S
    device = DeviceFacts.of(bench.hardware)
    limit_s = max(problem.work.hbm_bytes / device.bandwidth, problem.work.flops / device.peak(problem.work.rate))
    return _TUNING_S + (1 + len(problem.baselines)) * _TIMED_CALLS * 2 * limit_s


def measure_problem(problem: Problem, bench: Bench) -> dict[str, Any]:
    """A KernelRecord: the kernel's time, the baselines', and how far its result is from the reference. Raises
    KernelError as `worst_difference` does. Baselines that the library refuses are left out."""
    operator = getattr(load_kernels(bench.backend), problem.operator)
    num_bytes = sum(t.numel() * t.element_size() for t in tensors_of(problem.make(Inputs("meta"))))
    is_reference = operator is getattr(load_kernels("torch"), problem.operator)
    error = None if is_reference else worst_difference(problem, operator, bench, seed=97, tunes=True)
    arguments = [problem.make(Inputs(bench.device, seed)) for seed in range(num_copies(num_bytes, bench.device))]
    timing = _time(operator, arguments, bench)
    baselines: dict[str, dict[str, Any]] = {}
    for name, call in problem.baselines.items():
        try:
            baseline = _time(call, arguments, bench)
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as problem_of_library:
            reason = (str(problem_of_library).strip().splitlines() or [type(problem_of_library).__name__])[0]
            print(f"no baseline {name} of {problem}: {reason}", file=sys.stderr, flush=True)
        else:
            baselines[name] = {"seconds": baseline.seconds, "is_eager": baseline.is_eager}
    work = problem.work
    return {
        "operator": problem.operator,
        "sizes": dict(problem.sizes),
        **timing._asdict(),
        "flops": work.flops if work is not None else 0.0,
        "bytes": work.hbm_bytes if work is not None else 0.0,
        "rate": work.rate if work is not None else "",
        "baseline_s": min((times["seconds"] for times in baselines.values()), default=None),
        "baselines": baselines,
        "error": error,
        "tolerance": problem.tolerance,
    }


def _time(operator: Any, arguments: list[tuple[Any, ...]], bench: Bench) -> Timing:
    with torch.inference_mode():
        with tuning():
            operator(*arguments[0])
        return time_calls([partial(operator, *inputs) for inputs in arguments], bench.device)


def worst_difference(
    problem: Problem, operator: Any, bench: Bench, seed: int, tunes: bool = False, in_fp32: bool = False
) -> float:
    """The worst `difference` to the reference, of results and of what is written in place. in_fp32: the reference
    computes in fp32. Raises KernelError for a result that is not finite, or that differs when it is repeated."""
    reference = getattr(load_kernels("torch"), problem.operator)
    ours, theirs = (problem.make(Inputs(bench.device, seed)) for _ in range(2))
    if in_fp32 and not any(tensor.dtype in _STORED for tensor in tensors_of(theirs)):
        theirs = _in_fp32(theirs)
    with torch.inference_mode():
        with tuning() if tunes else nullcontext():
            actual = (operator(*ours), ours)
        again = problem.make(Inputs(bench.device, seed))
        pairs = zip(tensors_of(actual), tensors_of((operator(*again), again)), strict=True)
        if not all(torch.equal(_bits(left), _bits(right)) for left, right in pairs):
            raise KernelError(f"{problem}: the result differs when the same inputs are computed again.")  # a race
        pairs = zip(tensors_of(actual), tensors_of((reference(*theirs), theirs)), strict=True)
        worst = max((difference(left, right) for left, right in pairs), default=0.0)
    if not math.isfinite(worst):
        raise KernelError(f"{problem}: the result is not finite, and the reference's is.")
    return worst


def _in_fp32(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _in_fp32(getattr(value, f.name)) for f in fields(value) if f.init})
    if isinstance(value, tuple):
        parts = [_in_fp32(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return [_in_fp32(part) for part in value] if isinstance(value, list) else value


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the reference's largest magnitude; of indices, the share of those that differ. Not finite
    where only one of the two is. In fp32, piece by piece: the inputs of a serving problem take gigabytes."""
    if not expected.numel():
        return 0.0
    pieces = zip(*(torch.split(tensor.reshape(-1), _PIECE) for tensor in (actual, expected)), strict=True)
    if expected.dtype in (torch.int32, torch.int64):
        return sum(int((left != right).sum()) for left, right in pieces) / expected.numel()
    worst = scale = 0.0
    for left, right in ((left.float(), right.float()) for left, right in pieces):
        apart = float((left - right).abs().max())
        if math.isnan(apart):  # max(0.0, nan) is 0.0
            return apart
        worst, scale = max(worst, apart), max(scale, float(right.abs().max()))
    return worst / max(scale, _MIN_SCALE)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a nest of tuples and weight containers."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors_of(part)]
    return []


def measure_device(bench: Bench) -> dict[str, Any]:
    device, kind = bench.device, bench.device.type
    gemms = {
        name: {str(side): _product(side, dtype, device) for side in _SIDES[kind]} for name, dtype in _PRODUCTS.items()
    }
    ceilings: dict[str, Any] = {
        "copy_bytes_per_s": {str(mib): copy_rate(mib, device) for mib in _COPY_MIB[kind]},
        "gemm_flops_per_s": gemms,
    }
    if kind == "cuda":
        with suppress(RuntimeError):  # a library without FP8
            # Through the library, on devices that have it (Ada, Hopper and newer).
            sides = _SIDES[kind] if torch.cuda.get_device_capability(device) >= (8, 9) else ()
            gemms["fp8"] = {str(side): _product(side, torch.float8_e4m3fn, device) for side in sides}
        x = torch.zeros(1, device=device)

        def launch() -> None:
            for _ in range(_EMPTY_LAUNCHES):
                x.add_(1.0)

        # Seconds from one tiny kernel to the next in a replayed graph.
        ceilings["graph_launch_s"] = time_calls([launch], device).seconds / _EMPTY_LAUNCHES
    return {name: value for name, value in ceilings.items() if value}


def _product(side: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOPs per second of a product of random matrices: zeros run faster, for the power that they do not draw."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    call = partial(torch.mm, a, b)
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        call = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16)
    return 2 * side**3 / time_calls([call], device).seconds

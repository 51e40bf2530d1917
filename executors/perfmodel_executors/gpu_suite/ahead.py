"""Kernels of the suite compiled ahead, by all cores, into the cache that the measuring process reads. What will be
compiled is found by recording the launches of every candidate on tensors without memory."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from itertools import chain, zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.evidence.fit.device import steps_scenario
from perfmodel.ops.work import BatchShape
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import load_scenario
from perfmodel_executors.compiled.build import device_limits
from perfmodel_executors.compiled.step import META, record_step
from perfmodel_executors.gpu_suite.processes import ChildPool
from perfmodel_executors.gpu_suite.serving import PAIRS, SCENARIOS, sides_of
from perfmodel_executors.gpu_suite.smoke import SERVED, dtypes_of, served_scenario
from perfmodel_executors.gpu_suite.steps import DECODES, MODELS, PROMPTS
from perfmodel_executors.gpu_suite.task import Bench
from perfmodel_executors.graphs import capture_sizes
from perfmodel_executors.kernels.dispatch import KERNELS, load_kernels
from perfmodel_executors.kernels.launch import Launch, Options, recording
from perfmodel_executors.kernels.problem import Inputs, Problem, problems_of
from perfmodel_executors.kernels.tiles import listing, targeting
from perfmodel_executors.models.decoder import load_decoder

_OTHER_CORES = 2  # for the measuring process and the one that schedules
_CHUNKS = (24, 48, 100, 200, 400, 800, 1600, 3200, 6400)  # tokens of a served step: one of each tuned range
_CONTEXT = 2048
_SMOKED = 48  # tokens of a prompt
_BESIDE = ("smoke", "kernels")  # parts that busy cores do not disturb


class KernelBuild(NamedTuple):
    module: str
    kernel: str
    args: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]
    options: Options


class Ahead:
    """Compiles what the parts of the suite will need on `bench`, beside the measuring; nothing on a CPU. wait_s: how
    long whole models wait for it, whose steps busy cores would disturb."""

    def __init__(self, bench: Bench, parts: Sequence[str], wait_s: float) -> None:
        self._until = time.monotonic() + wait_s
        is_needed = bench.device.type == "cuda" and bench.backend == "triton"
        capability = device_limits(bench.hardware).capability if is_needed else 0
        self.pool = ChildPool(max(1, (os.cpu_count() or 1) - _OTHER_CORES), prepare, (capability,), compile_job)
        # Recording the launches of a part takes seconds, in which the first ones are compiled and measured.
        self._thread = threading.Thread(target=self._compile, args=(bench, parts), daemon=True)
        if is_needed:
            self._thread.start()

    def _compile(self, bench: Bench, parts: Sequence[str]) -> None:
        known: set[KernelBuild] = set()
        for part in parts:
            try:
                jobs = dict.fromkeys(map(job_of, launches_of(part, bench.hardware)))
            except Exception as error:  # it only saves time
                print(f"nothing of {part} is compiled ahead: {error!r}", file=sys.stderr, flush=True)
                continue
            self.pool.add(job for job in jobs if job not in known)
            known.update(jobs)
        self.pool.join()
        self.pool.end()

    def is_open(self, part: str) -> bool:
        """Whether a part may begin: kernels at once, for they are timed without the host."""
        return part in _BESIDE or not self._thread.is_alive() or time.monotonic() >= self._until


def prepare(capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    if sys.platform != "win32":
        with suppress(OSError):
            os.nice(10)
    torch.set_num_threads(1)
    # All that is asked of a driver of a device that need not be there.
    facts = {"get_current_device": lambda: 0, "get_current_stream": lambda device: 0}
    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", capability, 32), **facts))


def compile_job(job: KernelBuild) -> Any:
    """False where the kernel does not compile: the measuring process will find out what is wrong, and say so."""
    kernel = getattr(import_module(job.module), job.kernel)
    try:
        built = kernel.warmup(*job.args, grid=(1,), **dict(job.constants), **asdict(job.options))
    except Exception:
        return False
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(built.src, built.metadata)
    return str(built.hash)


def job_of(launch: Launch) -> KernelBuild:
    unspecialised = {p.name for p in launch.kernel.params if p.do_not_specialize}

    def kind(name: str, value: Any) -> Any:
        """Equal for arguments that make one kernel: of integers only 1, and whether 16 divides them, matters."""
        if isinstance(value, Tensor):
            return value.dtype
        if not isinstance(value, int) or isinstance(value, bool) or not -(2**31) <= value < 2**31:
            return value
        if name in unspecialised:
            return 17
        return 1 if value == 1 else 16 if value % 16 == 0 else 17

    args = tuple(kind(name, value) for name, value in zip(launch.kernel.arg_names, launch.args, strict=False))
    where = (launch.kernel.__module__, launch.kernel.__name__)
    return KernelBuild(*where, args, tuple(launch.constants.items()), launch.options)


def launches_of(part: str, hardware: HardwareSpec) -> list[Launch]:
    """Launches of a part on `hardware`, about in the order in which they are needed; of the smoke, which tunes nothing,
    the first candidates alone. What cannot be recorded is left to the task, which says what is wrong."""
    tuned = nullcontext() if part == "smoke" else listing()
    with targeting(device_limits(hardware)), recording() as launches, torch.inference_mode(), tuned:
        for call in _calls(part, hardware):
            with suppress(PerfmodelError, RuntimeError, NotImplementedError, ValueError):
                call()
    return launches


def _calls(part: str, hardware: HardwareSpec) -> Iterator[Callable[[], object]]:
    on_device = f"hardware={hardware.name}"
    if part == "smoke":
        bench = Bench(torch.device("cuda"), hardware, "triton")
        for dtype in dtypes_of(bench).values():
            yield from _problem_calls("tiny", dtype)
        for model, formats in SERVED:
            scenario = served_scenario(model, formats, bench)
            yield partial(_steps, scenario, capture_sizes(scenario.engine.max_num_seqs), [(_SMOKED, 0)])
    elif part == "kernels":
        yield from _problem_calls("serving", torch.bfloat16)
    elif part == "steps":
        for model, quantized in MODELS["cuda"]:
            scenario = steps_scenario(model, quantized, hardware.name)
            yield partial(_steps, scenario, [size for size, _ in DECODES["cuda"]], PROMPTS["cuda"])
    elif part == "serving":
        for name in SCENARIOS:
            yield partial(_served, load_scenario(f"executor/{name}", [on_device]))
    else:
        for name in (f"executor/pairs/{pair}" for pair in PAIRS):
            for overrides in sides_of(name):
                yield partial(_served, load_scenario(name, [on_device, *overrides]))


def _problem_calls(kind: str, dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    kernels = load_kernels("triton")

    def run(problem: Problem) -> None:
        getattr(kernels, problem.operator)(*problem.make(Inputs(META)))

    listed = [problems_of(operator, kind, dtype) for operator, rows in KERNELS.items() if "triton" in rows]
    yield from (partial(run, problem) for problem in chain(*zip_longest(*listed)) if problem is not None)


def _served(scenario: Scenario) -> None:
    engine = scenario.engine
    chunks = [(new, 0) for new in _CHUNKS if new <= engine.max_num_batched_tokens]
    _steps(scenario, capture_sizes(engine.max_num_seqs), chunks)


def _steps(scenario: Scenario, batches: Sequence[int], prompts: Sequence[tuple[int, int]]) -> None:
    # One layer of each kind: the others launch the same.
    model = replace(scenario.model, layers=tuple((layer, 1) for layer, _ in scenario.model.layers))
    decoder = load_decoder(model, scenario.engine, device=META, kernels=load_kernels("triton"))
    # Graphs have block tables as wide as a context can become, other steps as wide as one is.
    contexts = (scenario.engine.max_model_len or model.max_position_embeddings, _CONTEXT)
    shapes = [BatchShape(size, size, (), size, size * context) for context in contexts for size in batches]
    shapes += [BatchShape(new, 1, ((new, done),), 0, 0) for new, done in prompts]
    for shape in shapes:
        record_step(decoder, scenario.engine.block_size, shape)

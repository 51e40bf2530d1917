"""Kernels of the suite compiled ahead, by all cores, into the cache that the measuring process reads.

Compiling takes a core a second a kernel, and tuning tries several for each problem: one after the other they would take
most of the budget. What will be compiled is found by recording the launches of every candidate on tensors without
memory. Compiled is what Triton itself makes of such a call, so that its cache knows it by the very same key; no process
here touches the device.
"""

__all__ = ["Ahead", "KernelBuild", "compile_job", "jobs_of", "prepare"]

import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfmodel_executors.compiled.build import device_limits
from perfmodel_executors.gpu_suite.compiling.launches import launches_of
from perfmodel_executors.gpu_suite.compiling.pool import CompilerPool
from perfmodel_executors.gpu_suite.task import Bench
from perfmodel_executors.kernels.launch import Launch

_OTHER_CORES = 2  # for the measuring process and the one that schedules
_BESIDE = ("smoke", "kernels")  # parts that busy cores do not disturb


class KernelBuild(NamedTuple):
    """A kernel to compile: arguments as Triton distinguishes them, a tensor by its dtype."""

    module: str
    kernel: str
    args: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int


def jobs_of(launches: Iterable[Launch]) -> list[KernelBuild]:
    """The distinct kernels of `launches`, in their order."""
    return list(dict.fromkeys(map(_job, launches)))


class Ahead:
    """Compiles what the parts of the suite will need on `bench`, beside the measuring; nothing on a CPU.

    wait_s: how long whole models wait for it, whose steps busy cores would disturb
    """

    def __init__(self, bench: Bench, parts: Sequence[str], wait_s: float, cores: int | None = None) -> None:
        self._until = time.monotonic() + wait_s
        self._pool: CompilerPool | None = None
        if bench.device.type == "cuda" and bench.backend == "triton":
            cores = cores or max(1, (os.cpu_count() or 1) - _OTHER_CORES)
            capability = device_limits(bench.hardware).capability
            self._pool = CompilerPool(cores, prepare, (capability,), compile_job)
            # Recording the launches of a part takes seconds, in which the first ones are compiled and measured.
            threading.Thread(target=self._list, args=(bench, parts), daemon=True).start()

    def _list(self, bench: Bench, parts: Sequence[str]) -> None:
        """Gives the pool the kernels of one part after the other."""
        assert self._pool is not None
        known: set[KernelBuild] = set()
        for part in parts:
            try:
                jobs = [job for job in jobs_of(launches_of(part, bench.hardware)) if job not in known]
            except Exception as error:  # it only saves time
                print(f"nothing of {part} is compiled ahead: {error!r}", file=sys.stderr, flush=True)
                continue
            known.update(jobs)
            self._pool.add(jobs)
        self._pool.add((), is_last=True)

    @property
    def num_left(self) -> int:
        """Kernels not compiled yet, of those that are known."""
        return self._pool.num_left if self._pool is not None else 0

    @property
    def num_done(self) -> int:
        """Kernels that the other cores have compiled, or found in the cache."""
        return self._pool.num_done if self._pool is not None else 0

    def is_open(self, part: str) -> bool:
        """Whether a part may begin: kernels at once, for they are timed without the host."""
        is_busy = self._pool is not None and self._pool.is_busy
        return part in _BESIDE or not is_busy or time.monotonic() >= self._until

    def end(self) -> None:
        """Leaves what is not compiled."""
        if self._pool is not None:
            self._pool.end()


def prepare(capability: int) -> None:
    """Makes this process compile for a device of `capability`, whatever is here."""
    from triton.runtime import driver

    if sys.platform != "win32":
        with suppress(OSError):
            os.nice(10)
    torch.set_num_threads(1)
    driver.set_active(_Absent(capability))


def compile_job(job: KernelBuild) -> Any:
    """Compiles the kernel, and the host's code that launches it where that can be built; False where it does not
    compile (the measuring process will find out what is wrong, and say so)."""
    kernel = getattr(import_module(job.module), job.kernel)
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    try:
        built = kernel.warmup(*job.args, grid=(1,), **dict(job.constants), **options)
    except Exception:
        return False
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(built.src, built.metadata)
    return str(built.hash)


class _Absent:
    """What Triton asks its driver for when it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _job(launch: Launch) -> KernelBuild:
    names = launch.kernel.arg_names
    unspecialised = {p.name for p in launch.kernel.params if p.do_not_specialize}
    args = tuple(_kind(value, name in unspecialised) for name, value in zip(names, launch.args, strict=False))
    return KernelBuild(
        launch.kernel.__module__,
        launch.kernel.__name__,
        args,
        tuple(launch.constants.items()),
        launch.options.num_warps,
        launch.options.num_stages,
    )


def _kind(value: Any, is_unspecialised: bool) -> Any:
    """The same for arguments that make the same kernel: of integers only 1, and whether 16 divides them, matters."""
    if isinstance(value, Tensor):
        return value.dtype
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**31) <= value < 2**31:
        return value
    if is_unspecialised:
        return 17
    return value if value == 1 else 16 if value % 16 == 0 else 17

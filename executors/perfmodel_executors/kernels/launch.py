"""The one place where Triton kernels are launched.

Every kernel goes through `launch`, on tensors of any device. Within `recording()` nothing runs: the launches are kept,
with all that their compilation depends on, so that a kernel can be compiled ahead of time for any GPU from exactly the
call that would have run it (on tensors of the `meta` device, which have shapes and no memory).
"""

__all__ = ["Launch", "Options", "launch", "recording"]

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

Grid = tuple[int, ...]


@dataclass(frozen=True)
class Options:
    """How a kernel is compiled, beside its arguments: warps of a thread block, stages of its software pipeline."""

    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, how many programs, its arguments in order, its compile-time constants by name."""

    kernel: Any
    grid: Grid
    args: tuple[Any, ...] = field(repr=False)
    constants: dict[str, Any]
    options: Options

    @property
    def name(self) -> str:
        return str(getattr(self.kernel, "__name__", self.kernel)).lstrip("_")


_recorder: ContextVar[list[Launch] | None] = ContextVar("recorder", default=None)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Keeps the launches made inside instead of running them."""
    launches: list[Launch] = []
    token = _recorder.set(launches)
    try:
        yield launches
    finally:
        _recorder.reset(token)


def launch(kernel: Any, grid: Grid, *args: Any, options: Options = Options(), **constants: Any) -> None:
    """Runs `kernel` (a `triton.jit` function) on `grid`; constants are its `tl.constexpr` parameters."""
    launches = _recorder.get()
    if launches is not None:
        launches.append(Launch(kernel, grid, args, constants, options))
        return
    kernel[grid](*args, **constants, num_warps=options.num_warps, num_stages=options.num_stages)

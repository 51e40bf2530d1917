"""The one place where Triton kernels are launched, on tensors of any device. What changes from step to step (numbers of
tokens, widths of block tables) is named in a kernel's `do_not_specialize`: else Triton compiles it again in the middle
of a serving run, for the first such number that is 1, or divisible by 16."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from perfmodel.errors import PerfmodelError

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
        return _name(self.kernel)


class KernelError(PerfmodelError):
    """A kernel that does not compile, or that takes more registers or SRAM than the device has."""


_recorder: ContextVar[list[Launch] | None] = ContextVar("recorder", default=None)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Keeps the launches made inside instead of running them, with all that their compilation depends on: a kernel can
    be compiled ahead of time for any GPU from the very call (on the `meta` device, whose tensors have no memory)."""
    launches: list[Launch] = []
    with within(_recorder, launches):
        yield launches


@contextmanager
def within(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Within, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def launch(kernel: Any, grid: Grid, *args: Any, options: Options = Options(), **constants: Any) -> None:
    """Runs `kernel` (a `triton.jit` function) on `grid`; constants are its `tl.constexpr` parameters."""
    launches = _recorder.get()
    if launches is not None:
        launches.append(Launch(kernel, grid, args, constants, options))
        return
    try:
        kernel[grid](*args, **constants, num_warps=options.num_warps, num_stages=options.num_stages)
    except Exception as error:
        # Triton's own errors, and its compiler passes' (plain RuntimeErrors); the interpreter's are bugs of a kernel.
        names = {kind.__name__ for kind in type(error).__mro__}
        is_of_a_pass = isinstance(error, RuntimeError) and "PassManager" in str(error)
        if "InterpreterError" in names or not ("TritonError" in names or is_of_a_pass):
            raise
        where = next((str(arg.device) for arg in args if hasattr(arg, "device")), "this device")
        raise kernel_error(_name(kernel), where, constants, error) from error


def kernel_error(name: str, where: str, constants: dict[str, Any], error: Exception) -> KernelError:
    """One sentence from what the compiler said, whose last line is the reason."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    sizes = ", ".join(f"{constant}={value}" for constant, value in constants.items())
    return KernelError(
        f"the kernel {name} does not compile for {where} with {sizes or 'no constants'}: {lines[-1].strip()}; use the "
        f"torch kernels (--kernels torch)."
    )


def _name(kernel: Any) -> str:
    return str(getattr(kernel, "__name__", kernel)).lstrip("_")

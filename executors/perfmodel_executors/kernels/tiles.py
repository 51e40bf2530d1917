"""Which tile sizes a kernel runs with: candidates, those that the device's SRAM can hold, the fastest of them.

Each kernel lists its candidates, the one to trust without measuring first. What does not fit the SRAM of the device is
dropped before anything is compiled, by the law that Triton's pipeliner follows:

    bytes = (stages - 1) tile   on Ampere, Ada and consumer Blackwell, whose cp.async fills the stage being left
    bytes = stages tile         on Hopper and Blackwell, where the copy engine writes ahead of the tensor cores
"""

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from perfmodel.errors import DoesNotFitError
from perfmodel_executors.kernels.launch import KernelError, Options, within


class DeviceLimits(NamedTuple):
    """name, compute capability (90 for sm_90), and the most shared memory of a thread block, bytes."""

    name: str
    capability: int
    shared_bytes: int


class TileConfig(NamedTuple):
    """One way to run a kernel: its compile-time sizes by name, and the compiler's options."""

    sizes: dict[str, int]
    options: Options = Options()

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{sizes} warps={self.options.num_warps} stages={self.options.num_stages}"


_target: ContextVar[DeviceLimits | None] = ContextVar("target", default=None)
_is_tuning, _may_tune = ContextVar("is_tuning", default=False), ContextVar("may_tune", default=True)
_is_listing = ContextVar("is_listing", default=False)
_chosen: dict[tuple[str, str, Hashable], "_Choice"] = {}
_trusted: dict[tuple[str, str, Hashable], TileConfig] = {}  # the first candidate, until candidates are timed
_MAX_TUNING_S = 20.0  # of a problem, compiling included; the candidates to trust come first
_MARGIN = 0.97  # of the first candidate's time, which another one has to stay below


class _Choice(NamedTuple):
    """What a problem is run with, and milliseconds of each candidate where they were timed."""

    config: TileConfig
    times_ms: dict[str, float]

    def __str__(self) -> str:
        timed = [f"{config} {milliseconds * 1e3:.1f} us" for config, milliseconds in self.times_ms.items()]
        return "; ".join([str(self.config), *timed])


def capability_of(device: torch.device) -> int | None:
    """The compute capability to choose for (90 for sm_90); None in the interpreter."""
    limits = limits_of(device)
    return limits.capability if limits else None


@lru_cache(maxsize=64)  # asked at every launch
def compute_units(device: torch.device) -> int:
    """Compute units of the device; of an H100 where none is known."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def padded(dim: int) -> int:
    """The least power of two that holds `dim`, and that a matrix product takes (16)."""
    return max(16, 1 << (dim - 1).bit_length())


def pipelined_bytes(tile_bytes: int, config: TileConfig, capability: int) -> int:
    """Shared memory of a software pipeline whose stages hold `tile_bytes` each."""
    stages = config.options.num_stages
    return tile_bytes * (stages if has_copy_engine(capability) else max(1, stages - 1))


def has_copy_engine(capability: int) -> bool:
    """Whether the compiler uses it there; 90 for sm_90."""
    return 90 <= capability < 120


# (candidate, compute capability) -> shared memory of a thread block, bytes
Law = Callable[[TileConfig, int], int]


def fitting(candidates: Sequence[TileConfig], law: Law, limits: DeviceLimits | None, kernel: str) -> list[TileConfig]:
    """The candidates that the SRAM holds, all without a device (interpreter). Raises DoesNotFitError if none."""
    if limits is None:
        return list(candidates)
    kept = [c for c in candidates if law(c, limits.capability) <= limits.shared_bytes]
    if not kept:
        least = min(law(c, limits.capability) for c in candidates)
        raise DoesNotFitError(
            f"{kernel}: the smallest tile needs {least} bytes of SRAM a thread block; {limits.name} has "
            f"{limits.shared_bytes}. Use the torch kernels, or a smaller head or group size."
        )
    return kept


def pick(
    kernel: str,
    problem: Hashable,
    candidates: Callable[[], Iterable[TileConfig]],
    law: Law,
    run: Callable[[TileConfig], None],
    device: torch.device,
) -> TileConfig:
    """The configuration to run `kernel` with. problem: what the best choice depends on; candidates: the one to trust
    without measuring first; run: launches the kernel with one, harmless to repeat. Raises DoesNotFitError."""
    limits = limits_of(device)
    key = (kernel, limits.name if limits else device.type, problem)
    known = _chosen.get(key)
    if known is not None:
        return known.config
    may_time = _is_tuning.get() and _may_tune.get() and device.type == "cuda"
    may_time = may_time and not torch.cuda.is_current_stream_capturing()
    if not may_time and not _is_listing.get() and key in _trusted:
        return _trusted[key]
    kept = fitting(list(candidates()), law, limits, kernel)
    _trusted[key] = kept[0]
    if _is_listing.get():
        for config in kept:
            run(config)
        return kept[0]
    if not may_time:
        return kept[0]
    start, times_ms = time.monotonic(), [0.0] if len(kept) == 1 else []
    for config in kept[len(times_ms) :]:
        times_ms.append(_milliseconds(run, config))
        if time.monotonic() - start > _MAX_TUNING_S:
            break
    fastest = min(range(len(times_ms)), key=lambda index: times_ms[index])
    # The first where none compiles, too, so that its error is the one that is raised.
    leads = times_ms[fastest] < _MARGIN * times_ms[0]
    listed = zip(map(str, kept), times_ms, strict=False)
    _chosen[key] = _Choice(kept[fastest if leads else 0], dict(listed) if len(kept) > 1 else {})
    return _chosen[key].config


# Within, kernels on a GPU time their candidates at the first call of each problem.
tuning = partial(within, _is_tuning, True)
# Within, `tuning()` is without effect: kernels run with their first candidates, whatever the others do.
untuned = partial(within, _may_tune, False)
# Within, every candidate is launched, which under `recording()` lists what tuning will compile.
listing = partial(within, _is_listing, True)
# Within, choices are those for these `DeviceLimits`, whatever device the tensors are on: to compile ahead of time.
targeting = partial(within, _target)


def choices() -> dict[str, str]:
    """What was tuned so far: "kernel on device, problem" -> configuration; all candidates with their times."""
    return {f"{kernel} on {device}, {problem}": str(choice) for (kernel, device, problem), choice in _chosen.items()}


def limits_of(device: torch.device) -> DeviceLimits | None:
    """Those of the device compiled for, or of this one; None where no GPU is involved (the interpreter)."""
    return _target.get() or _limits_of(device)


@lru_cache(maxsize=64)  # asked at every launch
def _limits_of(device: torch.device) -> DeviceLimits | None:
    if device.type != "cuda":
        return None
    from triton.runtime import driver

    facts = torch.cuda.get_device_properties(device)
    shared = driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return DeviceLimits(facts.name, facts.major * 10 + facts.minor, int(shared))


def _milliseconds(run: Callable[[TileConfig], None], config: TileConfig) -> float:
    from triton.testing import do_bench

    try:
        return float(do_bench(partial(run, config), warmup=3, rep=15, return_mode="median"))
    except KernelError:  # too many registers or too much tensor memory, which the filter does not count
        return float("inf")

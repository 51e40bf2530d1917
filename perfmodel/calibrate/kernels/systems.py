"""From a folder of measurements to calibrations: every kernel table of every system, fitted group by group.

A folder is either of kernel tables, `<system>/<op>`, or a run with a layer profile, `ops/meta.yaml`. To add a
kind of kernel, write its module (`groups`, `fit`, `predict`) and enter its tables in MODULES.
"""

__all__ = ["GENERIC_SMALL", "MODULES", "FittedGroup", "KernelModule", "calibrate_folder", "module_of"]

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.kernels.attention import mixed as mixed_attention
from perfmodel.calibrate.kernels.layer_profile import fit_small_kernels, read_layer_profile
from perfmodel.calibrate.kernels.tables import Group, KernelTable, op_of, read_table, table_files, understood
from perfmodel.calibrate.origins import KERNEL_TABLES, LAYER_PROFILE
from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.roofline import FamilyFit
from perfmodel.dates import today
from perfmodel.errors import SpecError
from perfmodel.specs import HardwareSpec, load_hardware
from perfmodel.specs.engine.description import describe_engine

Progress = Callable[[int, int], None]


class KernelModule(Protocol):
    """What the module of a kind of kernel offers."""

    def groups(self, table: KernelTable, device: DeviceFacts) -> list[Group]:
        """The rows of each kernel."""
        ...

    def fit(self, group: Group, device: DeviceFacts) -> Any:
        """The parameters of one kernel's form."""
        ...

    def predict(self, group: Group, fit: Any, device: DeviceFacts) -> NDArray[np.float64]:
        """Seconds of each row under a fit."""
        ...


# Table name -> the module that knows its kernels.
MODULES = {
    "context_attention": "attention.prefill",
    "context_mla": "attention.latent",
    "custom_allreduce": "collectives",
    "gemm": "gemm",
    "generation_attention": "attention.decode",
    "generation_mla": "attention.latent",
    "mla_context_module": "attention.latent",
    "mla_generation_module": "attention.latent",
    "moe": "moe",
    "nccl": "collectives",
}

# Norms, rotations, activations, cache writes of a device whose small kernels were not timed: between those of the two
# cards whose layer profiles were (2.0 and 2.3 us a kernel; activations in L2 at 2.7 and 3.2 times main memory).
GENERIC_SMALL = FamilyFit(overhead_s=2.2e-6, memory_fraction=0.85, knee=1.0, cached_speedup=3.0)

_EVERY_ENGINE = "nccl"  # a library that all engines call


@dataclass(frozen=True)
class FittedGroup:
    """A kernel with its fit; `ape`: |predicted / measured - 1| of each of its rows."""

    hardware: HardwareSpec
    group: Group
    fit: Any
    ape: NDArray[np.float64]


def calibrate_folder(path: str | Path, engine: str, progress: Progress | None = None) -> list[Calibration]:
    """Calibrations under `engine` of every device measured in `path`.

    Raises SpecError for a folder without measurements of that engine.
    """
    path = Path(path)
    if (path / "ops" / "meta.yaml").is_file():
        return [_from_profile(path, engine)]
    fitted: dict[str, list[FittedGroup]] = {}
    for found in _fit_folder(path, engine, progress):
        fitted.setdefault(found.hardware.name, []).append(found)
    own = {name: members for name, members in fitted.items() if any(m.group.engine == engine for m in members)}
    if not own:
        raise SpecError(f"{path}: has no measurements of engine {engine!r}")
    return [_calibration(name, engine, members) for name, members in own.items()]


def _fit_folder(path: Path, engine: str, progress: Progress | None = None) -> Iterator[FittedGroup]:
    """Fit every kernel of `engine`, and of libraries that all engines call."""
    files = [(file, module) for file in table_files(path) if (module := module_of(op_of(file)))]
    for done, (file, module) in enumerate(files, 1):
        table, hardware = read_table(file), load_hardware(file.parent.name)
        with understood(file):
            found = list(_fit_table(table, hardware, module, engine))
        yield from found
        if progress is not None:
            progress(done, len(files))


def _fit_table(table: KernelTable, hardware: HardwareSpec, module: KernelModule, engine: str) -> Iterator[FittedGroup]:
    device = DeviceFacts.of(hardware)
    for group in module.groups(table, device):
        if group.engine in (engine, _EVERY_ENGINE):
            fit = module.fit(group, device)
            yield FittedGroup(hardware, group, fit, np.abs(module.predict(group, fit, device) / group.seconds - 1))


def module_of(table: str) -> KernelModule | None:
    """The module that knows the kernels of a table, or None."""
    name = MODULES.get(table)
    return cast(KernelModule, import_module(f"perfmodel.calibrate.kernels.{name}")) if name else None


def _calibration(device: str, engine: str, members: Sequence[FittedGroup]) -> Calibration:
    families = _with_static_scales({found.group.key: found.fit for found in members})
    num_rows = sum(len(found.ape) for found in members)
    return Calibration(
        device=device,
        engine=engine,
        source=KERNEL_TABLES.source(f"{num_rows:,} kernel times of {len(members)} kernels"),
        date=today(),
        command=KERNEL_TABLES.command(engine),
        families=dict(sorted(families.items())),
        default=GENERIC_SMALL,
        contained=_contained(engine, families),
    )


def _with_static_scales(families: dict[str, Any]) -> dict[str, Any]:
    """`families` with the FP8 multiplication whose input comes quantized: measured ones include the kernels that
    quantize it, and differ from BF16's in launches by them."""
    if "gemm/fp8" not in families or "gemm/bf16" not in families:
        return families
    launch_s = min(families["gemm/bf16"].launch_s, families["gemm/fp8"].launch_s)
    return families | {"gemm/fp8_static": families["gemm/fp8"].model_copy(update={"launch_s": launch_s})}


def _contained(engine: str, families: Mapping[str, Any]) -> tuple[str, ...]:
    has_attention = any(key.startswith("attention_decode/") for key in families)
    return describe_engine(engine).facts.attention_contains if has_attention else ()


def _from_profile(path: Path, engine: str) -> Calibration:
    profile = read_layer_profile(path)
    if profile.engine != engine:
        raise SpecError(f"{path}: profiles engine {profile.engine!r}, not {engine!r}")
    device = DeviceFacts.of(profile.hardware)
    gemm = module_of("gemm")
    assert gemm is not None
    families = {group.key: gemm.fit(group, device) for group in gemm.groups(profile.gemms, device)}
    attention = mixed_attention.groups(mixed_attention.read_profiles(path))
    families |= {group.key: mixed_attention.fit(group, device) for group in attention}
    small = fit_small_kernels(profile.hardware, profile.small)
    num_rows = len(profile.gemms) + len(profile.small) + sum(len(group.seconds) for group in attention)
    return Calibration(
        device=profile.hardware.name,
        engine=engine,
        source=LAYER_PROFILE.source(f"{num_rows:,} kernel times of a layer profile"),
        date=today(),
        command=LAYER_PROFILE.command(engine),
        families=families | {"elementwise": small},
        contained=_contained(engine, families),
        default=small,
    )

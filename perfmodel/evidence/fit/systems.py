"""Calibrates from a folder of kernel tables, `<system>/<op>`, or of one card's layer profile (`layer_profile`).

Residuals of kernel tables split into shapes, few per model, and sizes within a shape, which a model's steps vary. With
a row's residual the sum of independent shape and size effects (one-way random effects; Searle, Casella and McCulloch,
Variance Components, 1992, chapter 3), the variance of shapes is that of their means minus the sizes' part in a mean. A
layer's four matrix products (qkv, output, gate and up, down) have four shapes: their mean has half the standard
deviation of one.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from perfmodel.cost import load_calibration
from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.calibrations.for_all import KernelErrors
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.dates import today
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.attention import DECODES, LATENT, PROMPTS
from perfmodel.evidence.fit.collectives import COLLECTIVES
from perfmodel.evidence.fit.kernels import Floats, KernelModule, predict
from perfmodel.evidence.fit.layer_profile import (
    attention_groups,
    fit_attention,
    fit_small_kernels,
    read_layer_profile,
    read_profiles,
)
from perfmodel.evidence.fit.products import GEMM, MOE
from perfmodel.evidence.observation import KERNEL_TABLES, LAYER_PROFILE, Origin, Progress
from perfmodel.evidence.sources.kernels import Column, Group, KernelTable, op_of, read_table, table_files, understood
from perfmodel.specs import load_hardware
from perfmodel.specs.engine.description import describe_engine

# Table name -> the kind of its kernels.
MODULES: Mapping[str, KernelModule] = MappingProxyType(
    {
        "context_attention": PROMPTS,
        "context_mla": LATENT,
        "custom_allreduce": COLLECTIVES,
        "gemm": GEMM,
        "generation_attention": DECODES,
        "generation_mla": LATENT,
        "mla_context_module": LATENT,
        "mla_generation_module": LATENT,
        "moe": MOE,
        "nccl": COLLECTIVES,
    }
)

# Norms, rotations, activations, cache writes of a device whose small kernels were not timed: between those of the two
# cards whose layer profiles were (2.0 and 2.3 us a kernel; activations in L2 at 2.7 and 3.2 times main memory).
GENERIC_SMALL = FamilyFit(overhead_s=2.2e-6, memory_fraction=0.85, knee=1.0, cached_speedup=3.0)

_EVERY_ENGINE = "nccl"  # a library that all engines call


def calibrate_folder(path: str | Path, engine: str, progress: Progress | None = None) -> list[Calibration]:
    """Calibrations under `engine` of every device in `path`. Raises SpecError without measurements of that engine."""
    path = Path(path)
    if (path / "ops" / "meta.yaml").is_file():
        return [_from_profile(path, engine)]
    fitted: defaultdict[str, list[tuple[Group, Any]]] = defaultdict(list)  # by device
    files = [(file, MODULES[op_of(file)]) for file in table_files(path) if op_of(file) in MODULES]
    for done, (file, module) in enumerate(files, 1):
        table, hardware = read_table(file), load_hardware(file.parent.name)
        device = DeviceFacts.of(hardware)
        with understood(file):
            groups = [group for group in module.groups(table, device) if group.engine in (engine, _EVERY_ENGINE)]
            fitted[hardware.name] += ((group, module.fit(group, device)) for group in groups)
        if progress is not None:
            progress(done, len(files))
    result = []
    for name, kernels in fitted.items():
        if any(group.engine == engine for group, _ in kernels):
            families = _with_static_scales({group.key: fit for group, fit in kernels})
            num_rows = sum(len(group.seconds) for group, _ in kernels)
            what, families = f"{num_rows:,} kernel times of {len(kernels)} kernels", dict(sorted(families.items()))
            result.append(_calibration(KERNEL_TABLES, what, name, engine, families, GENERIC_SMALL))
    if not result:
        raise SpecError(f"{path}: has no measurements of engine {engine!r}")
    return result


def _calibration(
    origin: Origin, what: str, device: str, engine: str, families: dict[str, Any], small: FamilyFit
) -> Calibration:
    has_attention = any(key.startswith("attention_decode/") for key in families)
    return Calibration(
        device=device,
        engine=engine,
        source=origin.source(what),
        date=today(),
        command=origin.command(engine),
        families=families,
        default=small,
        contained=describe_engine(engine).facts.attention_contains if has_attention else (),
    )


def _with_static_scales(families: dict[str, Any]) -> dict[str, Any]:
    """Add FP8 products of pre-quantized input: measured ones include the launches of the quantizing kernels."""
    if "gemm/fp8" not in families or "gemm/bf16" not in families:
        return families
    launch_s = min(families["gemm/bf16"].launch_s, families["gemm/fp8"].launch_s)
    return families | {"gemm/fp8_static": families["gemm/fp8"].model_copy(update={"launch_s": launch_s})}


def _from_profile(path: Path, engine: str) -> Calibration:
    profile = read_layer_profile(path)
    if profile.engine != engine:
        raise SpecError(f"{path}: profiles engine {profile.engine!r}, not {engine!r}")
    device = DeviceFacts.of(profile.hardware)
    families = {group.key: GEMM.fit(group, device) for group in GEMM.groups(profile.gemms, device)}
    attention = attention_groups(read_profiles(path))
    families |= {group.key: fit_attention(group, device) for group in attention}
    small = fit_small_kernels(profile.hardware, profile.small)
    num_rows = len(profile.gemms) + len(profile.small) + sum(len(group.seconds) for group in attention)
    what, families = f"{num_rows:,} kernel times of a layer profile", families | {"elementwise": small}
    return _calibration(LAYER_PROFILE, what, profile.hardware.name, engine, families, small)


# What a model and its shards fix of a table's rows; batches, lengths and tokens vary in a run.
_OF_HEADS = ("num_heads", "num_key_value_heads", "window_size")
_OF_LATENTS = ("model", "num_heads", "tp_size")
_SHAPES = {
    "context_attention": _OF_HEADS,
    "context_mla": _OF_LATENTS[1:],
    "gemm": ("n", "k"),
    "generation_attention": _OF_HEADS,
    "generation_mla": _OF_LATENTS[1:],
    "mla_context_module": _OF_LATENTS,
    "mla_generation_module": _OF_LATENTS,
    "moe": ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "distribution"),
}
_SHAPES_IN_A_LAYER = {"gemm": 4}
_MIN_SHAPES = 5


def fit_kernel_errors(folder: str | Path) -> KernelErrors:
    """Shape share of each family: the mean over kernels with a fit. folder: of kernel tables `<system>/<op>`. Raises
    SpecError without such kernels."""
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for file in table_files(folder):
        if op_of(file) in _SHAPES:
            with understood(file):
                for family, share in _shares(read_table(file)):
                    shares[family].append(share)
    if not shares:
        raise SpecError(f"{folder}: has no table of kernels with a fit and {_MIN_SHAPES} shapes or more.")
    return KernelErrors(common={family: round(float(np.mean(result)), 3) for family, result in sorted(shares.items())})


def _shares(table: KernelTable) -> list[tuple[str, float]]:
    """(family, share) of each fitted kernel of a table with enough shapes."""
    hardware = load_hardware(table.system)
    device, result = DeviceFacts.of(hardware), []
    names = [name for name in _SHAPES[table.op] if name in table.columns]
    for group in MODULES[table.op].groups(table, device):
        fit = load_calibration(hardware, group.engine).families.get(group.key)
        numbered = np.stack([np.unique(table[name][group.rows], return_inverse=True)[1] for name in names])
        shapes = np.asarray(np.unique(numbered, axis=1, return_inverse=True)[1])
        if fit is None or len(np.unique(shapes)) < _MIN_SHAPES:
            continue
        share = common_share(np.log(predict(group, fit, device) / group.seconds), shapes)
        family = group.key.split("/")[0]
        result.append((family, share / _SHAPES_IN_A_LAYER.get(family, 1) ** 0.5))
    return result


def common_share(residuals: Floats, shapes: Column) -> float:
    """Standard deviation of shape effects over that of all residuals, from 0 to 1. residuals: log(predicted / measured)
    of rows; shapes: the index of each row's shape"""
    _, number, counts = np.unique(shapes, return_inverse=True, return_counts=True)
    means = np.bincount(number, residuals) / counts
    within = float(np.sum((residuals - means[number]) ** 2)) / max(1, len(residuals) - len(counts))
    between = max(0.0, float(np.var(means, ddof=1)) - within * float(np.mean(1 / counts)))
    return float((between / (between + within)) ** 0.5) if between else 0.0

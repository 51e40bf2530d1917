"""Calibrates from a folder of kernel tables, `<system>/<op>`, or of one card's layer profile (`layer_profile`).

Residuals of kernel tables split into shapes, few per model, and sizes within a shape, which a model's steps vary. With
a row's residual the sum of independent shape and size effects (one-way random effects; Searle, Casella and McCulloch,
Variance Components, 1992, chapter 3), the variance of shapes is that of their means minus the sizes' part in a mean. A
layer's four matrix products have four shapes: their mean has half the standard deviation of one."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from perfmodel.cost import load_calibration
from perfmodel.cost.calibrations.calibration import Calibration, formats_of
from perfmodel.cost.calibrations.for_all import KernelErrors
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.fits import Domain
from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.dates import today
from perfmodel.errors import SpecError
from perfmodel.evidence.fit import layer_profile
from perfmodel.evidence.fit.attention import DECODES, LATENT, PROMPTS
from perfmodel.evidence.fit.collectives import COLLECTIVES, EXCHANGES
from perfmodel.evidence.fit.kernels import Floats, Groups, KernelModule, predict, residuals_of
from perfmodel.evidence.fit.modules import ENCODERS, MODULE_TABLES, WHOLE
from perfmodel.evidence.fit.products import GEMM, MOE
from perfmodel.evidence.observation import KERNEL_TABLES, LAYER_PROFILE, Origin, Progress, grouped, reported
from perfmodel.evidence.sources.kernels import (
    Column,
    Group,
    KernelTable,
    op_of,
    read_table,
    table_files,
    understood,
    version_order,
)
from perfmodel.specs import load_hardware
from perfmodel.specs.engine.description import describe_engine
from perfmodel.specs.hardware import HardwareSpec

# Table name -> the kind of its kernels.
MODULES: Mapping[str, KernelModule] = {
    "context_attention": PROMPTS,
    "encoder_attention": ENCODERS,
    "gemm": GEMM,
    "generation_attention": DECODES,
    "moe": MOE,
    **dict.fromkeys(("custom_allreduce", "nccl"), COLLECTIVES),
    **dict.fromkeys(("wideep_deepep_ll", "wideep_deepep_normal"), EXCHANGES),
    **dict.fromkeys(("context_mla", "generation_mla", "mla_context_module", "mla_generation_module"), LATENT),
    **dict.fromkeys(MODULE_TABLES, WHOLE),
}

# Norms, rotations, activations, cache writes of a device whose small kernels were not timed: between those of the two
# cards whose layer profiles were (2.0 and 2.3 us a kernel; activations in L2 at 2.7 and 3.2 times main memory).
GENERIC_SMALL = FamilyFit(overhead_s=2.2e-6, memory_fraction=0.85, knee=1.0, cached_speedup=3.0)

_EVERY_ENGINE = "nccl"  # a library that all engines call
_MAX_ROWS = 1500  # of each kernel, format and version of a table
# Versions whose median error under the fit of a newer one is larger than so many times that one's, and a bit, have
# their own. Of fewer rows nobody can tell.
_WORSE, _MUCH_WORSE, _FEWEST_ROWS = 1.3, 0.03, 20
# Tables whose kernels unmeasured devices are given, rows of each kernel, format and version, and of an architecture.
OF_PRIOR, _PRIOR_ROWS, _EVEN_ROWS = ("gemm", "context_attention", "generation_attention", "moe"), 40, 400


class _Fitted(NamedTuple):
    """A kernel's fit, and the versions of the engine and rows that it is of."""

    key: str
    versions: tuple[str, ...]
    fit: Any
    num_rows: int

    @property
    def kernel_of(self) -> tuple[str, str, Domain | None]:
        """Family, formats and sizes, of which an engine by default runs one kernel."""
        return self.key.split("/")[0], formats_of(self.key), getattr(self.fit, "domain", None)


# Families that serving looks up; modules that were timed whole are predicted as the tables have them, and no more.
_SERVED = {"collective", "collective_eager", "elementwise", "gemm", "moe", "attention_decode", "attention_prefill"}
_SERVED |= {"latent_decode", "latent_prefill", "encoder_attention"}
_KEYED = ("families", "others", "versions")  # fields of a calibration


def calibrate_folder(path: str | Path, engine: str, progress: Progress | None = None) -> list[Calibration]:
    """Calibrations under `engine`, one for all devices of an architecture in `path`. Raises SpecError without
    measurements of that engine."""
    path = Path(path)
    if (path / "ops" / "meta.yaml").is_file():
        return [_from_profile(path, engine)]
    kernels: defaultdict[tuple[str, str, str], list[Group]] = defaultdict(list)  # by architecture, operator and key
    for file in table_files(path):
        if MODULES.get(op_of(file), EXCHANGES) is EXCHANGES:  # whose fit is one of all devices (`fit_deepep`)
            continue
        for group in groups_of(read_table(file).sampled(_MAX_ROWS), file):
            if group.engine in (engine, _EVERY_ENGINE):
                kernels[_architecture(group), op_of(file), group.key].append(group)
    measured = {name for (name, _, _), groups in kernels.items() if any(group.engine == engine for group in groups)}
    if not measured:
        raise SpecError(f"{path}: has no measurements of engine {engine!r}")
    tasks = [(op, groups) for (name, op, _), groups in kernels.items() if name in measured]
    with ProcessPoolExecutor() as pool:
        fitted = list(reported(pool.map(_fit_versions, *zip(*tasks, strict=True)), len(tasks), progress))
    results = []
    for architecture in sorted(measured):
        of_it = [pair for pair in zip(tasks, fitted, strict=True) if _architecture(pair[0][1][0]) == architecture]
        devices = sorted({group.device.hardware.name for (_, groups), _ in of_it for group in groups})
        fits = [fit for _, some in of_it for fit in some]
        what = f"{sum(fit.num_rows for fit in fits):,} kernel times of {len(fits)} kernels on {' and '.join(devices)}"
        named = _named(fits, describe_engine(engine).facts.default_kernels.get(architecture, {}))
        results.append(_calibration(KERNEL_TABLES, what, tuple(devices), engine, named, GENERIC_SMALL))
    return results


def fit_prior(path: Path, progress: Progress | None = None) -> Calibration:
    """Kernels for devices of architectures that nobody has measured: fits to the rows of all architectures in `path`
    together, each with equal weight. Residuals are those of each architecture under a fit to the others. Raises
    SpecError without tables of two architectures."""
    kernels: defaultdict[tuple[str, str], list[Group]] = defaultdict(list)  # by operator and key
    for file in table_files(path):
        for group in groups_of(read_table(file).sampled(_PRIOR_ROWS), file) if op_of(file) in OF_PRIOR else ():
            kernels[op_of(file), formats_of(group.key)].append(group)
    tasks = {name: some for name, some in kernels.items() if len({_architecture(group) for group in some}) > 1}
    if not tasks:
        raise SpecError(f"{path}: has no tables of {', '.join(OF_PRIOR)} of two architectures or more.")
    families: dict[str, Any] = {}
    num_rows = 0
    with ProcessPoolExecutor() as pool:
        results = pool.map(_fit_to_others, (op for op, _ in tasks), tasks.values())
        for (_, key), (fit, rows) in reported(zip(tasks, results, strict=True), len(tasks), progress):
            families[key], num_rows = fit, num_rows + rows
    names = sorted({_architecture(group) for some in tasks.values() for group in some})
    source = KERNEL_TABLES.source(f"{num_rows:,} kernel times on {', '.join(names)}")
    families = dict(sorted(_with_static_scales(families).items()))
    return Calibration(device="any", engine="any", source=source, families=families, default=GENERIC_SMALL)


def _fit_to_others(op: str, groups: Groups) -> tuple[Any, int]:
    """A kernel's fit to all architectures, with residuals of each under a fit to the others; the number of rows."""
    of_each = grouped((_architecture(group), group) for group in groups)
    most = min(max(_FEWEST_ROWS, *(sum(len(group.rows) for group in some) for some in of_each.values())), _EVEN_ROWS)
    even = {name: _thinned(some, most) for name, some in of_each.items()}
    module, errors = MODULES[op], list[Floats]()
    for name, aside in even.items():
        rest = module.fit([group for other, some in even.items() if other != name for group in some])
        errors += (np.log(predict(group, rest) / group.seconds) for group in aside)
    fit = module.fit([group for some in even.values() for group in some])
    residuals = residuals_of(np.exp(np.concatenate(errors)), np.ones(sum(map(len, errors))))
    return fit.model_copy(update={"residuals": residuals}), residuals.num_rows


def _thinned(groups: Groups, most: int) -> Groups:
    """Every k-th row of each group, at most about `most` together."""
    step = max(1, round(sum(len(group.rows) for group in groups) / most))
    thin = [group.take(np.arange(len(group.rows)) % step == 0) for group in groups]
    return [group for group in thin if len(group.rows)]


def _architecture(group: Group) -> str:
    hardware = group.device.hardware
    return hardware.declared.architecture or hardware.name


def groups_of(table: KernelTable, file: Path, hardware: HardwareSpec | None = None) -> list[Group]:
    """The groups of a table with a module. hardware: as if they ran there, else where the table's did. Raises SpecError
    for contents that cannot be understood."""
    with understood(file):
        return MODULES[table.op].groups(table, DeviceFacts.of(hardware or load_hardware(table.system)))


def bare_key(key: str) -> str:
    """The key of an engine's default kernel for the same formats; of attention the kernel's own."""
    family, *rest = key.split("/")
    return f"{family}/{rest[0]}" if family in ("gemm", "moe") and rest else key


def key_of(group: Group, calibration: Calibration) -> str | None:
    """The key of a kernel's fit. Its own of that version, the engine's default if of that version, its own of another
    version, the engine's default, else the one of its family with the most parts in common."""
    fits = calibration.families | calibration.others
    versions = {key: key.rpartition("/")[2] for key in calibration.others if key.rpartition("/")[0] == group.key}
    bare, of_version = bare_key(group.key), [key for key in versions if group.version in versions[key].split(",")]
    newest = sorted(versions, key=lambda key: version_order(versions[key]))[-1:]
    is_default = group.version in calibration.versions.get(bare, "").split(",")
    if is_default or (newest and version_order(group.version) > version_order(versions[newest[0]])):
        newest.insert(0, bare)  # the default kernel is that of the newest version
    for key in (*of_version, group.key, *newest, bare):
        if key in fits:
            return key
    parts = group.key.split("/")

    def in_common(key: str) -> tuple[int, tuple[int, ...]]:
        """Equal parts, then the newer version."""
        own = key.split("/")
        return sum(1 for a, b in zip(parts, own, strict=False) if a == b), version_order(own[-1])

    related = [key for key in fits if key.split("/")[0] == parts[0]]
    return max(related, key=in_common) if related else None


def _fit_versions(op: str, groups: Groups) -> list[_Fitted]:
    """Fits of a kernel to the newest version and those older ones that it describes about as well, then to the newest
    of the rest, and so on."""
    module, rest = MODULES[op], sorted({group.version for group in groups}, key=version_order, reverse=True)
    result = []
    while rest:
        newest, *others = rest
        kept, rest, versions = [group for group in groups if group.version == newest], [], [newest]
        fit = module.fit(kept)
        most = _WORSE * _median_error(kept, fit) + _MUCH_WORSE
        for version in others:
            older = [group for group in groups if group.version == version]
            if sum(len(group.rows) for group in older) < _FEWEST_ROWS or _median_error(older, fit) < most:
                kept, versions = [*kept, *older], [*versions, version]
            else:
                rest.append(version)
        if sum(len(group.rows) for group in kept) < _FEWEST_ROWS:
            continue
        fit = module.fit(kept) if len(versions) > 1 else fit
        result.append(_Fitted(groups[0].key, tuple(versions), fit, sum(len(group.rows) for group in kept)))
    return result


def _median_error(groups: Groups, fit: Any) -> float:
    return float(np.median(np.abs(np.log(np.concatenate([predict(group, fit) / group.seconds for group in groups])))))


def _named(fits: Sequence[_Fitted], preferred: Mapping[str, str] = MappingProxyType({})) -> dict[str, dict[str, Any]]:
    """Fits by their keys in a calibration: of what engines run by default, with its versions, and of the rest.

    Among kernels for the same formats and sizes the default is the one that the newest version was measured with most;
    `preferred`: kernels that engines run by default whatever was measured most, by family and format."""
    by_kernel = grouped((fit.kernel_of, fit) for fit in fits)
    families: dict[str, Any] = {}
    others: dict[str, Any] = {}
    versions: dict[str, str] = {}

    names = {f"{key}/{name}" for key, name in preferred.items()}

    def rank(some: Sequence[_Fitted]) -> tuple[bool, int]:
        return names.isdisjoint(fit.key for fit in some), -max(fit.num_rows for fit in some)

    for (family, _, _), some in sorted(by_kernel.items(), key=lambda item: rank(item[1])):
        newest = max((fit.versions[0] for fit in some), key=version_order)
        first = max((fit for fit in some if fit.versions[0] == newest), key=lambda fit: fit.num_rows)
        bare = bare_key(first.key)
        for fit in some:
            if fit is not first:
                others["/".join((fit.key, ",".join(fit.versions)))] = fit.fit
            elif family in _SERVED:
                key = bare if bare not in families else fit.key
                families[key] = fit.fit
                if not key.endswith(f"/{_EVERY_ENGINE}"):
                    versions[key] = ",".join(fit.versions)
            else:
                others[fit.key] = fit.fit
    families = _with_static_scales(families)
    return {name: dict(sorted(of.items())) for name, of in zip(_KEYED, (families, others, versions), strict=True)}


def _calibration(
    origin: Origin,
    what: str,
    devices: tuple[str, ...],
    engine: str,
    fits: Mapping[str, dict[str, Any]],
    small: FamilyFit,
) -> Calibration:
    has_attention = any(key.startswith("attention_decode/") for key in fits["families"])
    return Calibration(
        device=devices[0],
        devices=devices[1:],
        engine=engine,
        source=origin.source(what),
        date=today(),
        command=origin.command(f"--engine {engine}"),
        default=small,
        contained=describe_engine(engine).facts.attention_contains if has_attention else (),
        **fits,
    )


def _with_static_scales(families: dict[str, Any]) -> dict[str, Any]:
    """Add FP8 and NVFP4 products of quantized input: measured ones include the launches of the quantizing kernels."""
    plain, result = families.get("gemm/bf16"), dict(families)
    for key in ("gemm/fp8", "gemm/nvfp4"):
        if plain is not None and key in families:
            launch_s = min(plain.launch_s, families[key].launch_s)
            result[f"{key}_static"] = families[key].model_copy(update={"launch_s": launch_s})
    return result


def _from_profile(path: Path, engine: str) -> Calibration:
    profile = layer_profile.read_layer_profile(path)
    if profile.engine != engine:
        raise SpecError(f"{path}: profiles engine {profile.engine!r}, not {engine!r}")
    device = DeviceFacts.of(profile.hardware)
    families = {group.key: GEMM.fit([group]) for group in GEMM.groups(profile.gemms, device)}
    attention = layer_profile.attention_groups(layer_profile.read_profiles(path), device)
    families |= {group.key: layer_profile.fit_attention(group) for group in attention}
    small = layer_profile.fit_small_kernels(profile.hardware, profile.small)
    num_rows = len(profile.gemms) + len(profile.small) + sum(len(group.seconds) for group in attention)
    what, families = f"{num_rows:,} kernel times of a layer profile", families | {"elementwise": small}
    return _calibration(LAYER_PROFILE, what, (profile.hardware.name,), engine, {"families": families}, small)


# What a model and its shards fix of a table's rows; batches, lengths and tokens vary in a run.
_OF_HEADS = ("num_heads", "num_key_value_heads", "window_size")
_OF_LATENTS = ("model", "num_heads", "tp_size")
_SHAPES = {
    "gemm": ("n", "k"),
    **dict.fromkeys(("context_attention", "generation_attention"), _OF_HEADS),
    **dict.fromkeys(("context_mla", "generation_mla"), _OF_LATENTS[1:]),
    **dict.fromkeys(("mla_context_module", "mla_generation_module"), _OF_LATENTS),
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
        calibration = load_calibration(hardware, group.engine)
        key = key_of(group, calibration)
        fit = calibration.families[key] if key in (group.key, bare_key(group.key)) else None
        numbered = np.stack([np.unique(table[name][group.rows], return_inverse=True)[1] for name in names])
        shapes = np.asarray(np.unique(numbered, axis=1, return_inverse=True)[1])
        if fit is None or len(np.unique(shapes)) < _MIN_SHAPES:
            continue
        share = common_share(np.log(predict(group, fit) / group.seconds), shapes)
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

"""Calibration files: found by device and engine profile, transferred to unmeasured devices, written with their origin.

A device without measurements takes the fits of the nearest measured one: a sibling of its architecture (other memory or
cooling), else the architecture before or after it in its line. Fits are fractions of declared peaks and times per
kernel, so datasheet differences carry over; intervals widen with transfer distance. Without a relation: whole runs on
its architecture (`whole_runs`), else what the kernels of all measured architectures have in common (`prior.yaml`), on
what is no GPU the datasheet.

Proxies for unmeasured kernels:

collective/dispatch, collective/combine   the exchange of expert parallelism, as published for one device;
..._node, ..._expert                      that of DeepEP's normal and low-latency kernels
attention_sparse                          prompts that attend to chosen keys of 512 elements: as on the nearest
                                          architecture; to latents of 576 (DSA): FlashMLA's 640 TFLOP/s on an H800 SXM5
                                          and 1450 on a B200, 65 % of the dense 16-bit peak of either (its README)."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from perfmodel.cost.calibrations.calibration import Calibration, datasheet, formats_of
from perfmodel.cost.calibrations.for_all import SparseAttentionFits, load_exchange_fits
from perfmodel.cost.calibrations.whole_runs import whole_run_calibration
from perfmodel.cost.kernel_models.attention.decode import with_cache_of
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.fits import Domain
from perfmodel.cost.kernel_models.messages.collective import CollectiveFit, over_link
from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.errors import SpecError
from perfmodel.files.catalog import data_dir
from perfmodel.files.device_tables import DeviceSource
from perfmodel.files.fitted import load_fitted, write_fitted
from perfmodel.specs.architectures import generations_between
from perfmodel.specs.devices import find_device
from perfmodel.specs.engine.description import describe_engine
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.versions import parse_version
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario_file import load_hardware

_ALL_TO_ALL = "all_to_all"
_OTHERS = "others"  # the folder of fits of kernels that engines do not run by default


def with_unmeasured(calibration: Calibration, hardware: HardwareSpec) -> Calibration:
    """`calibration` of a device with proxies for kernels it lacks; unchanged if it has no measured kernel."""
    result: dict[str, Any] = {}
    if calibration.has_family("collective"):
        fit = calibration.fit("collective", _ALL_TO_ALL)
        update = {"beyond": fit} if isinstance(fit, CollectiveFit) else {}
        for name, exchange in load_exchange_fits().by_kernel.items():
            result[f"collective/{name}"] = exchange.model_copy(update=update)
    if calibration.has_family("attention_prefill"):
        latents = FamilyFit(
            domain=Domain(head_dim=576), compute_fraction=0.65, overhead_s=calibration.default.overhead_s
        )
        fits = load_fitted(SparseAttentionFits, data_dir("calibrations") / "sparse_attention.yaml")
        keys = {"hd512": fits.of(hardware, calibration.engine), "hd576": latents}
        result |= {f"attention_sparse/bf16/{size}": fit for size, fit in keys.items()}
    missing = {key: proxy for key, proxy in result.items() if key not in calibration.families}
    return calibration.model_copy(update={"families": calibration.families | missing}) if missing else calibration


EXECUTOR = "perfmodel"  # the profile of this project's own executor
_DEFAULT_PROFILE: str = EngineSpec.model_fields["profile"].default
_ATTENTION = "attention_decode"  # what `contained` goes with
_MIXED = "attention_mixed"  # no kernel that is missing, but another way to run those that are there
# A family and its form, as `save_calibration` writes them; PyYAML puts a question mark before a long key.
_FAMILY = re.compile(r"^  (?:\? )?(\w+).*\n  (?:  |: )form: (\w+)$", re.MULTILINE)
# How much wider an interval is, by where the fits come from.
_SPREAD_OTHER_ENGINE = 1.3
SPREAD_SIBLING = 1.5
_SPREAD_PER_GENERATION = 2.0


def load_calibration(
    hardware: HardwareSpec,
    engine_profile: str = "vllm",
    path: str | Path | None = None,
    without: Callable[[str, str], bool] = lambda device, engine: False,
    version: str | None = None,
) -> Calibration:
    """The calibration for a device under an engine.

    `path` if given, else `<device>@<profile>.yaml`, else the nearest relation's, else whole runs, else the datasheet
    (also for the profile "datasheet"); `origin` and `source` say which. hardware: the device; engine_profile: the
    engine's name; without: (device, engine) of files that are not read, for hold-outs; version: of the engine, for
    kernels and whole runs. Raises SpecError for a malformed file, or a missing one if `path` is given."""
    if path is not None:
        return load_fitted(Calibration, Path(path))
    if engine_profile == "datasheet":
        return datasheet(hardware)
    own = data_dir("calibrations") / f"{hardware.name}@{engine_profile}.yaml"
    related = sorted(_transfer_candidates(hardware, engine_profile, without), key=_transfer_distance)
    if own.is_file() and not without(hardware.name, engine_profile):
        result = _as_declared(_completed(load_fitted(Calibration, own), related, hardware), hardware)
    elif related:
        result = _inherited(hardware, engine_profile, related)
    else:
        return whole_run_calibration(hardware, engine_profile, version=version) or _prior(hardware, engine_profile)
    if version is not None and result.versions and result.engine == engine_profile:
        result = _as_of(result, hardware, version)
    return with_unmeasured(result, hardware)


def _as_of(calibration: Calibration, hardware: HardwareSpec, version: str) -> Calibration:
    """`calibration` with the kernels that its engine ran in `version`: of those for the same formats the ones measured
    in the first version from it on, whose tables are nearer to servers than older ones."""
    asked, kind = parse_version(version)
    named = calibration.versions
    measured = {key: _releases(named[key]) for key in calibration.families if key in named}
    if kind == "nightly" or asked >= max(release for releases in measured.values() for release in releases):
        return calibration
    fits = calibration.families | with_others(calibration, hardware).others
    kernels: dict[str, list[str]] = {}
    for key in measured:
        kernels.setdefault(formats_of(key), []).append(key)
    for key in fits.keys() - calibration.families.keys():
        if formats_of(key) in kernels:
            kernels[formats_of(key)].append(key)
            measured[key] = _releases(key.rpartition("/")[2])
    families = {key: fit for key, fit in calibration.families.items() if key not in measured}
    facts = describe_engine(calibration.engine, version).facts
    as_newest = facts.newest_kernels.get(hardware.declared.architecture or "", ())
    for formats, keys in kernels.items():
        if any(key.startswith(f"{formats}/") for key in as_newest):  # tables leave the default kernel's name out
            families[formats] = next((fits[key] for key in as_newest if key in keys), fits[formats])
            continue
        known = {release for key in keys for release in measured[key]}
        ran = max(known) if formats in as_newest else min((item for item in known if item >= asked), default=max(known))
        by_sizes: dict[Any, list[str]] = {}
        for key in keys:
            if ran in measured[key]:
                by_sizes.setdefault(getattr(fits[key], "domain", None), []).append(key)
        for some in by_sizes.values():  # as in the newest version: the one that was measured with most
            key = max(some, key=lambda key: (key in calibration.families, fits[key].residuals.num_rows))
            families[key] = fits[key]
    return calibration.model_copy(update={"families": families})


def _releases(versions: str) -> list[tuple[int, ...]]:
    return [parse_version(version)[0] for version in versions.split(",")]


def _prior(hardware: HardwareSpec, engine: str) -> Calibration:
    """What kernels of all measured architectures have in common, for a GPU without a relation; else the datasheet."""
    file = data_dir("calibrations") / "prior.yaml"
    if hardware.kind != "gpu" or not file.is_file():
        return datasheet(hardware)
    prior = load_fitted(Calibration, file)
    source = f"of no related device: {prior.source}"
    contained = describe_engine(engine).facts.attention_contains
    update = {"device": hardware.name, "engine": engine, "source": source, "contained": contained, "is_passed_on": True}
    return prior.model_copy(update=update)


def save_calibration(calibration: Calibration, path: str | Path) -> Path:
    """Write a calibration as YAML that reads back equal; parents are made. Fits of kernels that nobody runs by default
    go to the folder `others` beside it."""
    path = Path(path)
    if calibration.others:
        others = calibration.model_copy(update={"families": calibration.others, "others": {}})
        save_calibration(others, path.parent / _OTHERS / path.name)
    data = calibration.model_dump(mode="json", exclude_defaults=True)
    for key, fit in calibration.families.items():
        data["families"][key] = {"form": fit.form} | data["families"][key]  # a default, but the reader goes by it
    data = {"device": calibration.device, "engine": calibration.engine, "origin": calibration.origin} | data
    return write_fitted(data, path)


def with_others(calibration: Calibration, hardware: HardwareSpec) -> Calibration:
    """`calibration` of a device with the fits of kernels that its engine does not run by default, where there are."""
    for device, engine, file in calibrated_kernels(calibration.engine):
        source, others = _listed(device), file.parent / _OTHERS / file.name
        is_alike = source.declared.architecture == hardware.declared.architecture
        if engine == calibration.engine and is_alike and others.is_file():
            return calibration.model_copy(update={"others": _passed_on(others, hardware).families})
    return calibration


def _listed(device: str) -> HardwareSpec:
    """The device as in its file. Raises SpecError without one."""
    source = find_device(device)
    return _loaded(source, source.file.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _loaded(source: DeviceSource, _written_at: int) -> HardwareSpec:
    return load_hardware(source.file if source.row is None and source.slice is None else source.name)


def _as_declared(own: Calibration, hardware: HardwareSpec) -> Calibration:
    """`own`, with a note in its source if the device's facts differ from its file's; the fits are the device's own."""
    try:
        listed = _listed(hardware.name)
    except SpecError:
        return own
    if listed.declared == hardware.declared:
        return own
    return own.model_copy(update={"source": f"of {own.device} as its file declares it: {own.source}"})


def measured_device(hardware: HardwareSpec, engine_profile: str) -> str | None:
    """The measured device behind most of a device's calibration: itself or its nearest relation; None without one."""
    if (data_dir("calibrations") / f"{hardware.name}@{engine_profile}.yaml").is_file():
        return hardware.name
    nearest = min(_transfer_candidates(hardware, engine_profile), key=_transfer_distance, default=None)
    if nearest is None:
        return None
    fitted = load_fitted(Calibration, nearest[1])
    return hardware.name if hardware.name in fitted.devices else fitted.device


def _completed(own: Calibration, related: Iterable[tuple[float, Path]], hardware: HardwareSpec) -> Calibration:
    """`own`, with kinds of kernel that only relations have measured, from the first one that has them: TensorRT-LLM's
    H100 tables lack latent attention, vLLM's have it. Files that add nothing are not parsed."""
    for _, file in related:
        measured = {(key.split("/")[0], fit.form) for key, fit in own.families.items()}
        missing = _kinds_in(file, file.stat().st_mtime_ns) - measured
        if has_attention := own.has_family(_ATTENTION):
            missing = {kind for kind in missing if kind[0] != _MIXED}
        if missing:
            other = _passed_on(file, hardware)
            added = {key: fit for key, fit in other.families.items() if (key.split("/")[0], fit.form) in missing}
            contained = own.contained if has_attention else other.contained
            own = own.model_copy(update={"families": own.families | added, "contained": contained})
    return own


@lru_cache(maxsize=64)
def _kinds_in(file: Path, _written_at: int) -> set[tuple[str, str]]:
    """(family, form) of the fits in a calibration file, without parsing it."""
    return set(_FAMILY.findall(file.read_text(encoding="utf-8")))


def _inherited(hardware: HardwareSpec, engine: str, related: list[tuple[float, Path]]) -> Calibration:
    """The nearest relation's fits, spread widened."""
    (spread, nearest), *others = related
    completed = _completed(_passed_on(nearest, hardware), others, hardware)
    if hardware.name in completed.devices and completed.engine == engine:
        siblings = tuple(name for name in (completed.device, *completed.devices) if name != hardware.name)
        return completed.model_copy(update={"device": hardware.name, "devices": siblings})
    source = f"passed on from {completed.device} under {completed.engine}: {completed.source}"
    passed_on = {"device": hardware.name, "source": source, "spread": completed.spread * spread, "is_passed_on": True}
    return completed.model_copy(update=passed_on)


def _transfer_distance(relation: tuple[float, Path]) -> tuple[float, bool, str]:
    spread, file = relation
    return spread, not file.stem.endswith(f"@{_DEFAULT_PROFILE}"), file.name


def _passed_on(file: Path, hardware: HardwareSpec) -> Calibration:
    fitted = load_fitted(Calibration, file)
    device = _listed(fitted.device)
    families = dict(fitted.families)
    if device.declared.architecture == hardware.declared.architecture:
        its, own = DeviceFacts.of(device), DeviceFacts.of(hardware)
        families = {key: with_cache_of(fit, its, own) for key, fit in families.items()}
    source, target = device.scale_up_link, hardware.scale_up_link
    if source is not None and target is not None:
        families = {key: over_link(fit, source, target) for key, fit in families.items()}
    return fitted.model_copy(update={"families": families})


def calibrated_kernels(engine: str = "") -> Iterator[tuple[str, str, Path]]:
    """(device, engine, file) of every calibration of GPU kernels; those of this project's executor, which no other
    engine runs, only if asked for."""
    for file in sorted(data_dir("calibrations").glob("*@*.yaml")):
        device, _, its_engine = file.stem.partition("@")
        is_kernels = device not in ("engine", "backend", "cpu")
        if is_kernels and (its_engine != EXECUTOR or engine == EXECUTOR):
            yield device, its_engine, file


def _transfer_candidates(
    hardware: HardwareSpec, engine: str, without: Callable[[str, str], bool] = lambda device, engine: False
) -> Iterator[tuple[float, Path]]:
    """(spread, file) of calibrations of related devices, and of the device under other engines."""
    for device, other_engine, file in calibrated_kernels(engine):
        if (device, other_engine) == (hardware.name, engine) or without(device, other_engine):
            continue
        steps = generations_between(hardware.declared.architecture, _listed(device).declared.architecture)
        if steps is None:
            continue
        spread = 1.0 if device == hardware.name else SPREAD_SIBLING
        spread *= _SPREAD_PER_GENERATION**steps * (1.0 if other_engine == engine else _SPREAD_OTHER_ENGINE)
        yield spread, file

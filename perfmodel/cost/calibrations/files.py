"""Calibration files: found by device and engine profile, transferred to unmeasured devices, written with their origin.

A device without measurements takes the fits of the nearest measured one: a sibling of its architecture (other memory or
cooling), else the architecture before or after it in its line. Fits are fractions of declared peaks and times per
kernel, so datasheet differences carry over; intervals widen with transfer distance. Without a relation: whole runs on
its architecture (`whole_runs`), else the datasheet.

Proxies for unmeasured kernels:

collective/dispatch, collective/combine   the exchange of expert parallelism, as published for one device
gemm/nvfp4_static, gemm/nvfp4             FP8 with scales known ahead, at the rate of FP4: NVFP4 checkpoints carry
                                          the scale of a tensor, and those of its blocks of 16 are found on the way.
                                          Where nothing before quantizes, one more kernel does; FP8 without known
                                          scales takes two (the largest value first), so that a kernel takes half of
                                          what these start later than FP8 with known scales; no less than any kernel.

moe/nvfp4, moe/w4a8_mxfp4                 block-scaled 4-bit products: the kernels that an engine's description names
                                          in their place (`experts`, `stand_in`), at the rates of FP4 and FP8, with
                                          as many launches as the description counts.

attention_sparse                          prompts that attend to the latents which an indexer keeps (DSA): the kernel of
                                          FlashMLA reaches 640 TFLOP/s on an H800 SXM5 and 1450 on a B200, 65 % of
                                          the dense 16-bit peak of either (deepseek-ai/FlashMLA, README).

Achieved fractions change between architectures: tensor rates double per generation, and software follows years later.
One file per architecture, `hardware_specs/calibrations/generation@<architecture>.yaml`, holds the efficiency relative
to the previous one, fitted by `perfmodel calibrate` to whole serving runs; a device's own kernel tables replace it.
"""

import datetime
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from perfmodel.cost.calibrations.calibration import Calibration, datasheet
from perfmodel.cost.calibrations.for_all import load_exchange_fits
from perfmodel.cost.calibrations.whole_runs import whole_run_calibration
from perfmodel.cost.kernel_models.attention.decode import with_cache_of
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.experts import GroupedExpertsFit
from perfmodel.cost.kernel_models.fits import Domain
from perfmodel.cost.kernel_models.gemm import TiledGemmFit
from perfmodel.cost.kernel_models.messages.collective import CollectiveFit, over_link
from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.errors import SpecError
from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.device_tables import DeviceSource
from perfmodel.files.fitted import load_fitted, write_fitted
from perfmodel.specs.architectures import generations_between, name_in_tables
from perfmodel.specs.devices import find_device
from perfmodel.specs.engine.description import ExpertsRow, describe_engine
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario_file import load_hardware

_ALL_TO_ALL = "all_to_all"
_SPARSE_SHARE = 0.65


def with_unmeasured(
    calibration: Calibration,
    generation: "GenerationFit | None" = None,
    row: ExpertsRow | None = None,
    library: Calibration | None = None,
) -> Calibration:
    """`calibration` with proxies for kernels it lacks; unchanged if it has no measured kernel.

    generation: the device's; row: how the engine runs 4-bit experts, if by proxied kernels; library: has those
    """
    result = _exchanges(calibration) | _nvfp4(calibration, generation) | _experts(row, library) | _sparse(calibration)
    missing = {key: fit for key, fit in result.items() if key not in calibration.families}
    return calibration.model_copy(update={"families": calibration.families | missing}) if missing else calibration


def _exchanges(calibration: Calibration) -> dict[str, Any]:
    if not calibration.has_family("collective"):
        return {}
    fit = calibration.fit("collective", _ALL_TO_ALL)
    update = {"beyond": fit} if isinstance(fit, CollectiveFit) else {}
    fits = load_exchange_fits()
    return {
        "collective/dispatch": fits.dispatch.model_copy(update=update),
        "collective/combine": fits.combine.model_copy(update=update),
    }


def _sparse(calibration: Calibration) -> dict[str, Any]:
    if not calibration.has_family("attention_prefill"):
        return {}
    return {"attention_sparse": FamilyFit(compute_fraction=_SPARSE_SHARE, overhead_s=calibration.default.overhead_s)}


def _nvfp4(calibration: Calibration, generation: "GenerationFit | None") -> dict[str, Any]:
    static, dynamic = (calibration.families.get(f"gemm/{name}") for name in ("fp8_static", "fp8"))
    if not isinstance(static, TiledGemmFit):
        return {}
    later_s = dynamic.launch_s - static.launch_s if isinstance(dynamic, TiledGemmFit) else 0.0
    if generation is not None:
        slower = {
            "memory_fraction": static.memory_fraction * generation.four_bit_memory,
            "launch_s": static.launch_s + generation.four_bit_launch_s,
        }
        static = static.model_copy(update=slower)
    quantizing = static.launch_s + max(later_s / 2, calibration.default.overhead_s)
    return {"gemm/nvfp4_static": static, "gemm/nvfp4": static.model_copy(update={"launch_s": quantizing})}


def _experts(row: ExpertsRow | None, library: Calibration | None) -> dict[str, Any]:
    if row is None or row.stand_in is None or library is None:
        return {}
    fit = library.families.get(row.stand_in.family)
    if not isinstance(fit, GroupedExpertsFit):
        return {}
    launch_s = fit.launch_s * row.num_kernels / row.stand_in.num_kernels
    experts = fit.model_copy(update={"launch_s": launch_s, "domain": Domain()})
    return {f"moe/{_FAMILIES[form]}": experts for form in row.formats if form in _FAMILIES}


_FAMILIES = {"nvfp4": "nvfp4", "mxfp4": "w4a8_mxfp4"}  # number formats as descriptions and as calibrations name them


class GenerationFit(Spec):
    """What is left of the achieved fractions of the generation before.

    compute: of those of the tensor rate; memory: of those of the bandwidth
    four_bit_memory, four_bit_launch_s: of dense products of 4-bit operands: what they leave of the bandwidth of 8-bit
    ones, and seconds that they start later
    """

    architecture: str
    source: str = ""
    date: datetime.date | None = None
    command: str = ""
    compute: float = Field(default=1.0, ge=0.2, le=1.5)
    memory: float = Field(default=1.0, ge=0.5, le=1.5)
    four_bit_memory: float = Field(default=1.0, ge=0.2, le=1.0)
    four_bit_launch_s: float = Field(default=0.0, ge=0.0, le=1e-5)

    def applied_to(self, calibration: Calibration) -> Calibration:
        """A calibration of the previous generation, for a device of this one."""
        families = {key: self._of(fit) for key, fit in calibration.families.items()}
        return calibration.model_copy(update={"families": families, "default": self._of(calibration.default)})

    def _of(self, fit: Any) -> Any:
        left = {"compute_fraction": self.compute, "tensor_fraction": self.compute, "memory_fraction": self.memory}
        values = {name: getattr(fit, name, None) for name in left}
        return fit.model_copy(
            update={name: min(1.0, value * left[name]) for name, value in values.items() if value is not None}
        )


def load_generation(architecture: str | None) -> GenerationFit | None:
    """An architecture's efficiency relative to the one before; None if not fitted."""
    file = data_dir("calibrations") / f"generation@{architecture}.yaml"
    return load_fitted(GenerationFit, file) if architecture is not None and file.is_file() else None


EXECUTOR = "perfmodel"  # the profile of this project's own executor
_DEFAULT_PROFILE: str = EngineSpec.model_fields["profile"].default
_ATTENTION = "attention_decode"  # what `contained` goes with
_MIXED = "attention_mixed"  # no kernel that is missing, but another way to run those that are there
# How much wider an interval is, by where the fits come from.
_SPREAD_OTHER_ENGINE = 1.3
SPREAD_SIBLING = 1.5
_SPREAD_PER_GENERATION = 2.0


def load_calibration(
    hardware: HardwareSpec,
    engine_profile: str = "vllm",
    path: str | Path | None = None,
    generation: GenerationFit | None = None,
    version: str | None = None,
) -> Calibration:
    """The calibration for a device under an engine.

    `path` if given, else `<device>@<profile>.yaml`, else the nearest relation's, else whole runs, else the datasheet
    (also for the profile "datasheet"); `origin` and `source` say which. hardware: the device; engine_profile: the
    engine's name; generation: replaces the fit of its architecture; version: of the engine, for whole runs. Raises
    SpecError for a malformed file, or a missing one if `path` is given.
    """
    if path is not None:
        return load_fitted(Calibration, Path(path))
    if engine_profile == "datasheet":
        return datasheet(hardware)
    own = data_dir("calibrations") / f"{hardware.name}@{engine_profile}.yaml"
    if generation is None or generation.architecture != hardware.declared.architecture:
        generation = load_generation(hardware.declared.architecture)
    inherited = _inherited(hardware, engine_profile, generation)
    row = _proxy_for(engine_profile, hardware)
    library = None
    if row is not None and row.stand_in is not None:
        library = _inherited(hardware, row.stand_in.engine, generation)
    if own.is_file():
        return with_unmeasured(
            _as_declared(_completed(load_fitted(Calibration, own), inherited), hardware), generation, row, library
        )
    if inherited is None:
        return whole_run_calibration(hardware, engine_profile, version=version) or datasheet(hardware)
    return with_unmeasured(inherited, generation, row, library)


def _proxy_for(engine_profile: str, hardware: HardwareSpec) -> ExpertsRow | None:
    """How the engine runs experts on proxied kernels, if it does."""
    rows = describe_engine(engine_profile).facts.experts
    generation = name_in_tables(hardware.declared.architecture, {name for row in rows for name in row.on})
    return next((row for row in rows if row.stand_in is not None and generation in row.on), None)


def save_calibration(calibration: Calibration, path: str | Path) -> Path:
    """Write a calibration as YAML that reads back equal; parents are made."""
    data = calibration.model_dump(mode="json", exclude_defaults=True)
    for key, fit in calibration.families.items():
        data["families"][key] = {"form": fit.form} | data["families"][key]  # a default, but the reader goes by it
    data = {"device": calibration.device, "engine": calibration.engine, "origin": calibration.origin} | data
    return write_fitted(data, Path(path))


def _listed(device: str) -> HardwareSpec:
    """The device as in its file. Raises SpecError without one."""
    source = find_device(device)
    return _loaded(source, source.file.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _loaded(source: DeviceSource, _written_at: int) -> HardwareSpec:
    return load_hardware(source.file if source.row is None else source.name)


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
    """The measured device behind most of a device's calibration: itself or its nearest relation; None without one.
    Reads no calibration.
    """
    if (data_dir("calibrations") / f"{hardware.name}@{engine_profile}.yaml").is_file():
        return hardware.name
    nearest = min(_transfer_candidates(hardware, engine_profile), key=_transfer_distance, default=None)
    return None if nearest is None else nearest[1].stem.partition("@")[0]


def _completed(own: Calibration, inherited: Calibration | None) -> Calibration:
    """`own`, with families that only a relation has measured: fits of another form."""
    if inherited is None:
        return own
    measured = {(key.split("/")[0], fit.form) for key, fit in own.families.items()}
    if own.has_family(_ATTENTION):
        measured |= {(_MIXED, fit.form) for fit in inherited.families.values()}
    others = {key: fit for key, fit in inherited.families.items() if (key.split("/")[0], fit.form) not in measured}
    contained = own.contained if own.has_family(_ATTENTION) else inherited.contained
    return own.model_copy(update={"families": own.families | others, "contained": contained}) if others else own


def _inherited(hardware: HardwareSpec, engine: str, generation: GenerationFit | None) -> Calibration | None:
    """The nearest relation's fits, spread widened; None without a relation.

    Missing kinds of kernel come from the next one: TensorRT-LLM's H100 tables lack latent attention, vLLM's have it.
    """
    candidates = sorted(_transfer_candidates(hardware, engine), key=_transfer_distance)
    if not candidates:
        return None
    (spread, nearest), *others = candidates
    completed = _passed_on(nearest, hardware, generation)
    for _, file in others:
        completed = _completed(completed, _passed_on(file, hardware, generation))
    source = f"passed on from {completed.device} under {completed.engine}: {completed.source}"
    passed_on = {"device": hardware.name, "source": source, "spread": completed.spread * spread, "is_passed_on": True}
    return completed.model_copy(update=passed_on)


def _transfer_distance(relation: tuple[float, Path]) -> tuple[float, bool, str]:
    spread, file = relation
    return spread, not file.stem.endswith(f"@{_DEFAULT_PROFILE}"), file.name


def _passed_on(file: Path, hardware: HardwareSpec, generation: GenerationFit | None) -> Calibration:
    fitted = load_fitted(Calibration, file)
    device = _listed(fitted.device)
    if generation is not None and device.declared.architecture != generation.architecture:
        fitted = generation.applied_to(fitted)
    families = dict(fitted.families)
    if device.declared.architecture == hardware.declared.architecture:
        its, own = DeviceFacts.of(device), DeviceFacts.of(hardware)
        families = {key: with_cache_of(fit, its, own) for key, fit in families.items()}
    source, target = device.scale_up_link, hardware.scale_up_link
    if source is not None and target is not None and source.name != target.name:
        families = {key: over_link(fit, source, target) for key, fit in families.items()}
    return fitted.model_copy(update={"families": families})


def calibrated_kernels(engine: str = "") -> Iterator[tuple[str, str, Path]]:
    """(device, engine, file) of every calibration of GPU kernels; those of this project's executor, which no other
    engine runs, only if asked for.
    """
    for file in sorted(data_dir("calibrations").glob("*@*.yaml")):
        device, _, its_engine = file.stem.partition("@")
        is_kernels = device not in ("engine", "generation", "backend", "cpu")
        if is_kernels and (its_engine != EXECUTOR or engine == EXECUTOR):
            yield device, its_engine, file


def _transfer_candidates(hardware: HardwareSpec, engine: str) -> Iterator[tuple[float, Path]]:
    """(spread, file) of calibrations of related devices, and of the device under other engines."""
    for device, other_engine, file in calibrated_kernels(engine):
        if (device, other_engine) == (hardware.name, engine):
            continue
        steps = generations_between(hardware.declared.architecture, _listed(device).declared.architecture)
        if steps is None:
            continue
        spread = 1.0 if device == hardware.name else SPREAD_SIBLING
        spread *= _SPREAD_PER_GENERATION**steps * (1.0 if other_engine == engine else _SPREAD_OTHER_ENGINE)
        yield spread, file

"""Fits of single-machine engines' backends, and the calibration that they give any device.

One file per engine, `hardware_specs/calibrations/backend@<engine>.yaml`, written by `perfmodel calibrate --from`. A
backend has a few numbers; each device generation and older version has factors on them, shrunk to 1 where data are few.
An unmeasured generation has the backend's numbers, an unmeasured backend those of `like`. Devices and models differ
only by declared figures.

    launch_s            of a kernel; on a CPU launch_s + unit_launch_s * cores: threads meet after each
    power               a core is held back where its share of the TDP is below `core_w` watts: clocks, and with them
                        core bandwidth, are divided by (1 + (core_w cores / TDP)**2) ** (power / 2); 0: no effect
    small_cores         threads have equal shares and wait for the slowest: clocks are divided by it on CPUs with
                        small cores
    cycles              clocks of one compute unit for one weight of a format (`perfmodel.cost.kernel_models.blocks`)"""

import datetime
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from perfmodel.cost.calibrations.calibration import Calibration, datasheet
from perfmodel.cost.calibrations.files import load_calibration
from perfmodel.cost.kernel_models.blocks import BlockMatmulFit, BlockStreamFit, OnHostFit
from perfmodel.cost.kernel_models.device import peak_flops_per_s
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.files.base import Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import load_fitted
from perfmodel.files.units import FittedSeconds, NonNegativeFloat, PositiveFloat
from perfmodel.models.number_formats import GROUPED_FORMATS
from perfmodel.models.weights.gguf import GGML_BLOCKS
from perfmodel.ops.graphs.layers import host_family
from perfmodel.specs.engine.description import BackendFacts, backend_of
from perfmodel.specs.engine.reading import device_file
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.versions import parse_version
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario_file import load_hardware

_WEIGHT_FORMATS = (*(name for name, elements, _ in GGML_BLOCKS.values() if elements > 1), *GROUPED_FORMATS)
_DEFAULT_TDP_W = 65.0  # of a CPU whose file has none: Intel's and AMD's class for desktops
_SPREAD_UNSEEN = 1.3  # of intervals, where a generation or a backend was not measured


class Factors(Spec):
    """What a generation or a version has times the backend's numbers.

    launch: seconds; memory: the share of the bandwidth; cycles: of a weight; compute, float_compute, attention: rates
    of products with weights in blocks, with weights in 16 bits, and of attention"""

    launch: PositiveFloat = 1.0
    memory: PositiveFloat = 1.0
    cycles: PositiveFloat = 1.0
    compute: PositiveFloat = 1.0
    float_compute: PositiveFloat = 1.0
    attention: PositiveFloat = 1.0


class BackendFit(Spec):
    """Numbers of one backend; see `perfmodel.cost.kernel_models.blocks` for those of its kernels.

    cycles: by format of the weights ("float": 16 bits); `other_cycles` for those that were not measured
    attention_fraction, kv_fraction: of the rate of products and of the bandwidth for cached tokens, in flash attention;
        score_fraction, score_kv_fraction: the same where scores lie in memory
    expert_memory, expert_compute: times what is reached with dense layers
    by_generation: factors by the device's `architecture`, or its instructions on a CPU (`generation_of`)
    by_version: factors of versions up to the one named and beyond the one before; newer ones have the numbers
                themselves, which are of the newest that was measured
    decode_residuals, prompt_residuals: log(measured / predicted seconds) of devices that were left out of the fit"""

    launch_s: FittedSeconds
    unit_launch_s: FittedSeconds = 0.0
    memory_fraction: float = Field(gt=0, le=2)
    cycles: dict[str, PositiveFloat]
    other_cycles: PositiveFloat
    row_share: NonNegativeFloat
    vector_knee: float = Field(ge=1)
    compute_fraction: PositiveFloat
    float_compute_fraction: PositiveFloat
    tile: PositiveFloat
    half_rows: PositiveFloat
    knee: float = Field(ge=1)
    expert_memory: PositiveFloat
    expert_compute: PositiveFloat
    attention_fraction: PositiveFloat
    kv_fraction: float = Field(gt=0, le=2)
    score_fraction: PositiveFloat
    score_kv_fraction: float = Field(gt=0, le=2)
    core_w: PositiveFloat = 1.0
    power: NonNegativeFloat = 0.0
    small_cores: PositiveFloat = 1.0
    by_generation: dict[str, Factors] = Field(default_factory=dict)
    by_version: dict[str, Factors] = Field(default_factory=dict)
    decode_residuals: Residuals = Residuals()
    prompt_residuals: Residuals = Residuals()


class BackendFits(Spec):
    """A file: the backends of one engine. like: the one that stands for those that are missing"""

    engine: str
    source: str
    date: datetime.date
    command: str
    like: str
    backends: dict[str, BackendFit]


def load_backends(engine: str) -> BackendFits | None:
    """The fits of an engine's backends; None without any. Raises SpecError for a malformed file."""
    file = data_dir("calibrations") / f"backend@{engine}.yaml"
    return load_fitted(BackendFits, file) if file.is_file() else None


def generation_of(hardware: HardwareSpec) -> str:
    """A GPU's architecture, with cards that lack its matrix units (GeForce GTX 16) apart; a CPU's widest instruction
    set, as one binary serves all that have it. "" if unknown."""
    declared = hardware.declared
    if hardware.kind != "cpu":
        has_half = "dp4a" in declared.instructions and "matrix" not in declared.instructions
        return f"{declared.architecture or ''}{_WITHOUT_MATRIX if has_half else ''}"
    return next((item for item in _WIDEST_FIRST if item in declared.instructions), "")


_WITHOUT_MATRIX = "-vector"
_WIDEST_FIRST = ("amx", "sme", "apple_amx", "avx512", "avx2", "avx", "sse4", "i8mm", "dotprod", "neon", "rvv")


def product_rates(facts: BackendFacts, hardware: HardwareSpec) -> tuple[str, str]:
    """Peak rates for weights in blocks, and in 16 bits. Where 16 bits are slower than 32 (GeForce GTX 10), libraries
    multiply in 32."""
    float_rate = max((facts.float_rate, "fp32"), key=lambda rate: peak_flops_per_s(hardware, rate))
    return facts.rate, float_rate


def has_small_cores(hardware: HardwareSpec) -> bool:
    """Whether a CPU has two kinds of core."""
    large = hardware.declared.performance_cores
    return hardware.kind == "cpu" and large is not None and large < hardware.declared.compute_units


def power_factor(core_w: Any, power: Any, cores: Any, tdp_w: Any) -> Any:
    """Slow-down of a CPU's clock by its TDP; numbers or columns. See the module.

    core_w: watts of a core at full clock; power: exponent; cores: of the CPU; tdp_w: its watts"""
    return (1.0 + (core_w * cores / tdp_w) ** 2) ** (power / 2)


def backend_calibration(hardware: HardwareSpec, engine: EngineSpec, fits: BackendFits | None = None) -> Calibration:
    """The calibration of `hardware` under an engine with backends; the datasheet's without fits.

    fits: instead of the engine's file. Raises SpecError for a backend that the engine lacks, or lacks on the device."""
    described = engine.described
    facts = described.facts
    name = backend_of(engine.backend, facts.backends, hardware)
    fits = fits or load_backends(described.description.name)
    if fits is None:
        return datasheet(hardware)
    fit = fits.backends.get(name) or fits.backends[fits.like]
    generation = generation_of(hardware)
    is_seen = name in fits.backends and (generation in fit.by_generation or not fit.by_generation)
    families = _families(fit, hardware, engine, product_rates(facts.backends[name], hardware))
    if engine.cpu is not None:
        families |= _on_host(families, hardware, engine, fits)
    return Calibration(
        device=hardware.name,
        engine=described.description.name,
        source=fits.source,
        date=fits.date,
        command=fits.command,
        families=families,
        default=FamilyFit(overhead_s=families["elementwise"].launch_s),
        step_residuals=fit.decode_residuals,
        prompt_residuals=fit.prompt_residuals,
        spread=1.0 if is_seen else _SPREAD_UNSEEN,
    )


def _on_host(
    families: Mapping[str, Any], hardware: HardwareSpec, engine: EngineSpec, fits: BackendFits
) -> dict[str, Any]:
    cpu = load_hardware(engine.cpu or "")
    alone = engine.model_copy(update={"backend": None, "n_gpu_layers": None, "cpu": None})
    there = backend_calibration(cpu, alone, fits).families
    link = hardware.link("pcie") or hardware.scale_up_link
    bandwidth = link.bandwidth_bytes_per_s if link is not None else hardware.memory_bandwidth  # one memory for both
    limit = engine.described.facts.offloads_from_tokens
    return {
        host_family(key): OnHostFit(
            host=cpu, on_cpu=there[key], on_device=fit, link_bytes_per_s=bandwidth, from_tokens=limit
        )
        for key, fit in families.items()
    }


def engine_calibration(hardware: HardwareSpec, engine: EngineSpec) -> Calibration:
    """Kernel fits of an engine on a device: those of the user's server profile, tables of the device or a related one,
    or the backend's fits.

    Raises SpecError for a malformed file, and for a backend that the engine lacks on the device."""
    if engine.described.facts.backends:
        return backend_calibration(hardware, engine)
    if engine.calibration is not None and (own := device_file(engine.calibration, hardware.name)).is_file():
        return load_calibration(hardware, engine.profile, own)
    return load_calibration(hardware, engine.profile, version=engine.version)


def _of_version(by_version: Mapping[str, Factors], version: str) -> Factors:
    if not version:
        return Factors()
    number = parse_version(version)[0]
    later = [(parse_version(text)[0], factors) for text, factors in by_version.items()]
    return min((item for item in later if item[0] >= number), key=lambda item: item[0], default=((), Factors()))[1]


def _families(fit: BackendFit, hardware: HardwareSpec, engine: EngineSpec, rates: tuple[str, str]) -> dict[str, Any]:
    """Fits of all operator families on one device under one version; rates: as of `product_rates`.

    Bandwidth is capped at the declared one: owners' memory may be faster than a CPU's specification, and the fits are
    to theirs."""
    own = fit.by_generation.get(generation_of(hardware), Factors())
    old = _of_version(fit.by_version, engine.described.version.described)
    cores, tdp_w = hardware.declared.compute_units, hardware.declared.tdp_w or _DEFAULT_TDP_W
    slower = power_factor(fit.core_w, fit.power, cores, tdp_w) if hardware.kind == "cpu" else 1.0
    computing = slower * (fit.small_cores if has_small_cores(hardware) else 1.0)
    launch_s = (fit.launch_s + fit.unit_launch_s * cores) * own.launch * old.launch
    reached = fit.memory_fraction * own.memory * old.memory / slower
    is_flash, size = engine.attention == "flash", engine.ubatch_size
    kv = fit.kv_fraction if is_flash else fit.score_kv_fraction
    attention = fit.attention_fraction if is_flash else fit.score_fraction
    blocks = fit.compute_fraction * own.compute * old.compute / computing
    floats = fit.float_compute_fraction * own.compute * old.float_compute / computing

    def matmul(rate: str, compute: float, form: str, is_experts: bool) -> BlockMatmulFit:
        return BlockMatmulFit(
            rate=rate,
            launch_s=launch_s,
            memory_fraction=min(1.0, reached * (fit.expert_memory if is_experts else 1.0)),
            weight_cycles=fit.cycles.get(form, fit.other_cycles) * (computing * own.cycles),
            compute_fraction=compute * (fit.expert_compute if is_experts else 1.0),
            micro_batch=size,
            **{name: getattr(fit, name) for name in ("row_share", "vector_knee", "tile", "half_rows", "knee")},
        )

    families: dict[str, Any] = {}
    for family, is_experts in (("gemm", False), ("moe", True)):
        families[family] = matmul(rates[1], floats, "float", is_experts)
        families |= {f"{family}/{form}_wo": matmul(rates[0], blocks, form, is_experts) for form in _WEIGHT_FORMATS}
    stream = BlockStreamFit(
        rate=rates[1],
        launch_s=launch_s,
        memory_fraction=min(1.0, reached),
        kv_fraction=min(1.0, kv * own.memory * old.memory / slower),
        compute_fraction=attention * own.compute * old.attention / computing,
        micro_batch=size,
    )
    families |= dict.fromkeys(("attention_prefill", "attention_decode"), stream)
    streamed = stream.model_copy(update={"rate": "vector", "compute_fraction": 1.0, "micro_batch": 0})
    return families | dict.fromkeys(("elementwise", "embedding", "scan", "sampling"), streamed)

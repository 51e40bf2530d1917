"""Number formats in which each part of a served model is stored, read and multiplied."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from perfmodel.errors import SpecError
from perfmodel.models.architecture import CompressedAttention, GatedDeltaNet, LatentAttention, Mamba, QuantizationSpec
from perfmodel.models.layer_formats import with_layer_formats
from perfmodel.models.number_formats import (
    BITS_PER_WEIGHT,
    bytes_per_weight,
    component_bytes,
    format_of_dtype,
    kv_format,
    matmul_rate,
    with_dtype,
    with_eviction,
    with_quantization,
)
from perfmodel.models.params import SPARSE_COMPONENTS, sparse_bytes
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.engine.formats import form_of, format_use
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec

MMA_SYNC_RATE = "@mma_sync"  # behind the name of a rate: by the instructions that came before WGMMA
STATIC_SCALES = "_static"  # ends the name of a format whose inputs come quantized
SPARSE_RATE = "@2:4"  # behind the name of a rate: at `sparsity_speedup` times that, FLOPs counted as if dense

_KV_GROUP = 32  # elements of a scale below 8 bits unless the scenario says more (KIVI's group)


class LinearFormat(NamedTuple):
    """How a linear layer is stored and multiplied.

    rate:            the peak rate that multiplies
    weight_bytes:    per weight, scales included
    input_bytes:     per input element as the multiplication reads it
    output_bytes:    per output element, and per input element before quantization
    outlier_share: of the input columns, multiplied apart at `outlier_rate`
    quantizes_input: a kernel quantizes the activations first (dynamic fp8, int8, fp4)
    name:            of the number format, where the rate leaves open which kernels run ("fp8_block", "int4_wo")"""

    rate: str
    weight_bytes: float
    input_bytes: float
    output_bytes: float
    quantizes_input: bool = False
    name: str = ""
    outlier_share: float = 0.0
    outlier_rate: str = ""


def served_model(model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec | None = None) -> ModelSpec:
    """The model in the engine's formats: `dtype`, `quantization`, `kv_cache_dtype` and `mamba_ssm_cache_dtype` applied.
    On `hardware` for which the engine has only weight-only kernels, the model's dtype multiplies.

    Raises SpecError for an unknown name, with the nearest known ones."""
    served = with_quantization(with_dtype(model, engine.dtype), engine.quantization, engine.quantization_group_size)
    served = with_layer_formats(served, engine.quantization_by_layer)
    if engine.float32_matmul_precision == "high" and served.dtype == "fp32":
        served = replace(served, dtype_rate="tf32")
    if engine.allow_fp16_accumulation and served.dtype == "fp16":
        served = replace(served, dtype_rate="fp16_acc16")
    if engine.described.facts.quantizes_before:
        served = _each_format(served, _static)
    if hardware is not None:
        served = _each_format(served, partial(_multiplied, engine, hardware))
    if engine.kv_cache_dtype != "auto" or engine.kv_tiers:
        served = replace(served, quantization=_with_kv_formats(served, engine))
    if engine.mamba_ssm_cache_dtype != "auto":
        served = _with_state_format(served, format_of_dtype(engine.mamba_ssm_cache_dtype))
    elif engine.described.facts.states_in_model_dtype:
        served = _with_state_format(served, served.dtype, where_unnamed=True)
    if engine.kv_eviction is not None:
        served = with_eviction(served, engine.kv_eviction.num_tokens, engine.kv_eviction.recent_tokens)
    return model if served == model else served


def _with_state_format(model: ModelSpec, form: str, where_unnamed: bool = False) -> ModelSpec:
    """Set the recurrent state format of all layers, or only of those that name none."""
    layers = (
        (replace(layer, mixer=replace(layer.mixer, state_format=form)), count)
        if isinstance(layer.mixer, GatedDeltaNet if where_unnamed else Mamba | GatedDeltaNet)
        and not (where_unnamed and getattr(layer.mixer, "names_state_format", True))
        else (layer, count)
        for layer, count in model.layers
    )
    return replace(model, layers=tuple(layers))


def _with_kv_formats(model: ModelSpec, engine: EngineSpec) -> QuantizationSpec:
    """KV formats by token age; a residual window is a tier in the model's dtype."""
    if engine.kv_tiers:
        tiers = [(tier.tokens or 0, _kv_format(tier.dtype, model)) for tier in engine.kv_tiers]
    else:
        tiers = [(0, _kv_format(engine.kv_cache_dtype, model))]
        if engine.kv_cache_residual_tokens:
            tiers.insert(0, (engine.kv_cache_residual_tokens, model.dtype))
    oldest = tiers.pop()[1]
    group_size = engine.kv_cache_group_size
    if group_size is None:
        group_size = _KV_GROUP if any(BITS_PER_WEIGHT[form] < 8 for form in (oldest, *(f for _, f in tiers))) else 0
    has_latents = any(isinstance(layer.mixer, LatentAttention | CompressedAttention) for layer, _ in model.layers)
    if has_latents and (tiers or BITS_PER_WEIGHT[oldest] < 8):
        what = "of several precisions" if tiers else f"in {oldest}"
        raise SpecError(
            f"engine: got a KV cache {what} with {model.name}, whose latents are multiplied as they lie there; "
            f"expected kv_cache_dtype auto, fp8 or int8."
        )
    return replace(model.quantization, kv_cache=oldest, kv_group_size=group_size, kv_recent=tuple(tiers))


def _kv_format(name: str, model: ModelSpec) -> str:
    return (model.quantization.kv_cache or model.dtype) if name == "auto" else kv_format(name)


def on_device(model: ModelSpec, hardware: HardwareSpec) -> ModelSpec:
    """The model as a device stores and multiplies it: 2:4 sparsity as dense where no unit skips zeros; FP8 KV on a CPU
    needs conversion instructions, which calibrations of GPU attention kernels include."""
    if hardware.kind == "cpu":
        model = replace(model, converts_fp8=True)
    sparsity = model.weight_sparsity
    if sparsity is None or not sparsity.is_2_4 or hardware.declared.sparsity_speedup > 1.0:
        return model
    return replace(model, weight_sparsity=None)


def linear_format(model: ModelSpec, component: str, own: QuantizationSpec | None = None) -> LinearFormat:
    """The format of a component's linear layers (a name in `COMPONENTS`), or of those with a format of their `own`.

    Sparse weights store their indices; 2:4 ones multiply at the sparse rate ("bf16@2:4"). Weight-only formats multiply
    at the model's dtype, activation-quantized ones at the activations' rate. Calibrations contain the cost of
    dequantizing."""
    form = _dense_format(model, component, own or model.quantization)
    sparsity = model.weight_sparsity
    if sparsity is None or component not in SPARSE_COMPONENTS:
        return form
    rate = form.rate + SPARSE_RATE if sparsity.is_2_4 else form.rate
    return form._replace(rate=rate, weight_bytes=sparse_bytes(model, component, form.weight_bytes))


def _dense_format(model: ModelSpec, component: str, quantization: QuantizationSpec) -> LinearFormat:
    dtype_bytes = bytes_per_weight(model.dtype)
    rate = model.dtype_rate or model.dtype
    if quantization.weights is None or component in quantization.kept:
        return LinearFormat(rate, dtype_bytes, dtype_bytes, dtype_bytes)
    weight = component_bytes(quantization, component)
    activations = quantization.activations
    if activations is None or activations == model.dtype or quantization.is_weight_only:
        return LinearFormat(rate, weight, dtype_bytes, dtype_bytes, name=f"{quantization.weights}_wo")
    rate, name = matmul_rate(activations), _kernel_format(quantization.weights, activations, quantization.group_size)
    if quantization.inputs_come_quantized:
        return LinearFormat(rate, weight, bytes_per_weight(activations), dtype_bytes, False, f"{name}{STATIC_SCALES}")
    return LinearFormat(
        rate,
        weight,
        bytes_per_weight(activations),
        dtype_bytes,
        quantizes_input=True,
        name="" if name == rate else name,
        outlier_share=quantization.outlier_share,
        outlier_rate=model.dtype if quantization.outlier_share else "",
    )


def _each_format(model: ModelSpec, change: Callable[[QuantizationSpec], QuantizationSpec]) -> ModelSpec:
    own = change(model.quantization)
    layers = tuple((replace(x, formats=tuple((n, change(f)) for n, f in x.formats)), i) for x, i in model.layers)
    is_same = own is model.quantization and layers == model.layers
    return model if is_same else replace(model, quantization=own, layers=layers)


def _multiplied(engine: EngineSpec, hardware: HardwareSpec, quantization: QuantizationSpec) -> QuantizationSpec:
    """How `engine` multiplies on `hardware`; with MXFP4 units, weight-only checkpoints use MXFP8 (OCP MX 1.0)."""
    form = form_of(quantization)
    support = format_use(engine, hardware, form).support if form is not None else None
    if support == "weight_only" and quantization.activations is not None:
        return replace(quantization, is_weight_only=True)
    if support == "native" and form == "mxfp4" and quantization.activations is None:
        return replace(quantization, activations="mxfp8")
    return quantization


def _static(quantization: QuantizationSpec) -> QuantizationSpec:
    """Scales are static of FP8 per tensor, and of NVFP4 beside its block scales; others depend on the input."""
    weights = quantization.weights
    is_static = weights == "nvfp4" or (weights == "fp8" and not quantization.group_size)
    if weights != quantization.activations or not is_static or quantization.inputs_come_quantized:
        return quantization
    return replace(quantization, inputs_come_quantized=True)


def _kernel_format(weights: str, activations: str, group_size: int) -> str:
    """The format's name in tables of measured kernels: fp8, fp8_block (a scale per block), nvfp4, w4afp8."""
    if weights == activations:
        return f"{weights}_block" if weights == "fp8" and group_size else weights
    if (weights, activations) == ("mxfp4", "mxfp8"):
        return "w4a8_mxfp4"
    return f"w{BITS_PER_WEIGHT[weights]:.0f}a{activations}"

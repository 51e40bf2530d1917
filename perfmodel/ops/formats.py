"""Number formats: bytes per element, and which format each linear layer stores, reads and multiplies in.

Formats are named as in `peak_flops_per_s` and `QuantizationSpec`: bf16, fp16, fp32, fp8, int8, int4, fp4, mxfp4 ...
Not modelled: sparse formats, outlier splitting (LLM.int8), per-layer mixtures below the granularity of a component.
"""

__all__ = ["FORMAT_BITS", "LinearFormat", "element_bytes", "linear_format", "served_model", "weight_element_bytes"]

from dataclasses import dataclass, replace

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.specs.engine import EngineSpec
from perfmodel.specs.model.spec import ModelSpec, QuantizationSpec

# Payload bits per element. The GGUF blocks carry their scales inside (llama.cpp block layouts); nvfp4 and mxfp4
# have scales of fixed grouping (one fp8 per 16, one e8m0 per 32) that are part of the format.
FORMAT_BITS = {
    "fp32": 32.0,
    "tf32": 32.0,
    "bf16": 16.0,
    "fp16": 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "fp6": 6.0,
    "int4": 4.0,
    "fp4": 4.0,
    "nvfp4": 4.5,
    "mxfp4": 4.25,
    "mxfp8": 8.25,
    "int3": 3.0,
    "int2": 2.0,
    "q8_0": 8.5,
    "q6_k": 6.5625,
    "q5_k_m": 5.7,
    "q4_k_m": 4.85,
    "q4_0": 4.5,
}
_SCALE_BYTES = 2.0  # bf16 or fp16 scales
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_RATES = {"nvfp4": "fp4", "mxfp4": "fp4", "mxfp8": "fp8"}
_KV_DTYPES = {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "fp8_inc": "fp8", "float16": "fp16", "bfloat16": "bf16"}
# vLLM's `quantization` argument on an unquantized checkpoint (online), or what a named method stores.
_ONLINE = {
    "fp8": QuantizationSpec(method="fp8", weights="fp8", activations="fp8"),
    "int8": QuantizationSpec(method="int8", weights="int8", activations="int8"),
    "experts_int8": QuantizationSpec(
        method="experts_int8",
        weights="int8",
        kept=frozenset({"embedding", "lm_head", "router", "attention", "linear_attention", "dense_ffn"}),
    ),
    "awq": QuantizationSpec(method="awq", weights="int4", group_size=128),
    "gptq": QuantizationSpec(method="gptq", weights="int4", group_size=128),
    "int4": QuantizationSpec(method="int4", weights="int4", group_size=128),
    "bitsandbytes": QuantizationSpec(method="bitsandbytes", weights="int4", group_size=64),
    "mxfp4": QuantizationSpec(method="mxfp4", weights="mxfp4"),
    "nvfp4": QuantizationSpec(method="nvfp4", weights="nvfp4", activations="nvfp4"),
}


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """How one linear layer is stored and multiplied.

    rate:            the peak rate that multiplies
    weight_bytes:    per weight, scales included
    input_bytes:     per input element as the multiplication reads it
    output_bytes:    per output element, and per input element before quantization
    quantizes_input: a kernel quantizes the activations first (dynamic fp8, int8, fp4)
    """

    rate: str
    weight_bytes: float
    input_bytes: float
    output_bytes: float
    quantizes_input: bool = False


def element_bytes(format_: str) -> float:
    """Bytes of one element, scales that belong to the format included.

    Raises SpecError for a format that is not in FORMAT_BITS, with the nearest names.
    """
    bits = FORMAT_BITS.get(format_)
    if bits is None:
        known = ", ".join(sorted(FORMAT_BITS))
        raise SpecError(f"unknown number format {format_!r}; known are {known}.{did_you_mean(format_, FORMAT_BITS)}")
    return bits / 8


def weight_element_bytes(format_: str, group_size: int = 0) -> float:
    """Bytes of one weight with its share of a 16-bit scale per `group_size` weights (0: one per channel, ~0)."""
    has_own_scales = format_ not in ("int8", "int4", "int3", "int2", "fp8", "fp4", "fp6")
    scale = 0.0 if has_own_scales or group_size <= 0 else _SCALE_BYTES / group_size
    if format_ == "fp8" and group_size > 0:  # fp8 blocks are square (128 x 128): one fp32 scale per block
        scale = 4.0 / group_size**2
    if format_ == "fp4" and group_size > 0:  # NVFP4: one fp8 scale per group of 16
        scale = 1.0 / group_size
    return element_bytes(format_) + scale


def served_model(model: ModelSpec, engine: EngineSpec) -> ModelSpec:
    """The model in the formats that the engine serves it in: `dtype`, `quantization` and `kv_cache_dtype` applied.

    Raises SpecError for an unknown `quantization` or `kv_cache_dtype`, with the nearest known names.
    """
    dtype = model.dtype if engine.dtype == "auto" else _DTYPES[engine.dtype]
    quantization = model.quantization
    if engine.quantization is not None and quantization.weights is None:
        named = _ONLINE.get(engine.quantization)
        if named is None:
            hint = did_you_mean(engine.quantization, _ONLINE)
            raise SpecError(
                f"engine.quantization: {engine.quantization!r} is not one of {', '.join(sorted(_ONLINE))}.{hint}"
            )
        quantization = replace(named, kv_cache=quantization.kv_cache)
    if engine.kv_cache_dtype != "auto":
        kv_cache = _KV_DTYPES.get(engine.kv_cache_dtype, engine.kv_cache_dtype)
        element_bytes(kv_cache)
        quantization = replace(quantization, kv_cache=kv_cache)
    if dtype == model.dtype and quantization == model.quantization:
        return model
    return replace(model, dtype=dtype, quantization=quantization)


def linear_format(model: ModelSpec, component: str) -> LinearFormat:
    """The format of the linear layers of a component (a name in `COMPONENTS`).

    Weight-only formats are dequantized on the way into the multiplication, which runs at the model's dtype; formats
    with quantized activations multiply at the activations' rate.
    """
    dtype_bytes = element_bytes(model.dtype)
    quantization = model.quantization
    if quantization.weights is None or component in quantization.kept:
        return LinearFormat(model.dtype, dtype_bytes, dtype_bytes, dtype_bytes)
    weight_bytes = weight_element_bytes(quantization.weights, quantization.group_size)
    activations = quantization.activations
    if activations is None or activations == model.dtype:
        return LinearFormat(model.dtype, weight_bytes, dtype_bytes, dtype_bytes)
    rate = _RATES.get(activations, activations)
    return LinearFormat(rate, weight_bytes, element_bytes(activations), dtype_bytes, quantizes_input=True)

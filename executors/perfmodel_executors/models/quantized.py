"""A decoder's weights in the number format that the engine's `quantization` asks for.

As the cost model's `served_model` has it: embedding, LM head, router and norms stay in the model's dtype, and whatever
else the format keeps. Formats are known by what they store and multiply in, not by the name of the method.
"""

__all__ = ["check_quantization", "layer_quantizer"]

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.architecture import Attention, Layer, MoEFFN, QuantizationSpec
from perfmodel.models.number_formats import METHODS
from perfmodel.models.spec import ModelSpec
from perfmodel_executors.kernels.weight_formats import (
    FP8_BLOCK,
    OUTLIER_THRESHOLD,
    LowRankWeight,
    MatrixWeight,
    Weight,
    quantize_experts,
    quantize_fp8,
    quantize_fp8_block,
    quantize_int4,
    quantize_int8,
    quantize_mxfp4,
    quantize_nvfp4,
    quantize_signs,
    sparsify_24,
)
from perfmodel_executors.models.weights import AttentionWeights, FFNWeights, LayerWeights, MoEWeights

Quantize = Callable[[Tensor], MatrixWeight]


class _Format(NamedTuple):
    """What distinguishes formats: codes stored, codes multiplied (None: the model's dtype), whether in groups, whether
    outputs share scales, too."""

    weights: str
    activations: str | None
    is_grouped: bool
    is_blocked: bool = False


def _int8(quantization: QuantizationSpec) -> Quantize:
    threshold = OUTLIER_THRESHOLD if quantization.outlier_share else None
    return partial(quantize_int8, quantizes_input=quantization.activations == "int8", outlier_threshold=threshold)


def _fp8(quantization: QuantizationSpec) -> Quantize:
    return partial(quantize_fp8, quantizes_input=quantization.activations == "fp8")


def _int4(quantization: QuantizationSpec) -> Quantize:
    return partial(quantize_int4, group_size=quantization.group_size, has_zeros=quantization.method == "awq")


def _signs(quantization: QuantizationSpec) -> Quantize:
    return partial(quantize_signs, bits={"ternary": 2, "binary": 1}[quantization.weights or ""])


def _by_definition(quantize: Quantize) -> Callable[[QuantizationSpec], Quantize]:
    """For formats whose groups are fixed."""
    return lambda _: quantize


_QUANTIZERS: MappingProxyType[_Format | None, Callable[[QuantizationSpec], Quantize]] = MappingProxyType(
    {
        _Format("int8", None, False): _int8,
        _Format("int8", "int8", False): _int8,
        _Format("fp8", None, False): _fp8,
        _Format("fp8", "fp8", False): _fp8,
        _Format("int4", None, True): _int4,
        _Format("int4", None, False): _int4,
        _Format("ternary", "int8", False): _signs,
        _Format("binary", "int8", False): _signs,
        _Format("fp8", "fp8", True, is_blocked=True): _by_definition(quantize_fp8_block),
        _Format("mxfp4", None, True): _by_definition(quantize_mxfp4),
        # No device that is executed on multiplies NVFP4: as engines do there, activations stay as they are.
        _Format("nvfp4", None, True): _by_definition(quantize_nvfp4),
    }
)


def check_quantization(model: ModelSpec) -> None:
    """Raises PerfmodelError for weights in a format that no kernel multiplies by."""
    for quantization in {model.quantization, *(form for layer, _ in model.layers for _, form in layer.formats)}:
        _check(model, quantization)


def _check(model: ModelSpec, quantization: QuantizationSpec) -> None:
    if quantization.weights is None:
        return
    if any(not isinstance(layer.mixer, Attention | None) for layer, _ in model.layers):
        raise PerfmodelError(
            f"{model.name}: latent attention and recurrent layers are executed with plain weights only; leave out "
            f"engine.quantization, or simulate it."
        )
    if model.weight_sparsity is not None:
        raise PerfmodelError(
            f"{model.name}: 2:4 sparse weights in {quantization.weights} are not executed: torch's sparse products "
            f"take bf16 and fp16; leave out engine.quantization or model_changes.prune."
        )
    if quantization.outlier_share and any(isinstance(layer.ffn, MoEFFN) for layer, _ in model.layers):
        raise PerfmodelError(
            f"{model.name}: experts whose outliers are multiplied apart (llm_int8) are not executed; set "
            f"engine.quantization to w8a8_int8, or simulate it."
        )
    if _format(quantization, model.dtype) not in _QUANTIZERS:
        executed = [name for name, spec in METHODS.items() if _format(spec, model.dtype) in _QUANTIZERS]
        raise PerfmodelError(
            f"{model.name}: weights in {_named(quantization)} are not executed yet; set engine.quantization to one of "
            f"{', '.join(executed)}, or use a bf16 card."
        )


def layer_quantizer(model: ModelSpec) -> Callable[[LayerWeights, Layer], LayerWeights]:
    """What turns the weights of a layer into the model's format or its own (2:4 sparse ones, too)."""

    def quantizer(component: str, own: Mapping[str, QuantizationSpec]) -> Quantize | None:
        quantization = own.get(component, model.quantization)
        if component in quantization.kept:
            return None
        if model.weight_sparsity is not None:
            return sparsify_24
        if quantization.weights is None:
            return None
        return _QUANTIZERS[_format(quantization, model.dtype)](quantization)

    return lambda weights, layer: _layer(weights, partial(quantizer, own=dict(layer.formats)))


def _format(quantization: QuantizationSpec, dtype: str) -> _Format | None:
    size, rows = quantization.group_size, quantization.group_rows
    if quantization.weights is None or (rows > 1 and (rows, size) != (FP8_BLOCK, FP8_BLOCK)):
        return None
    kept = (dtype, "nvfp4") if quantization.weights == "nvfp4" else (dtype,)
    activations = None if quantization.activations in kept else quantization.activations
    return _Format(quantization.weights, activations, size > 0, rows > 1)


def _named(quantization: QuantizationSpec) -> str:
    groups = f" with {quantization.group_rows} x {quantization.group_size} weights a scale"
    activations = f" and activations in {quantization.activations}" if quantization.activations else ""
    return f"{quantization.weights}{groups if quantization.group_size else ''}{activations}"


def _layer(layer: LayerWeights, quantizer: Callable[[str], Quantize | None]) -> LayerWeights:
    mixer, ffn = layer.mixer, layer.ffn
    quantize = quantizer("attention")
    if isinstance(mixer, AttentionWeights) and quantize is not None:
        mixer = replace(mixer, qkv=_quantized(mixer.qkv, quantize), out=_quantized(mixer.out, quantize))
    quantize = quantizer("dense_ffn")
    if isinstance(ffn, FFNWeights) and quantize is not None:
        ffn = _dense(ffn, quantize)
    if isinstance(ffn, MoEWeights):
        ffn = _experts(ffn, quantizer)
    return replace(layer, mixer=mixer, ffn=ffn)


def _experts(ffn: MoEWeights, quantizer: Callable[[str], Quantize | None]) -> MoEWeights:
    quantize = quantizer("shared_experts")
    if ffn.shared is not None and quantize is not None:
        ffn = replace(ffn, shared=_dense(ffn.shared, quantize))
    quantize = quantizer("experts")
    if quantize is not None and isinstance(ffn.up, Tensor) and isinstance(ffn.down, Tensor):
        ffn = replace(ffn, up=quantize_experts(ffn.up, quantize), down=quantize_experts(ffn.down, quantize))
    return ffn


def _dense(ffn: FFNWeights, quantize: Quantize) -> FFNWeights:
    return replace(ffn, up=_quantized(ffn.up, quantize), down=_quantized(ffn.down, quantize))


def _quantized(weight: Weight, quantize: Quantize) -> Weight:
    if isinstance(weight, LowRankWeight):
        return LowRankWeight(_matrix(weight.inputs_RK, quantize), _matrix(weight.outputs_NR, quantize))
    return _matrix(weight, quantize)


def _matrix(weight: MatrixWeight, quantize: Quantize) -> MatrixWeight:
    return quantize(weight) if isinstance(weight, Tensor) else weight

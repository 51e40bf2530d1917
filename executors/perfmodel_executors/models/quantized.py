"""A decoder's weights in the number format that the engine's `quantization` asks for.

As the cost model's `served_model` has it: embedding, LM head, router and norms stay in the model's dtype, and whatever
else the format keeps. Formats are known by what they store and multiply in, not by the name of the method.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.architecture import Attention, LatentAttention, Layer, MoEFFN, QuantizationSpec
from perfmodel.models.number_formats import METHODS
from perfmodel.models.spec import ModelSpec
from perfmodel.models.weights.gguf import GGUF_MIXES, table_formats, tensor_formats
from perfmodel_executors.kernels.gguf_blocks import BLOCK_SIZES
from perfmodel_executors.kernels.stored_rows import join_rows, quantize_experts
from perfmodel_executors.kernels.weight_formats import (
    FP8_BLOCK,
    OUTLIER_THRESHOLD,
    GgufWeight,
    LowRankWeight,
    MatrixWeight,
    RowsWeight,
    Weight,
    quantize_fp8,
    quantize_fp8_block,
    quantize_gguf,
    quantize_int4,
    quantize_int4_int8,
    quantize_int8,
    quantize_mxfp4,
    quantize_nvfp4,
    quantize_signs,
    sparsify_24,
)
from perfmodel_executors.models.weights import (
    AttentionWeights,
    FFNWeights,
    LatentWeights,
    LayerWeights,
    MoEWeights,
)

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


def _int4_int8(quantization: QuantizationSpec) -> Quantize:
    return partial(quantize_int4_int8, group_size=quantization.group_size)


def _signs(quantization: QuantizationSpec) -> Quantize:
    return partial(quantize_signs, bits={"ternary": 2, "binary": 1}[quantization.weights or ""])


def _gguf(quantization: QuantizationSpec) -> Quantize:
    return partial(quantize_gguf, form=quantization.weights or "")


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
        _Format("int4", "int8", True): _int4_int8,
        _Format("ternary", "int8", False): _signs,
        _Format("binary", "int8", False): _signs,
        _Format("fp8", "fp8", True, is_blocked=True): _by_definition(quantize_fp8_block),
        _Format("mxfp4", None, True): _by_definition(quantize_mxfp4),
        # No device that is executed on multiplies NVFP4: as engines do there, activations stay as they are.
        _Format("nvfp4", None, True): _by_definition(quantize_nvfp4),
        **{_Format(name, None, False): _gguf for name in BLOCK_SIZES},
    }
)


def check_quantization(model: ModelSpec) -> None:
    """Raises PerfmodelError for weights in a format that no kernel multiplies by."""
    for quantization in {model.quantization, *(form for layer, _ in model.layers for _, form in layer.formats)}:
        _check(model, quantization)


def _check(model: ModelSpec, quantization: QuantizationSpec) -> None:
    if quantization.weights is None:
        return
    if any(not isinstance(layer.mixer, Attention | LatentAttention | None) for layer, _ in model.layers):
        raise PerfmodelError(
            f"{model.name}: recurrent layers are executed with plain weights only; leave out engine.quantization (none "
            f"for a checkpoint that is quantised), or simulate it."
        )
    if quantization.method == "gguf" and any(isinstance(layer.ffn, MoEFFN) for layer, _ in model.layers):
        raise PerfmodelError(
            f"{model.name}: experts in llama.cpp's blocks are not executed; set engine.quantization to w4a16 or w8a16, "
            f"or simulate it."
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
    if not _has_quantizers(model, quantization):
        executed = [name for name, spec in METHODS.items() if _format(spec, model.dtype) in _QUANTIZERS]
        executed += [name for name in GGUF_MIXES if _unknown_forms(model, name) == set()]
        raise PerfmodelError(
            f"{model.name}: weights in {_named(quantization)} are not executed yet; set engine.quantization to one of "
            f"{', '.join(executed)}, or use a bf16 card."
        )


def _has_quantizers(model: ModelSpec, quantization: QuantizationSpec) -> bool:
    if quantization.mix:
        return not _unknown_forms(model, quantization.mix)
    return _format(quantization, model.dtype) in _QUANTIZERS


def _unknown_forms(model: ModelSpec, mix: str) -> set[str]:
    """Block formats of a mix that nothing is multiplied by."""
    forms = {form for layer in tensor_formats(model, mix) for form in layer.values()}
    return (forms | set(table_formats(model, mix).values())) - set(BLOCK_SIZES)


def keeps_format(model: ModelSpec) -> bool:
    """Whether the model is served as its file has it: in llama.cpp's blocks, or in e4m3 blocks of 128 x 128."""
    quantization, path = model.quantization, model.weights_origin or ""
    if quantization.method == "gguf":
        return path.endswith(".gguf") and not quantization.mix
    found = _format(quantization, model.dtype)
    return found is not None and found.is_blocked


def layer_quantizer(model: ModelSpec) -> Callable[[LayerWeights, Layer, int], LayerWeights]:
    """What turns the weights of a layer, with its number, into the model's format or its own (2:4 sparse ones, too)."""
    by_mix = {
        each.mix: tensor_formats(model, each.mix)
        for each in (model.quantization, *(form for layer, _ in model.layers for _, form in layer.formats))
        if each.mix
    }

    def quantizer(component: str, tensor: str, own: Mapping[str, QuantizationSpec], index: int) -> Quantize | None:
        quantization = own.get(component, model.quantization)
        if component in quantization.kept:
            return None
        if model.weight_sparsity is not None:
            return sparsify_24
        if quantization.weights is None:
            return None
        if quantization.mix:
            quantization = replace(quantization, weights=by_mix[quantization.mix][index].get(tensor))
        return _QUANTIZERS[_format(quantization, model.dtype)](quantization)

    return lambda weights, layer, index: _layer(
        weights, layer, partial(quantizer, own=dict(layer.formats), index=index)
    )


def table_quantizer(model: ModelSpec) -> Callable[[Tensor | GgufWeight, str], Tensor | GgufWeight]:
    """What turns the `embedding` or the `lm_head` into the model's format, where it has one for tables of words."""
    quantization = model.quantization
    forms = table_formats(model, quantization.mix) if quantization.mix else {}

    def quantize(table: Tensor | GgufWeight, component: str) -> Tensor | GgufWeight:
        is_kept = quantization.weights is None or component in quantization.kept
        if is_kept or not isinstance(table, Tensor) or quantization.method != "gguf":
            return table
        return quantize_gguf(table, forms.get(component, quantization.weights or ""))

    return quantize


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


_Quantizer = Callable[[str, str], Quantize | None]  # of a component's tensor


def _layer(weights: LayerWeights, layer: Layer, quantizer: _Quantizer) -> LayerWeights:
    mixer, ffn = weights.mixer, weights.ffn
    if isinstance(mixer, AttentionWeights) and isinstance(layer.mixer, Attention):
        mixer = replace(mixer, qkv=_projections(mixer.qkv, layer.mixer, quantizer))
        mixer = replace(mixer, out=_quantized(mixer.out, quantizer("attention", "out")))
    if isinstance(mixer, LatentWeights):
        mixer = _latent(mixer, quantizer("attention", "qk"))
    if isinstance(ffn, FFNWeights):
        ffn = _dense(ffn, "dense_ffn", quantizer)
    if isinstance(ffn, MoEWeights):
        ffn = _experts(ffn, quantizer)
    return replace(weights, mixer=mixer, ffn=ffn)


def _projections(qkv: Weight, mixer: Attention, quantizer: _Quantizer) -> Weight:
    """Rows of queries, keys, values and gates; values may be in a format of their own."""
    quantize, of_values = quantizer("attention", "qk"), quantizer("attention", "v")
    forms = [getattr(each, "keywords", {}).get("form") for each in (quantize, of_values)]
    if forms[0] == forms[1] or not isinstance(qkv, Tensor) or quantize is None or of_values is None:
        return _quantized(qkv, quantize)
    first = (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim
    sizes = [first, mixer.num_kv_heads * mixer.v_head_dim]
    parts = torch.split(qkv, [*sizes, len(qkv) - sum(sizes)])
    ways = (quantize, of_values, quantize)
    return join_rows([way(part) for way, part in zip(ways, parts, strict=True) if len(part)])


def _latent(weights: LatentWeights, quantize: Quantize | None) -> LatentWeights:
    """What is multiplied by tokens; what expands latents stays plain."""
    if quantize is None:
        return weights
    q_down = None if weights.q_down is None else _quantized(weights.q_down, quantize)
    q_up, kv_down, out = (_quantized(each, quantize) for each in (weights.q_up, weights.kv_down, weights.out))
    return replace(weights, q_down=q_down, q_up=q_up, kv_down=kv_down, out=out)


def _experts(ffn: MoEWeights, quantizer: _Quantizer) -> MoEWeights:
    if ffn.shared is not None:
        ffn = replace(ffn, shared=_dense(ffn.shared, "shared_experts", quantizer))
    ways = (quantizer("experts", "up"), quantizer("experts", "down"))
    if None not in ways and isinstance(ffn.up, Tensor) and isinstance(ffn.down, Tensor):
        up, down = (quantize_experts(each, way) for each, way in zip((ffn.up, ffn.down), ways, strict=True) if way)
        ffn = replace(ffn, up=up, down=down)
    return ffn


def _dense(ffn: FFNWeights, component: str, quantizer: _Quantizer) -> FFNWeights:
    up, down = quantizer(component, "up"), quantizer(component, "down")
    return replace(ffn, up=_quantized(ffn.up, up), down=_quantized(ffn.down, down))


def _quantized(weight: Weight, quantize: Quantize | None) -> Weight:
    if quantize is None:
        return weight
    if isinstance(weight, RowsWeight):
        return RowsWeight(tuple(_matrix(part, quantize) for part in weight.parts))
    if isinstance(weight, LowRankWeight):
        return LowRankWeight(_matrix(weight.inputs_RK, quantize), _matrix(weight.outputs_NR, quantize))
    return _matrix(weight, quantize)


def _matrix(weight: MatrixWeight, quantize: Quantize) -> MatrixWeight:
    return quantize(weight) if isinstance(weight, Tensor) else weight

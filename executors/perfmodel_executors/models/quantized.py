"""A decoder's weights in the number format that the engine's `quantization` asks for. As the cost model's
`served_model` has it: embedding, LM head, router and norms stay in the model's dtype, and whatever else the format
keeps. Formats are known by what they store and multiply in, not by the name of the method."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.architecture import Attention, LatentAttention, Layer, MoEFFN, QuantizationSpec
from perfmodel.models.number_formats import METHODS
from perfmodel.models.spec import ModelSpec
from perfmodel.models.weights.gguf import GGUF_MIXES, table_formats, tensor_formats
from perfmodel_executors.kernels import weight_formats as formats
from perfmodel_executors.kernels.gguf_blocks import BLOCK_SIZES
from perfmodel_executors.kernels.stored_rows import join_rows, quantize_experts
from perfmodel_executors.kernels.weight_formats import GgufWeight, LowRankWeight, MatrixWeight, RowsWeight, Weight
from perfmodel_executors.models.weights import AttentionWeights, FFNWeights, LatentWeights, LayerWeights, MoEWeights

Quantize = Callable[[Tensor], MatrixWeight]


class _Format(NamedTuple):
    """What distinguishes formats: codes stored, multiplied (None: the model's dtype), scales by group, by block."""

    weights: str
    activations: str | None
    is_grouped: bool
    is_blocked: bool = False


def _int8(quantization: QuantizationSpec) -> Quantize:
    quantize = partial(formats.quantize_int8, quantizes_input=quantization.activations == "int8")
    return partial(quantize, outlier_threshold=formats.OUTLIER_THRESHOLD) if quantization.outlier_share else quantize


def _int4(quantization: QuantizationSpec) -> Quantize:
    return partial(formats.quantize_int4, group_size=quantization.group_size, has_zeros=quantization.method == "awq")


_QUANTIZERS: Mapping[_Format | None, Callable[[QuantizationSpec], Quantize]] = {
    **{_Format("int8", activations, False): _int8 for activations in (None, "int8")},
    _Format("fp8", None, False): lambda own: partial(formats.quantize_fp8, quantizes_input=False),
    _Format("fp8", "fp8", False): lambda own: formats.quantize_fp8,
    **{_Format("int4", None, is_grouped): _int4 for is_grouped in (True, False)},
    _Format("int4", "int8", True): lambda own: partial(formats.quantize_int4_int8, group_size=own.group_size),
    _Format("ternary", "int8", False): lambda own: partial(formats.quantize_signs, bits=2),
    _Format("binary", "int8", False): lambda own: partial(formats.quantize_signs, bits=1),
    _Format("fp8", "fp8", True, is_blocked=True): lambda own: formats.quantize_fp8_block,
    _Format("mxfp4", None, True): lambda own: formats.quantize_mxfp4,
    # No device that is executed on multiplies NVFP4: as engines do there, activations stay as they are.
    _Format("nvfp4", None, True): lambda own: formats.quantize_nvfp4,
    **{
        _Format(name, None, False): lambda own: partial(formats.quantize_gguf, form=own.weights or "")
        for name in BLOCK_SIZES
    },
}


def refuse(name: str, cases: Mapping[str, bool], sentence: str = "{}") -> None:
    """Raises PerfmodelError with the first of `cases` that applies to the model called `name`, within `sentence`."""
    for case, applies in cases.items():
        if applies:
            raise PerfmodelError(f"{name}: {sentence.format(case)}")


def check_quantization(model: ModelSpec) -> None:
    """Raises PerfmodelError for weights in a format that no kernel multiplies by."""
    has_others = any(not isinstance(layer.mixer, Attention | LatentAttention | None) for layer, _ in model.layers)
    has_experts = any(isinstance(layer.ffn, MoEFFN) for layer, _ in model.layers)
    for own in {model.quantization, *(form for layer, _ in model.layers for _, form in layer.formats)}:
        if own.weights is None:
            continue
        cases = {
            "recurrent layers are executed with plain weights only; leave out engine.quantization (none for a "
            "checkpoint that is quantised), or simulate it.": has_others,
            "experts in llama.cpp's blocks are not executed; set engine.quantization to w4a16 or w8a16, or simulate "
            "it.": own.method == "gguf" and has_experts,
            f"2:4 sparse weights in {own.weights} are not executed: torch's sparse products take bf16 and fp16; leave "
            f"out engine.quantization or model_changes.prune.": model.weight_sparsity is not None,
            "experts whose outliers are multiplied apart (llm_int8) are not executed; set engine.quantization to "
            "w8a8_int8, or simulate it.": bool(own.outlier_share) and has_experts,
        }
        refuse(model.name, cases)
        is_known = _format(own, model.dtype) in _QUANTIZERS
        if _unknown_forms(model, own.mix) if own.mix else not is_known:
            executed = [name for name, spec in METHODS.items() if _format(spec, model.dtype) in _QUANTIZERS]
            executed += [name for name in GGUF_MIXES if not _unknown_forms(model, name)]
            groups = f" with {own.group_rows} x {own.group_size} weights a scale" if own.group_size else ""
            activations = f" and activations in {own.activations}" if own.activations else ""
            raise PerfmodelError(
                f"{model.name}: weights in {own.weights}{groups}{activations} are not executed yet; set "
                f"engine.quantization to one of {', '.join(executed)}, or use a bf16 card."
            )


def _unknown_forms(model: ModelSpec, mix: str) -> set[str]:
    """Block formats of a mix that nothing is multiplied by."""
    forms = {form for layer in tensor_formats(model, mix) for form in layer.values()}
    return (forms | set(table_formats(model, mix).values())) - set(BLOCK_SIZES)


def keeps_format(model: ModelSpec) -> bool:
    """Whether the model is served as its file has it: in llama.cpp's blocks, or in e4m3 blocks of 128 x 128."""
    quantization, path = model.quantization, model.weights_origin or ""
    if quantization.method == "gguf":
        return path.endswith(".gguf") and not quantization.mix
    form = _format(quantization, model.dtype)
    return form is not None and form.is_blocked


def layer_quantizer(model: ModelSpec) -> Callable[[LayerWeights, Layer, int], LayerWeights]:
    """What turns the weights of a layer, with its number, into the model's format or its own (2:4 sparse ones, too)."""
    specs = (model.quantization, *(form for layer, _ in model.layers for _, form in layer.formats))
    by_mix = {own.mix: tensor_formats(model, own.mix) for own in specs if own.mix}

    def quantizer(component: str, tensor: str, own: Mapping[str, QuantizationSpec], index: int) -> Quantize | None:
        quantization = own.get(component, model.quantization)
        if component in quantization.kept:
            return None
        if model.weight_sparsity is not None:
            return formats.sparsify_24
        if quantization.weights is None:
            return None
        if quantization.mix:
            quantization = replace(quantization, weights=by_mix[quantization.mix][index].get(tensor))
        return _QUANTIZERS[_format(quantization, model.dtype)](quantization)

    return lambda own, layer, index: _layer(own, layer, partial(quantizer, own=dict(layer.formats), index=index))


def table_quantizer(model: ModelSpec) -> Callable[[Tensor | GgufWeight, str], Tensor | GgufWeight]:
    """What turns the `embedding` or the `lm_head` into the model's format, where it has one for tables of words."""
    quantization = model.quantization
    forms = table_formats(model, quantization.mix) if quantization.mix else {}

    def quantize(table: Tensor | GgufWeight, component: str) -> Tensor | GgufWeight:
        is_kept = quantization.weights is None or component in quantization.kept
        if is_kept or not isinstance(table, Tensor) or quantization.method != "gguf":
            return table
        return formats.quantize_gguf(table, forms.get(component, quantization.weights or ""))

    return quantize


def _format(quantization: QuantizationSpec, dtype: str) -> _Format | None:
    size, rows = quantization.group_size, quantization.group_rows
    if quantization.weights is None or (rows > 1 and (rows, size) != (formats.FP8_BLOCK, formats.FP8_BLOCK)):
        return None
    kept = (dtype, "nvfp4") if quantization.weights == "nvfp4" else (dtype,)
    activations = None if quantization.activations in kept else quantization.activations
    return _Format(quantization.weights, activations, size > 0, rows > 1)


_Quantizer = Callable[[str, str], Quantize | None]  # of a component's tensor


def _layer(weights: LayerWeights, layer: Layer, quantizer: _Quantizer) -> LayerWeights:
    mixer, ffn = weights.mixer, weights.ffn
    if isinstance(mixer, AttentionWeights) and isinstance(layer.mixer, Attention):
        qkv = _projections(mixer.qkv, layer.mixer, quantizer)
        mixer = replace(mixer, qkv=qkv, out=_quantized(mixer.out, quantizer("attention", "out")))
    elif isinstance(mixer, LatentWeights) and (quantize := quantizer("attention", "qk")) is not None:
        # What is multiplied by tokens; what expands latents stays plain.
        q_down = None if mixer.q_down is None else _quantized(mixer.q_down, quantize)
        q_up, kv_down, out = (_quantized(weight, quantize) for weight in (mixer.q_up, mixer.kv_down, mixer.out))
        mixer = replace(mixer, q_down=q_down, q_up=q_up, kv_down=kv_down, out=out)
    if isinstance(ffn, FFNWeights):
        ffn = _dense(ffn, "dense_ffn", quantizer)
    elif isinstance(ffn, MoEWeights):
        shared = None if ffn.shared is None else _dense(ffn.shared, "shared_experts", quantizer)
        up, down = (
            quantize_experts(own, quantize) if quantize is not None and isinstance(own, Tensor) else own
            for own, quantize in ((ffn.up, quantizer("experts", "up")), (ffn.down, quantizer("experts", "down")))
        )
        ffn = replace(ffn, shared=shared, up=up, down=down)
    return replace(weights, mixer=mixer, ffn=ffn)


def _projections(qkv: Weight, mixer: Attention, quantizer: _Quantizer) -> Weight:
    quantize, of_values = quantizer("attention", "qk"), quantizer("attention", "v")
    forms = [getattr(way, "keywords", {}).get("form") for way in (quantize, of_values)]
    if forms[0] == forms[1] or not isinstance(qkv, Tensor) or quantize is None or of_values is None:
        return _quantized(qkv, quantize)
    first = (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim
    sizes = [first, mixer.num_kv_heads * mixer.v_head_dim]
    parts = torch.split(qkv, [*sizes, len(qkv) - sum(sizes)])
    ways = (quantize, of_values, quantize)
    return join_rows([way(part) for way, part in zip(ways, parts, strict=True) if len(part)])


def _dense(ffn: FFNWeights, component: str, quantizer: _Quantizer) -> FFNWeights:
    up, down = quantizer(component, "up"), quantizer(component, "down")
    return replace(ffn, up=_quantized(ffn.up, up), down=_quantized(ffn.down, down))


def _quantized(weight: Weight, quantize: Quantize | None) -> Weight:
    def of_matrix(matrix: MatrixWeight) -> MatrixWeight:
        return quantize(matrix) if quantize is not None and isinstance(matrix, Tensor) else matrix

    if isinstance(weight, RowsWeight):
        return RowsWeight(tuple(map(of_matrix, weight.parts)))
    if isinstance(weight, LowRankWeight):
        return LowRankWeight(of_matrix(weight.inputs_RK), of_matrix(weight.outputs_NR))
    return of_matrix(weight)

"""SmoothQuant: activations whose scales are known beforehand, by what a text shows of them.

    s_k = (max |x_k|)^a / (max |w_k|)^(1 - a), x' = x / s, W' = W s        a = 1/2

for the inputs behind a norm, whose weights take the division: queries, keys and values, and the feed-forward block's
way up. The others (attention's output, the way down) get a scale without smoothing. All activations of a layer's input
share one scale, max |x'| / 127; weights have one for each output.

Source: Xiao et al. 2023 (SmoothQuant), eq. 3 and 4, and section 4.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perfmodel.models.architecture import Attention, DenseFFN, QuantizationSpec
from perfmodel.models.spec import ModelSpec
from perfmodel_executors.kernels import load_kernels
from perfmodel_executors.kernels.weight_formats import INT8_MAX, Int8Weight, quantize_int8
from perfmodel_executors.models.batch import TokenSegment, build_batch
from perfmodel_executors.models.quantized import refuse
from perfmodel_executors.models.weights import AttentionWeights, DecoderWeights, FFNWeights, LayerWeights
from perfmodel_executors.quality.tokenizer import load_tokenizer, read_text

_TEXT_TOKENS = 512  # what is looked for is the largest of each column
_MIGRATION = 0.5  # a
_LEAST = 1e-5
_BLOCK = 16


def has_static_scales(model: ModelSpec) -> bool:
    return model.quantization.inputs_come_quantized and model.quantization.weights == "int8"


def loads_smoothed(model: ModelSpec, build: Callable[[ModelSpec], Any], seed: int) -> DecoderWeights:
    """INT8 weights with scales of activations as a text shows them (random tokens without a tokenizer). build: from the
    plain model to its decoder. Raises PerfmodelError for layers of other kinds."""
    for layer, _ in model.layers:
        mixer, ffn = layer.mixer, layer.ffn
        is_known = isinstance(mixer, Attention | None) and isinstance(ffn, DenseFFN | None)
        blocks = ((mixer, ("qkv_rank", "out_rank")), (ffn, ("up_rank", "down_rank")))
        ranks = [getattr(block, name, None) for block, names in blocks for name in names]
        missing = {"others": not is_known, "products of two thin matrices": any(ranks), "several": bool(layer.formats)}
        sentence = (
            "SmoothQuant is executed for attention and dense blocks in one format, and this model has {}; set "
            "engine.quantization to w8a8_int8, or simulate it."
        )
        refuse(model.name, missing, sentence)
    have = model.quantization
    kept = QuantizationSpec(kv_cache=have.kv_cache, kv_group_size=have.kv_group_size, kv_recent=have.kv_recent)
    return _smoothed(build(replace(model, quantization=kept)), _text(model, seed))


def _text(model: ModelSpec, seed: int) -> list[int]:
    path, count = model.weights_origin, min(_TEXT_TOKENS, model.max_position_embeddings)
    if path is not None and path.endswith(".gguf"):
        return load_tokenizer(path).encode(read_text())[:count]
    return list(torch.randint(model.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


class _Watched:
    """Stands for the kernels of a decoder, and remembers the largest magnitude of each column that a weight meets."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.largest: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def linear(self, x_TC: Tensor, weight: Tensor, *rest: Any) -> Any:
        largest_C, key = x_TC.abs().amax(dim=0).float(), id(weight)
        self.largest[key] = torch.maximum(self.largest.get(key, largest_C), largest_C)
        return self._kernels.linear(x_TC, weight, *rest)


def _smoothed(decoder: Any, tokens: Sequence[int]) -> DecoderWeights:
    watched = _Watched(load_kernels())
    decoder.kernels = watched
    cache, blocks = decoder.new_cache(_BLOCK), range(-(-len(tokens) // _BLOCK))
    cache.reserve(len(blocks))
    with torch.inference_mode():
        decoder.forward(build_batch([TokenSegment(list(tokens), 0, blocks)], _BLOCK, decoder.device), cache)
    weights: DecoderWeights = decoder.weights
    known = {id(layer): _layer(layer, watched.largest) for layer in weights.layers}  # those used in turn stay one
    return replace(weights, layers=[known[id(layer)] for layer in weights.layers])


def _layer(layer: LayerWeights, largest: dict[int, Tensor]) -> LayerWeights:
    if isinstance(mixer := layer.mixer, AttentionWeights):
        norm, qkv = _behind_norm(layer.mixer_norm, mixer.qkv, largest)
        out = _static(mixer.out, largest[id(mixer.out)])
        layer = replace(layer, mixer_norm=norm, mixer=replace(mixer, qkv=qkv, out=out))
    if isinstance(ffn := layer.ffn, FFNWeights):
        norm, up = _behind_norm(layer.ffn_norm, ffn.up, largest)
        down = _static(ffn.down, largest[id(ffn.down)])
        layer = replace(layer, ffn_norm=norm, ffn=replace(ffn, up=up, down=down))
    return layer


def _behind_norm(norm_C: Tensor | None, weight: Any, largest: dict[int, Tensor]) -> tuple[Tensor | None, Int8Weight]:
    """The norm's weights divided by what the matrix is multiplied by; without a norm, neither."""
    x_C = largest[id(weight)].clamp_min(_LEAST)
    if norm_C is None:
        return None, _static(weight, x_C)
    w_C = weight.float().abs().amax(dim=0).clamp_min(_LEAST)
    s_C = x_C**_MIGRATION / w_C ** (1 - _MIGRATION)
    return (norm_C.float() / s_C).to(norm_C.dtype), _static(weight.float() * s_C, x_C / s_C)


def _static(weight_NC: Any, largest_C: Tensor) -> Int8Weight:
    scale = (largest_C.amax() / INT8_MAX).clamp_min(_LEAST)
    return replace(quantize_int8(weight_NC, quantizes_input=True), input_scale=scale)

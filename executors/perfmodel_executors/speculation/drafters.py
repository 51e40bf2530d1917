"""Decoders that draft with the model's own weights: its first layers, all of them in fewer bits, or one more layer."""

__all__ = ["eagle_layer", "eagle_projection", "first_layers", "in_fewer_bits"]

from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.architecture import Layer
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import served_model
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel_executors.models.decoder import Decoder
from perfmodel_executors.models.quantized import check_quantization, layer_quantizer
from perfmodel_executors.models.random_weights import random_layers, random_matrix
from perfmodel_executors.models.weights import AttentionWeights, DecoderWeights


def first_layers(decoder: Decoder, count: int) -> Decoder:
    """The first `count` layers, then the final norm and the LM head (LayerSkip: Elhoushi et al. 2024).

    Raises PerfmodelError for as many layers as there are.
    """
    model = decoder.model
    if count >= model.num_layers:
        raise PerfmodelError(
            f"found draft_layers={count}, but {model.name} has {model.num_layers} layers; draft with fewer."
        )
    kept: list[tuple[Layer, int]] = [(layer, 1) for layer in list(model.iter_layers())[:count]]
    cut = replace(model, name=f"{model.name}-first-{count}", layers=tuple(kept), num_distinct_layers=None)
    return _with(decoder, cut, replace(decoder.weights, layers=decoder.weights.layers[:count]))


def in_fewer_bits(decoder: Decoder, quantization: str) -> Decoder:
    """The same model with its matrices quantised to `quantization` (a name of engine.quantization).

    Where a format's groups of weights do not divide a matrix, they are the largest part of them that divides all.

    Raises PerfmodelError for a format that is not executed, and for a model that is quantised already.
    """
    model = decoder.model
    served_in = model.quantization.weights or "several formats"
    if model.quantization.weights is not None or any(layer.formats for layer, _ in model.layers):
        raise PerfmodelError(
            f"{model.name} is served in {served_in} already, and is quantised from its full weights only; leave "
            f"engine.quantization out (none for a file that is quantised) to draft with method: self_quantized."
        )
    served = served_model(model, EngineSpec(quantization=quantization))
    check_quantization(served)
    if served.quantization.group_size:
        size = gcd(served.quantization.group_size, *_widths(decoder.weights))
        served = replace(served, quantization=replace(served.quantization, group_size=size))
    quantize = layer_quantizer(served)
    drafting = replace(model, name=f"{model.name}-{quantization}", quantization=served.quantization)
    weights = replace(
        decoder.weights,
        layers=[
            quantize(own, layer, index)
            for index, (own, layer) in enumerate(zip(decoder.weights.layers, model.iter_layers(), strict=True))
        ],
    )
    return _with(decoder, drafting, weights)


def eagle_layer(decoder: Decoder, layer: ModelSpec, seed: int) -> Decoder:
    """`layer`, a model of one layer with random weights, between the embedding and the head of `decoder`."""
    layers = random_layers(layer, decoder.dtype, seed, decoder.device)
    return _with(decoder, layer, replace(decoder.weights, layers=layers))


def eagle_projection(decoder: Decoder, seed: int) -> Tensor:
    """EAGLE's projection of embedding and state, [C, 2 C], untrained: random weights for the embedding, and the state
    as it is, so that a draft begins as what the model said last."""
    hidden, dtype, device = decoder.model.hidden_size, decoder.dtype, decoder.device
    random_CD = random_matrix(hidden, 2 * hidden, dtype, seed, device)
    return torch.cat((random_CD[:, :hidden], torch.eye(hidden, dtype=dtype, device=device)), dim=1)


def _widths(weights: DecoderWeights) -> list[int]:
    """Inputs of all matrices that may be quantised."""
    found = []
    for layer in weights.layers:
        mixer, ffn = layer.mixer, layer.ffn
        own = (mixer.qkv, mixer.out) if isinstance(mixer, AttentionWeights) else ()
        matrices = [*own, *((ffn.up, ffn.down) if ffn else ())]
        found += [matrix.shape[-1] for matrix in matrices if isinstance(matrix, Tensor)]
    return found


def _with(decoder: Decoder, model: ModelSpec, weights: DecoderWeights) -> Decoder:
    attention = "standard" if decoder.is_standard else "flash"
    return Decoder(model, decoder.dtype, 0, decoder.kernels, weights, decoder.device, attention=attention)

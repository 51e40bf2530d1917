"""A decoder's weights from a file: projections that we compute as one product are laid one after the other."""

__all__ = ["load_weights"]

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.models.architecture import Attention, DenseFFN, Layer
from perfmodel.models.spec import ModelSpec
from perfmodel_executors.models.changed import changed_weights
from perfmodel_executors.models.loading.files import TensorFile, open_tensors
from perfmodel_executors.models.quantized import layer_quantizer
from perfmodel_executors.models.weights import AttentionWeights, DecoderWeights, FFNWeights, LayerWeights, used_in_turn
from perfmodel_executors.parallel.group import TensorGroup
from perfmodel_executors.parallel.sharding import shard_layer_weights, shard_rows

# Whose computation is that of our decoder to the last detail; others scale or rotate differently somewhere.
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def load_weights(model: ModelSpec, dtype: torch.dtype, device: torch.device, group: TensorGroup) -> DecoderWeights:
    """The weights in `model.weights_path`, or this rank's part of them, rounded to `dtype`, then quantised.

    Those of a changed model are made of the original's.

    Raises PerfmodelError for models that our decoder would not compute as their makers do; SpecError for a file that
    lacks a tensor or has one of another shape; MissingExtraError.
    """
    if model.changed_from is None:
        return _served(*_weights_of(model, dtype, device), model, group)
    around, layers = _weights_of(model.changed_from.original, dtype, device)
    changed = changed_weights(replace(around, layers=list(layers)), model.changed_from)
    return _served(changed, changed.layers, model, group)


def _served(
    weights: DecoderWeights, layers: Iterable[LayerWeights], model: ModelSpec, group: TensorGroup
) -> DecoderWeights:
    """This rank's part, quantised layer by layer, so that only one is held in full unless all are already."""
    embedding = shard_rows(weights.embedding, group)
    head = embedding if model.tie_word_embeddings else shard_rows(weights.lm_head, group)
    quantize = layer_quantizer(model)
    pairs = zip(islice(layers, model.num_distinct_layers), model.iter_layers(), strict=False)
    held = [quantize(shard_layer_weights(layer, spec, group), spec) for layer, spec in pairs]
    return DecoderWeights(embedding, head, weights.final_norm, used_in_turn(held, model.num_layers))


def _weights_of(
    model: ModelSpec, dtype: torch.dtype, device: torch.device
) -> tuple[DecoderWeights, Iterator[LayerWeights]]:
    """What is in the model's file: around the layers, and the layers, each read when it is asked for."""
    assert model.weights_path is not None
    path = Path(model.weights_path)
    _check_family(model, path)
    reader = _Reader(open_tensors(path, model.model_type), path, dtype, device)
    table = (model.vocab_size, model.hidden_size)
    embedding = reader.tensor("embedding", *table)
    head = embedding if model.tie_word_embeddings else reader.tensor("lm_head", *table)
    layers = (_layer(reader, model, layer, index) for index, layer in enumerate(model.iter_layers()))
    return DecoderWeights(embedding, head, reader.tensor("final_norm", model.hidden_size)), layers


class _Reader:
    """Tensors of known shapes, on the device and in the dtype of the decoder."""

    def __init__(self, file: TensorFile, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._file = file
        self._path = path
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str, *shape: int, layer: int = 0, kind: str = "weight", num_heads: int = 1) -> Tensor:
        found = self._file.get(name, layer, kind, num_heads)
        if found.shape != shape:
            raise SpecError(
                f"{self._path}: {name} {kind} of layer {layer} has the shape {tuple(found.shape)}, but the model's is "
                f"{shape}."
            )
        return found.to(self._device, self._dtype)


def _layer(reader: _Reader, model: ModelSpec, layer: Layer, index: int) -> LayerWeights:
    assert isinstance(layer.mixer, Attention)
    assert isinstance(layer.ffn, DenseFFN)
    tensor, hidden = partial(reader.tensor, layer=index), model.hidden_size
    return LayerWeights(
        mixer_norm=tensor("mixer_norm", hidden),
        ffn_norm=tensor("ffn_norm", hidden),
        mixer=_attention(reader, hidden, layer.mixer, index),
        ffn=_dense(reader, hidden, layer.ffn, index),
    )


def _dense(reader: _Reader, hidden: int, ffn: DenseFFN, index: int) -> FFNWeights:
    tensor, width = partial(reader.tensor, layer=index), ffn.intermediate_size
    return FFNWeights(
        up=torch.cat((tensor("gate", width, hidden), tensor("up", width, hidden))),
        down=tensor("down", hidden, width),
        up_bias=torch.cat([tensor(name, width, kind="bias") for name in ("gate", "up")]) if ffn.bias else None,
        down_bias=tensor("down", hidden, kind="bias") if ffn.bias else None,
    )


def _attention(reader: _Reader, hidden: int, mixer: Attention, index: int) -> AttentionWeights:
    tensor = partial(reader.tensor, layer=index)
    heads = {"q": mixer.num_heads, "k": mixer.num_kv_heads, "v": mixer.num_kv_heads}
    dims = {"q": mixer.head_dim, "k": mixer.head_dim, "v": mixer.v_head_dim}

    def stacked(kind: str, *columns: int) -> Tensor:
        return torch.cat([tensor(name, n * dims[name], *columns, kind=kind, num_heads=n) for name, n in heads.items()])

    return AttentionWeights(
        qkv=stacked("weight", hidden),
        out=tensor("out", hidden, mixer.num_heads * mixer.v_head_dim),
        qkv_bias=stacked("bias") if mixer.qkv_bias else None,
        out_bias=tensor("out", hidden, kind="bias") if mixer.out_bias else None,
        q_norm=tensor("q_norm", mixer.head_dim) if mixer.qk_norm else None,
        k_norm=tensor("k_norm", mixer.head_dim) if mixer.qk_norm else None,
    )


def _check_family(model: ModelSpec, path: Path) -> None:
    reason = None
    if model.model_type not in _FAMILIES:
        reason = f"weights of {model.model_type} models are not loaded yet (those of {', '.join(_FAMILIES)} are)"
    elif model.rope_scaling is not None:
        reason = f"{model.rope_scaling} scaling of rotary frequencies is not executed yet"
    elif any(not isinstance(layer.ffn, DenseFFN) or not layer.ffn.gated for layer, _ in model.layers):
        reason = "feed-forward blocks other than gated dense ones are not loaded yet"
    if reason:
        raise PerfmodelError(f"{path.name}: {reason}; execute the model's config.json, with random weights.")

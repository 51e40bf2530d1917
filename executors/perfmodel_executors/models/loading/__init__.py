"""A decoder's weights from a file: projections that we compute as one product are laid one after the other."""

__all__ = ["load_weights"]


from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.executed import FAMILIES
from perfmodel.models.spec import ModelSpec
from perfmodel_executors.kernels.weight_formats import GgufWeight
from perfmodel_executors.models.changed import changed_weights
from perfmodel_executors.models.loading.blocks import feed_forward_weights, mixer_weights
from perfmodel_executors.models.loading.files import Reader
from perfmodel_executors.models.quantized import keeps_format
from perfmodel_executors.models.weights import DecoderWeights, LayerWeights
from perfmodel_executors.parallel.group import TensorGroup
from perfmodel_executors.parallel.sharding import held_weights

# Whose GGUF files are read: their norms are stored as multiplied by, and their experts have no names of their own.
_FROM_GGUF = ("llama", "mistral", "qwen2", "qwen3")


def load_weights(model: ModelSpec, dtype: torch.dtype, device: torch.device, group: TensorGroup) -> DecoderWeights:
    """The weights in `model.weights_path`, or this rank's part, rounded to `dtype`, then quantised; of a changed model
    made of the original's. Raises PerfmodelError for models that our decoder would not compute as their makers do;
    SpecError for a file that lacks a tensor or has one of another shape; MissingExtraError."""
    if model.changed_from is None:
        keeps = group.size == 1 and keeps_format(model)
        return held_weights(*_weights_of(model, dtype, device, keeps), model, group)
    around, layers = _weights_of(model.changed_from.original, dtype, device, keeps_format=False)
    changed = changed_weights(replace(around, layers=list(layers)), model.changed_from)
    return held_weights(changed, changed.layers, model, group)


def _weights_of(
    model: ModelSpec, dtype: torch.dtype, device: torch.device, keeps_format: bool
) -> tuple[DecoderWeights, Iterator[LayerWeights]]:
    """What is in the model's file: around the layers, and the layers, each read when it is asked for."""
    assert model.weights_path is not None
    path = Path(model.weights_path)
    known = _FROM_GGUF if path.suffix == ".gguf" else FAMILIES
    if model.model_type not in known:
        raise PerfmodelError(
            f"{path.name}: weights of {model.model_type} models are not loaded yet (those of {', '.join(known)} are); "
            f"execute the model's config.json, with random weights."
        )
    reader = Reader(path, dtype, device, model, keeps_format)
    table = (model.vocab_size, model.hidden_size)
    embedding = reader.matrix("embedding", *table)
    head = embedding if model.tie_word_embeddings else reader.matrix("lm_head", *table)
    assert isinstance(embedding, Tensor | GgufWeight)
    assert isinstance(head, Tensor | GgufWeight)
    return DecoderWeights(embedding, head, reader.norm("final_norm", 0, model.hidden_size)), _layers(reader, model)


def _layers(reader: Reader, model: ModelSpec) -> Iterator[LayerWeights]:
    """Each layer in turn. Raises SpecError after the last for tensors of the file that none of them has read."""
    for index, layer in enumerate(model.iter_layers()):

        def norm(name: str, wanted: bool, index: int = index) -> Tensor | None:
            return reader.norm(name, index, model.hidden_size) if wanted else None

        has_mixer, has_ffn = layer.mixer is not None, layer.ffn is not None
        yield LayerWeights(
            mixer_norm=norm("mixer_norm", has_mixer and model.pre_norms),
            ffn_norm=norm("ffn_norm", has_ffn and model.pre_norms),
            mixer=None if layer.mixer is None else mixer_weights(reader, layer.mixer, index),
            ffn=None if layer.ffn is None else feed_forward_weights(reader, layer.ffn, index),
            mixer_post_norm=norm("mixer_post_norm", has_mixer and model.post_norms),
            ffn_post_norm=norm("ffn_post_norm", has_ffn and model.post_norms),
        )
    reader.check_all_read()

"""A model with other layers: what every change of structure ends in."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby

from perfmodel.errors import SpecError
from perfmodel.models.architecture import Attention, Layer, Mixer
from perfmodel.models.spec import ModelSpec


def with_layers(model: ModelSpec, layers: Iterable[Layer]) -> ModelSpec:
    """`model` with `layers` instead of its own; the very same model where these are equal.

    A model of another structure is no published one, and no file has its weights.
    """
    runs = tuple((layer, len(list(group))) for layer, group in groupby(layers))
    if runs == tuple((layer, len(list(group))) for layer, group in groupby(model.iter_layers())):
        return model
    return replace(model, layers=runs, published_params=None, weights_path=None)


def with_mixers(model: ModelSpec, change: Callable[[Mixer, int], Mixer]) -> ModelSpec:
    """`model` with each layer's mixer as `change` makes it of the mixer and its place among the mixers."""
    layers, place = [], 0
    for layer in model.iter_layers():
        if layer.mixer is not None:
            layer, place = replace(layer, mixer=change(layer.mixer, place)), place + 1
        layers.append(layer)
    return with_layers(model, layers)


def plain_attention(model: ModelSpec, wanted: str) -> list[Attention]:
    """The model's softmax attention. Raises SpecError, with what is `wanted` of it, where there is none."""
    found = [layer.mixer for layer, _ in model.layers if isinstance(layer.mixer, Attention)]
    if not found:
        kinds = sorted({type(layer.mixer).__name__ for layer, _ in model.layers if layer.mixer is not None})
        raise SpecError(
            f"found {model.name}, whose mixers are {' and '.join(kinds) or 'none'}; {wanted} needs layers with plain "
            f"attention (MHA, GQA or MQA), take another model or leave it out."
        )
    return found

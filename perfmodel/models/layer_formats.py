"""`engine.quantization_by_layer`: number formats of single layers, or of blocks in them, instead of the model's."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from pydantic import Field

from perfmodel.errors import SpecError
from perfmodel.files.base import Spec
from perfmodel.models.architecture import QuantizationSpec
from perfmodel.models.number_formats import with_quantization
from perfmodel.models.params import layer_parameters, stored_bytes
from perfmodel.models.spec import ModelSpec, layer_runs

Block = Literal["attention", "linear_attention", "dense_ffn", "experts", "shared_experts"]
BLOCKS: tuple[Block, ...] = get_args(Block)


class LayerQuantization(Spec):
    """One rule; of several that a layer's block falls under, the last one holds.

    layers:       from 0, negative ones from the end; None: all
    components:   the blocks of these layers that it is about; empty: all that `quantization` does not keep as they are
    quantization: as `engine.quantization`; none: in the model's dtype
    group_size:   as `engine.quantization_group_size`"""

    layers: tuple[int, ...] | None = None
    components: tuple[Block, ...] = ()
    quantization: str = Field(min_length=1)
    group_size: Literal[-1, 32, 64, 128, 256] | None = None


def with_layer_formats(model: ModelSpec, rules: Sequence[LayerQuantization]) -> ModelSpec:
    """`model` with the formats that `rules` give to layers; the later of two rules holds. Without rules, as it is.

    Raises SpecError for a layer or a format that is not there, and for layers that share their weights."""
    if not rules:
        return model
    if model.num_distinct_layers is not None:
        raise SpecError(
            f"engine.quantization_by_layer: is set with {model.name}, whose layers share the weights of "
            f"{model.num_distinct_layers}; set engine.quantization for all of them."
        )
    formats: list[dict[str, QuantizationSpec]] = [{} for _ in range(model.num_layers)]
    for rule in rules:
        try:
            plain = replace(model, quantization=QuantizationSpec())
            wanted = with_quantization(plain, rule.quantization, rule.group_size).quantization
        except SpecError as error:
            raise SpecError(f"engine.quantization_by_layer: {error}") from None
        chosen = rule.components or [block for block in BLOCKS if block not in wanted.kept]
        for index in _places(model, rule):
            formats[index] |= dict.fromkeys(chosen, replace(wanted, kept=frozenset()))
    layers = []
    for layer, own in zip(model.iter_layers(), formats, strict=True):
        held = layer_parameters(model, layer)
        own_formats = tuple((name, own[name]) for name in BLOCKS if name in held and name in own)
        layers.append(replace(layer, formats=own_formats))
    return replace(model, layers=layer_runs(layers))


def bits_per_weight(model: ModelSpec) -> float:
    """Mean bits of a weight in the blocks of all layers, scales included; embedding, LM head and norms do not count."""
    bits = total = 0.0
    for layer, count in model.layers:
        for name, params in layer_parameters(model, layer).items():
            if name in BLOCKS:
                bits += 8 * count * params * stored_bytes(model, name, layer)
                total += count * params
    return bits / total


def _places(model: ModelSpec, rule: LayerQuantization) -> list[int]:
    count = model.num_layers
    if rule.layers is None:
        return list(range(count))
    for index in rule.layers:
        if not -count <= index < count:
            raise SpecError(
                f"engine.quantization_by_layer: got layer {index}, but {model.name} has layers 0 to {count - 1} "
                f"(or -1 to -{count}, from the end)."
            )
    return [index % count for index in rule.layers]

"""`engine.quantization_by_layer`: number formats of some layers, or of some of their blocks, instead of the model's."""

__all__ = ["BLOCKS", "LayerQuantization"]

from typing import Literal

from pydantic import Field

from perfmodel.specs.base import Spec

Block = Literal["attention", "linear_attention", "dense_ffn", "experts", "shared_experts"]
BLOCKS: tuple[Block, ...] = ("attention", "linear_attention", "dense_ffn", "experts", "shared_experts")


class LayerQuantization(Spec):
    """One rule; of several that a layer's block falls under, the last one holds.

    layers:       from 0, negative ones from the end; None: all
    components:   the blocks of these layers that it is about; empty: all that `quantization` does not keep as they are
    quantization: as `engine.quantization`; none: in the model's dtype
    group_size:   as `engine.quantization_group_size`
    """

    layers: tuple[int, ...] | None = None
    components: tuple[Block, ...] = ()
    quantization: str = Field(min_length=1)
    group_size: Literal[-1, 32, 64, 128, 256] | None = None

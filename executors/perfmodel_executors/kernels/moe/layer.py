"""What the experts of a layer compute: their matrices, plain or in fewer bits, and what lies between."""

# ruff: noqa: N815 (fields carry the suffix of their shape, like the variables)

__all__ = ["ExpertLayer"]

from dataclasses import dataclass

from torch import Tensor

from perfmodel_executors.kernels.weight_formats.experts import ExpertWeight


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """down(act(up(x))) for each expert, in the activations of a `Kernels.activate`.

    up_EFC:       [gate | up] if gated, which is twice as wide as what `down` reads
    down_ECI:     back to the width of x
    activation:   by its name in a model card
    gated:        whether the activated half of `up` multiplies the other
    up_bias_EF, down_bias_EC: added behind either product (gpt-oss); None: without
    """

    up_EFC: Tensor | ExpertWeight
    down_ECI: Tensor | ExpertWeight
    activation: str = "silu"
    gated: bool = True
    up_bias_EF: Tensor | None = None
    down_bias_EC: Tensor | None = None

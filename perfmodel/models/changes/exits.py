"""Tokens that leave before the last layer."""

__all__ = ["with_early_exit"]

from dataclasses import replace
from itertools import accumulate

from perfmodel.errors import SpecError
from perfmodel.models.architecture import Attention, DenseFFN, LatentAttention
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.spec import ExitSpec, ModelSpec


def with_early_exit(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """The share of decoded tokens that reaches each layer (CALM, Schuster et al. 2022)."""
    early = changes.early_exit
    assert early is not None
    for layer, _ in model.layers:
        for block, known in ((layer.mixer, Attention | LatentAttention), (layer.ffn, DenseFFN)):
            if block is not None and not isinstance(block, known):
                raise SpecError(
                    f"found a model with {type(block).__name__}; what its skipped layers would still have to do is not "
                    f"described, take a model of attention and dense feed-forward blocks."
                )
    num_layers = model.num_layers
    if early.expected_share is not None:
        reach = _evenly(early.expected_share, num_layers)
    else:
        leave = early.exit_probabilities or ()
        if len(leave) != num_layers:
            raise SpecError(f"found {len(leave)} exit_probabilities for {num_layers} layers; give one for each.")
        reach = tuple(max(0.0, 1.0 - gone) for gone in (0.0, *accumulate(leave[:-1])))
    if min(reach) == 1:
        return model
    return replace(model, exits=ExitSpec(reach, early.confidence == "softmax"))


def _evenly(share: float, num_layers: int) -> tuple[float, ...]:
    """Reaches (1 - h)^i whose mean is `share`: behind each layer the share h of those that are there leaves.

    The first layer is always passed, so that the least share is one layer's.
    """
    if share == 1 or num_layers == 1:
        return (1.0,) * num_layers
    if share * num_layers < 1:
        raise SpecError(
            f"found expected_share={share:g} of {num_layers} layers, less than one; take at least {1 / num_layers:.3g}."
        )
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection: the mean grows with the share that stays
        stay = (low + high) / 2
        is_below = sum(stay**i for i in range(num_layers)) < share * num_layers
        low, high = (stay, high) if is_below else (low, stay)
    return tuple(high**i for i in range(num_layers))

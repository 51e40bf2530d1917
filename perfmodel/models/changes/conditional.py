"""Conditional computation: mixtures of experts; tokens that leave before the last layer."""

from dataclasses import replace
from itertools import accumulate

from perfmodel.errors import SpecError
from perfmodel.models.architecture import Attention, DenseFFN, LatentAttention, MoEFFN
from perfmodel.models.changes.rebuilt import with_layers
from perfmodel.models.model_changes import Experts, ModelChanges
from perfmodel.models.spec import ExitSpec, ModelSpec


def moefied(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Dense feed-forward blocks as `num_experts` experts of 1 / `num_experts` of their width, `top_k` per token.

    Source: MoEfication, Zhang et al. 2022.
    """
    moefy = changes.moefy
    assert moefy is not None
    found = [layer.ffn for layer, _ in model.layers if isinstance(layer.ffn, DenseFFN)]
    if not found:
        raise SpecError(f"found {model.name}, which has no dense feed-forward block to split; leave it out.")
    for ffn in found:
        if ffn.intermediate_size % moefy.num_experts:
            raise SpecError(
                f"found num_experts={moefy.num_experts} for blocks of {ffn.intermediate_size} columns; take a divisor "
                f"of {ffn.intermediate_size}."
            )
        if ffn.up_rank is not None:
            raise SpecError("found beside low_rank of dense_ffn; experts are not factored, leave one of them out.")

    def split(ffn: DenseFFN) -> MoEFFN:
        return MoEFFN(
            num_experts=moefy.num_experts,
            top_k=moefy.top_k,
            intermediate_size=ffn.intermediate_size // moefy.num_experts,
            gated=ffn.gated,
            activation=ffn.activation,
            bias=ffn.bias,
        )

    layers = (
        replace(layer, ffn=split(layer.ffn)) if isinstance(layer.ffn, DenseFFN) else layer
        for layer in model.iter_layers()
    )
    return with_layers(model, layers)


def with_experts(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Mixtures with another number of experts, of them per token, or of shared width.

    Source: Dai et al. 2024 (DeepSeekMoE), section 3.1, for experts that are split.
    """
    experts = changes.experts
    assert experts is not None
    if not any(isinstance(layer.ffn, MoEFFN) for layer, _ in model.layers):
        raise SpecError(
            f"found {model.name}, which has no mixture of experts; take another model, or split its dense blocks with "
            f"model_changes.moefy."
        )
    layers = (
        replace(layer, ffn=_reshaped(layer.ffn, experts)) if isinstance(layer.ffn, MoEFFN) else layer
        for layer in model.iter_layers()
    )
    return with_layers(model, layers)


def _reshaped(ffn: MoEFFN, experts: Experts) -> MoEFFN:
    num_experts, top_k = experts.num_experts or ffn.num_experts, experts.top_k or ffn.top_k
    if top_k > num_experts:
        raise SpecError(f"found top_k={top_k} of {num_experts} experts; lower it, or raise num_experts.")
    if num_experts % ffn.num_groups:
        raise SpecError(f"found {num_experts} experts in {ffn.num_groups} groups; take a multiple of the groups.")
    split, width = experts.split or 1, ffn.intermediate_size
    if width % split:
        raise SpecError(f"found split={split} for experts of {width} columns; take a divisor of {width}.")
    shared = experts.shared_intermediate_size
    return replace(
        ffn,
        num_experts=num_experts * split,
        top_k=top_k * split,
        intermediate_size=width // split,
        shared_intermediate_size=ffn.shared_intermediate_size if shared is None else shared,
        shared_gate=ffn.shared_gate and shared != 0,
    )


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

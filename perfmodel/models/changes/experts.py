"""Mixtures of experts: of dense blocks, or of another shape than the model's."""

__all__ = ["moefied", "with_experts"]

from dataclasses import replace

from perfmodel.errors import SpecError
from perfmodel.models.architecture import DenseFFN, MoEFFN
from perfmodel.models.changes.rebuilt import with_layers
from perfmodel.models.model_changes import Experts, ModelChanges
from perfmodel.models.spec import ModelSpec


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

"""What a cached token takes: number formats by its age, and how many tokens eviction leaves of a sequence."""

from dataclasses import replace
from typing import NamedTuple

from perfmodel.errors import SpecError
from perfmodel.models.architecture import Attention, Layer
from perfmodel.models.number_formats import kv_element_bytes
from perfmodel.models.spec import ModelSpec

# Vector instructions that make a 16-bit number of a cached integer: conversion and multiply-add for a byte; shift and
# mask before that below. An assumption: kernels that unpack in pairs or by permutation need up to half as many.
_UNPACK = {"int8": 2.0, "int4": 4.0, "int3": 4.0, "int2": 4.0}
# Without an instruction for it: sign and magnitude apart, shifted to bf16's places, joined, times a power of two.
_WITHOUT_INSTRUCTION = {"fp8": 4.0}


class Surplus(NamedTuple):
    """The newest `tokens` of a sequence take so many bytes and operations more per element than older ones."""

    tokens: int
    num_bytes: float
    operations: float


def unpack_operations(model: ModelSpec) -> float:
    """Vector operations per element of the oldest cached tokens to make a number of it."""
    return _operations(model, model.quantization.kv_cache or "")


def _operations(model: ModelSpec, form: str) -> float:
    return _UNPACK.get(form, _WITHOUT_INSTRUCTION.get(form, 0.0) if model.converts_fp8 else 0.0)


def kv_surplus(model: ModelSpec) -> tuple[Surplus, ...]:
    """What the newest tokens take beyond the next older ones, tier by tier, so that n tokens take per element

    n e + sum over tiers of min(n, tokens) num_bytes     with e of the oldest
    """
    quantization = model.quantization
    oldest = quantization.kv_cache or model.dtype
    forms = [form for _, form in quantization.kv_recent] + [oldest]
    tiers, total = [], 0
    for (tokens, newer), older in zip(quantization.kv_recent, forms[1:], strict=True):
        total += tokens
        more = kv_element_bytes(newer, quantization.kv_group_size) - kv_element_bytes(older, quantization.kv_group_size)
        if more < 0:
            raise SpecError(
                f"engine.kv_tiers: found {older} behind {newer}, which takes less room; older tokens cannot be more "
                f"precise than they were, order the tiers from wide to narrow."
            )
        tiers.append(Surplus(total, more, _operations(model, newer) - _operations(model, older)))
    return tuple(tiers)


def surplus_tokens(model: ModelSpec) -> float:
    """The room that the newest tokens of a long sequence take beyond older ones, in tokens of the oldest format."""
    surplus = kv_surplus(model)
    if not surplus:
        return 0.0
    quantization = model.quantization
    each = kv_element_bytes(quantization.kv_cache or model.dtype, quantization.kv_group_size)
    return sum(tier.tokens * tier.num_bytes for tier in surplus) / each


def with_eviction(model: ModelSpec, num_tokens: int, num_recent: int = 0) -> ModelSpec:
    """The model with `num_tokens` kept of each sequence in every layer of plain attention that keeps all of them, the
    `num_recent` newest among them.

    Raises SpecError where there is no such layer.
    """
    layers = tuple((_evicting(layer, num_tokens, num_recent), count) for layer, count in model.layers)
    if not any(isinstance(layer.mixer, Attention) and layer.mixer.evicts_to for layer, _ in layers):
        raise SpecError(
            f"engine.kv_eviction: {model.name} has no layer of plain attention that keeps all keys (latents are scored "
            f"through what they are expanded to, windows evict by age); leave kv_eviction out."
        )
    return replace(model, layers=layers)


def _evicting(layer: Layer, num_tokens: int, num_recent: int) -> Layer:
    mixer = layer.mixer
    if not isinstance(mixer, Attention) or mixer.span is not None or mixer.sparsity is not None:
        return layer
    return replace(layer, mixer=replace(mixer, evicts_to=num_tokens, num_recent_tokens=num_recent, is_rolling=True))

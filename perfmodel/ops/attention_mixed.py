"""Prompts and decodes in one varlen kernel, as FlashAttention-2 runs a step that has both."""

__all__ = ["mixed_attention"]

from collections.abc import Sequence
from dataclasses import replace

from perfmodel.ops.attention_decode import attention_decode
from perfmodel.ops.attention_prefill import Heads, flash_prefill
from perfmodel.ops.extents import DecodeExtent, MixedExtent, PrefillExtent
from perfmodel.ops.ragged import ContextSpread
from perfmodel.ops.work import Work


def mixed_attention(
    prefills: Sequence[tuple[int, int]],
    num_decodes: int,
    context: float,
    heads: Heads,
    *,
    queries: float = 1.0,
    spread: ContextSpread | None = None,
    name: str = "attention_mixed",
) -> Work:
    """The work of `flash_prefill(prefills)` and `attention_decode(num_decodes, context)` together, in one launch.

    `queries`: new tokens of each decode.
    Only batches that have both are mixed: without a prompt or without a decode there is no work here.
    """
    if not prefills or not num_decodes:
        return Work(name, "attention_mixed", rate=heads.dtype, num_kernels=0)
    prompts = flash_prefill(prefills, heads)
    decodes = attention_decode(num_decodes, context, heads, queries=queries, spread=spread)
    assert isinstance(prompts.extent, PrefillExtent)
    assert isinstance(decodes.extent, DecodeExtent)
    return replace(
        prompts,
        name=name,
        family="attention_mixed",
        flops=prompts.flops + decodes.flops,
        activation_bytes=prompts.activation_bytes + decodes.activation_bytes,
        kv_bytes=prompts.kv_bytes + decodes.kv_bytes,
        extent=MixedExtent(prompts.extent, decodes.extent),
    )

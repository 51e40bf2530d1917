"""Which settings of the KV cache exclude each other."""

__all__ = ["HAS_GROUPS", "refuse_kv_conflicts"]

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfmodel.specs.engine import EngineSpec

HAS_GROUPS = ("int8", "int4", "int3", "int2")  # formats whose elements may share scales in groups


def refuse_kv_conflicts(engine: "EngineSpec") -> None:
    """Raises ValueError with one sentence for the first conflict."""
    for sentence in _conflicts(engine):
        raise ValueError(sentence)


def _conflicts(engine: "EngineSpec") -> Iterator[str]:
    used = [name for name in ("kv_tiers", "kv_eviction", "kv_offload") if getattr(engine, name)]
    used += ["kv_cache_residual_tokens"] if engine.kv_cache_residual_tokens else []
    if engine.kv_cache == "off" and used:
        yield f"found {used[0]} with kv_cache=off, which keeps no keys and values; leave one of them out"
    if engine.kv_cache == "contiguous" and engine.kv_offload:
        yield (
            "found kv_offload with kv_cache=contiguous, whose requests keep their reservation until they are done, so "
            "that nothing would ever be moved; use kv_cache=paged"
        )
    yield from _conflicts_with_drafts(engine)
    if engine.kv_tiers:
        yield from _conflicts_of_tiers(engine)
    elif engine.kv_cache_residual_tokens and engine.kv_cache_dtype == "auto":
        yield (
            f"found kv_cache_residual_tokens={engine.kv_cache_residual_tokens} with kv_cache_dtype=auto, where all "
            f"tokens are in the model's dtype; name the format of the older ones, as in int4"
        )
    formats = [tier.dtype for tier in engine.kv_tiers] or [engine.kv_cache_dtype]
    if engine.kv_cache_group_size is not None and not any(name in HAS_GROUPS for name in formats):
        yield (
            f"found kv_cache_group_size={engine.kv_cache_group_size} with kv_cache_dtype={formats[-1]}, which has no "
            f"scales in groups; leave it out, or use one of {', '.join(HAS_GROUPS)}"
        )


def _conflicts_with_drafts(engine: "EngineSpec") -> Iterator[str]:
    if engine.speculative_config is None:
        return
    if engine.kv_cache == "off":
        yield (
            "found speculative_config with kv_cache=off, where every step computes all tokens of a sequence, drafted "
            "ones with them; keep the KV cache"
        )
    if engine.kv_eviction is not None:
        yield (
            "found speculative_config with kv_eviction; a drafted token that turns out wrong has evicted others and "
            "counted in their scores by then, which cannot be taken back: leave one of them out"
        )


def _conflicts_of_tiers(engine: "EngineSpec") -> Iterator[str]:
    if engine.kv_cache_dtype != "auto" or engine.kv_cache_residual_tokens:
        other = "kv_cache_residual_tokens" if engine.kv_cache_residual_tokens else "kv_cache_dtype"
        yield f"found kv_tiers beside {other}, which say the same in two ways; leave {other} out"
    *newer, oldest = engine.kv_tiers
    if oldest.tokens is not None:
        yield f"kv_tiers: found tokens={oldest.tokens} in the last tier, which takes all older tokens; leave it out"
    if any(tier.tokens is None for tier in newer):
        yield "kv_tiers: found a tier without tokens before the last; only the last takes all older tokens"

"""Engines that return a vector or scores of a prompt instead of text (vLLM's `--runner pooling`): what they make of the
model, their defaults, and what they do not do.

Source: vllm 0.30.0, config/model.py (`is_chunked_prefill_supported`, `is_prefix_caching_supported`), config/vllm.py (no
asynchronous scheduling)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perfmodel.files.yaml_loader import Path
from perfmodel.models.spec import ModelSpec, Pooling
from perfmodel.specs.cluster import PoolSpec
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.traffic import Traffic

_POOLING: Mapping[str, Pooling] = {"LAST": "last", "CLS": "cls", "MEAN": "mean"}  # by vLLM's names
_NUM_LABELS = 2  # of a model whose file names none: transformers' PretrainedConfig


def with_pooling(model: ModelSpec, engine: EngineSpec) -> ModelSpec:
    """`model` as the runner of `engine` serves it: a model of text may give its states instead."""
    if engine.runner == "generate" or (engine.runner == "auto" and model.pooling is None):
        return model
    given, labels = engine.pooler_config, {"embed": 0, "classify": model.num_labels or _NUM_LABELS}
    pooling = _POOLING[given.pooling_type] if given is not None else model.pooling or "last"
    given_labels = labels.get(engine.convert, model.num_labels)
    return replace(model, pooling=pooling, num_labels=given_labels, tie_word_embeddings=True)


def pooling_defaults(model: ModelSpec, engine: EngineSpec) -> Mapping[str, Any]:
    """Arguments of the engine where a scenario gives none; empty for text.

    A state other than the last needs all of its prompt in one step; where tokens see what comes after them, nothing can
    be cached."""
    if model.pooling is None:
        return {}
    defaults: dict[str, Any] = {"async_scheduling": False} if engine.rules.pools_synchronously else {}
    if model.is_encoder or model.pooling != "last":
        defaults |= {"enable_chunked_prefill": False, "enable_prefix_caching": False}
    return defaults | ({"kv_cache": "off"} if model.is_encoder else {})


def pooling_refusals(model: ModelSpec, engine: EngineSpec) -> Iterator[tuple[str, str, str]]:
    """(field, reason, sentence) for what does not go with `model`, as served by `engine`."""
    name, reason = model.name, "pooling"
    if model.pooling is None:
        for field in ("pooler_config", "convert"):
            if field in engine.model_fields_set and getattr(engine, field) not in (None, "auto"):
                yield field, reason, f"got {field} for {name}, which generates text; set engine.runner to pooling"
        return
    if engine.runner == "generate":
        yield "runner", reason, f"got generate, and {name} returns a vector or scores, no text; leave it out"
    whole = [field for field in ("enable_chunked_prefill", "enable_prefix_caching") if getattr(engine, field)]
    if whole and engine.kv_cache != "off" and pooling_defaults(model, engine).get(whole[0]) is False:
        why = f"{model.pooling} pooling needs all states of a prompt in one step"
        yield whole[0], reason, f"got true for {name}, and {why}; leave it out"
    if model.is_encoder and engine.kv_cache != "off":
        yield "kv_cache", reason, f"got {engine.kv_cache} for {name}, whose tokens see both ways; leave it out"
    kept = [field for field in ("kv_offload", "kv_eviction", "kv_tiers") if getattr(engine, field)]
    if model.is_encoder and kept:
        yield kept[0], reason, f"got {kept[0]} for {name}, which keeps no keys and values; leave it out"
    if engine.speculative_config is not None:
        yield "speculative_config", reason, f"got drafts for {name}, which generates no tokens; leave it out"
    if model.is_encoder and engine.flash_attn_version is not None:
        sentence = f"got {engine.flash_attn_version} for {name}: of generations of FlashAttention causal attention is"
        yield "flash_attn_version", reason, f"{sentence} modelled; leave it out"


def answer_conflicts(traffic: Traffic, model: ModelSpec, pools: Sequence[PoolSpec]) -> Iterator[tuple[Path, str]]:
    """(field, sentence) for traffic with answers of a model without, or the other way; `model` and `pools` as served.

    Without answers, what a request gets counts as one token that comes with its prompt's last step."""
    name, is_text = model.name, model.pooling is None
    if is_text and traffic.trace is None and traffic.output_tokens is None:
        yield ("traffic",), "needs output_tokens, or a trace"
    for other in (pool.model for pool in pools if pool.model is not None and pool.model.pooling != model.pooling):
        second = other.name if other.name != name else "the same model"
        yield (
            ("cluster", "pools"),
            f"got {name} and {second} with different kinds of answers, and a server gives one kind: simulate text and "
            f"vectors as two scenarios, each on GPUs, or MIG slices of one, of its own",
        )
    if is_text:
        return
    of_text = {
        "conversations": traffic.has_conversations,
        "rollouts": traffic.rollouts is not None,
        "samples_per_prompt": traffic.samples_per_prompt > 1,
    }
    for field in (field for field, is_given in of_text.items() if is_given):
        yield ("traffic", field), f"got {field} with {name}, which returns no text; leave it out"
    if any(pool.role != "unified" for pool in pools):
        yield ("cluster", "pools"), f"got prefill and decode pools for {name}, whose requests only have prompts"

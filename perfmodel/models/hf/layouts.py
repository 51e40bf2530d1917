"""Which mixer and which feed-forward each layer has, from whatever the file uses to say so.

Written patterns come first (`block_configs`, `hybrid_override_pattern`, `layer_types`, ...), then periods and
offsets, then the rule of the family.
"""

from collections.abc import Callable
from typing import Any

from perfmodel.models.architecture import FeedForward, Layer, Mixer
from perfmodel.models.hf.blocks import (
    attention,
    dense_ffn,
    gated_delta_net,
    is_moe_layer,
    latent_attention,
    mamba,
    moe_ffn,
    num_experts,
)
from perfmodel.models.hf.families import Family
from perfmodel.models.hf.fields import Fields

_NOT_MODELLED = {
    "linear_attn_config": "Kimi delta attention",
    "rwkv_version": "RWKV",
    "lru_width": "recurrent (RG-LRU) layers",
    "cross_attention_layers": "cross-attention to images",
}
_SCANS = ("mamba", "mamba2", "falcon_mamba")
# Words of `layer_types` -> kinds of mixers.
_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "hybrid": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "mamba": "mamba",
}
# Words of Nemotron-H's layers -> letters of its pattern.
_LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E", "linear_attention": "M", "full_attention": "*"}


def decoder_layers(fields: Fields, family: Family) -> list[Layer]:
    """All decoder layers in order; multi-token-prediction layers are not among them."""
    for name, what in _NOT_MODELLED.items():
        if fields.get(name):
            raise fields.error(f"{name}: {what} is not modelled.")
    if fields.has("block_configs"):
        return [_searched_block(fields, family, block) for block in fields.items("block_configs")]
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None and fields.model_type == "nemotron_h":
        pattern = "".join(_LETTERS.get(str(word), "?") for word in fields.items("layers_block_type")) or None
    if pattern is not None:
        return _lettered_layers(fields, family, pattern)
    num_layers = fields.integer("num_hidden_layers")
    kinds = [
        (_kind(fields, family, index, num_layers), _uses_rope(fields, index, num_layers)) for index in range(num_layers)
    ]
    mixers = {kind: _mixer(fields, family, *kind) for kind in dict.fromkeys(kinds)}
    ffns: list[FeedForward | None] = [None] * num_layers
    if fields.model_type not in _SCANS and not num_experts(fields):
        ffns = [dense_ffn(fields, family)] * num_layers
    elif fields.model_type not in _SCANS:
        moe = moe_ffn(fields, family)
        has_experts = [is_moe_layer(fields, index, num_layers) for index in range(num_layers)]
        dense = None if all(has_experts) else dense_ffn(fields, family)
        ffns = [moe if is_sparse else dense for is_sparse in has_experts]
    layers = [Layer(mixers[kind], ffn) for kind, ffn in zip(kinds, ffns, strict=True)]
    if fields.model_type == "falcon_h1":  # a scan and an attention side by side: written one after the other
        return [half for layer in layers for half in (Layer(mamba(fields), None), layer)]
    return layers


def _kind(fields: Fields, family: Family, index: int, num_layers: int) -> str:
    """full | sliding | chunked | latent | linear | mamba."""
    if fields.has("kv_lora_rank"):
        return "latent"
    if fields.model_type in _SCANS:  # some carry num_attention_heads all the same
        return "mamba"
    words = fields.per_layer("layer_types", num_layers) or fields.per_layer("layers_block_type", num_layers)
    if words is not None:
        word = str(words[index])
        if word not in _KINDS:
            raise fields.error(f"layer_types: got {word!r}, which is not modelled; known: {', '.join(_KINDS)}.")
        return _KINDS[word]
    hybrid = fields.per_layer("hybrid_layer_pattern", num_layers)  # MiMo-V2: 1 = sliding
    if hybrid is not None:
        return "sliding" if hybrid[index] else "full"
    listed = fields.per_layer("attn_type_list", num_layers)  # MiniMax: 0 = lightning attention
    if listed is not None and not all(listed):
        raise fields.error("attn_type_list: lightning attention (0) is not modelled.")
    if fields.has("full_attention_interval") and fields.has("linear_num_value_heads"):
        return "full" if (index + 1) % fields.integer("full_attention_interval") == 0 else "linear"
    if not fields.has("num_attention_heads"):
        return "mamba" if fields.has("mamba_state_size") else "full"
    if fields.has("attn_layer_indices"):  # Bamba
        return "full" if index in fields.items("attn_layer_indices") else "mamba"
    if fields.has("attn_layer_period"):  # Jamba
        offset = fields.integer("attn_layer_offset", 0, minimum=0)
        return "full" if index % fields.integer("attn_layer_period") == offset else "mamba"
    if fields.has("attention_chunk_size"):
        return "chunked" if _uses_rope(fields, index, num_layers) else "full"
    return "sliding" if _is_sliding(fields, family, index) else "full"


def _is_sliding(fields: Fields, family: Family, index: int) -> bool:
    """A window with a period: every n-th layer is full. Without: all layers (Mistral), or those Qwen names."""
    if not fields.has("sliding_window"):
        return False
    period = fields.optional("sliding_window_pattern") or family.sliding_window_pattern
    if period is not None:
        return (index + 1) % period != 0
    if not fields.flag("use_sliding_window", True):
        return False
    return index >= fields.integer("max_window_layers", 0, minimum=0)


def _uses_rope(fields: Fields, index: int, num_layers: int) -> bool:
    """Llama 4 and SmolLM3: 1 = rotary; a missing list means that every fourth layer has no positions."""
    flags = fields.per_layer("no_rope_layers", num_layers)
    if flags is not None:
        return bool(flags[index])
    if fields.has("attention_chunk_size", "no_rope_layer_interval") and not fields.has("hybrid_layer_pattern"):
        return (index + 1) % fields.integer("no_rope_layer_interval", 4) != 0
    return True


def _mixer(fields: Fields, family: Family, kind: str, use_rope: bool) -> Mixer:
    others: dict[str, Callable[[Fields], Mixer]]
    others = {"latent": latent_attention, "linear": gated_delta_net, "mamba": mamba}
    if kind in others:
        return others[kind](fields)
    window = _span(fields, "sliding_window") if kind == "sliding" else None
    chunk = _span(fields, "attention_chunk_size") if kind == "chunked" else None
    return attention(fields, family, window=window, chunk=chunk, use_rope=use_rope)


def _span(fields: Fields, name: str) -> int | None:
    """A window or chunk in tokens; one that holds the whole context limits nothing."""
    span = fields.integer(name)
    return span if span < fields.integer("max_position_embeddings", span + 1) else None


def _lettered_layers(fields: Fields, family: Family, pattern: Any) -> list[Layer]:
    """Nemotron-H: M a scan, * attention, - dense, E experts; each layer holds one of them."""
    if not isinstance(pattern, str) or set(pattern) - set("M*-E"):
        raise fields.error(f"hybrid_override_pattern: got {pattern!r}; expected the letters M, *, - and E.")
    num_layers = fields.integer("num_hidden_layers", len(pattern))
    if len(pattern) != num_layers:
        raise fields.error(
            f"hybrid_override_pattern has {len(pattern)} letters, but num_hidden_layers is {num_layers}."
        )
    builders = {
        "M": lambda: Layer(mamba(fields), None),
        "*": lambda: Layer(attention(fields, family, use_rope=False), None),
        "-": lambda: Layer(None, dense_ffn(fields, family)),
        "E": lambda: Layer(None, moe_ffn(fields, family)),
    }
    return [builders[letter]() for letter in pattern]


def _searched_block(fields: Fields, family: Family, block: Any) -> Layer:
    """One block of a searched architecture (nemotron-nas): each half may be absent or have its own width.

    A width is int(2 * ffn_mult * d / 3), rounded up to a multiple of 256 (DeciLM's rule).
    """
    mixer = ffn = None
    try:
        mixer_part, ffn_part = block["attention"], block["ffn"]
        if mixer_part.get("replace_with_linear") or ffn_part.get("replace_with_linear"):
            raise fields.error("block_configs: replace_with_linear is not modelled.")
        heads = width = None
        if not mixer_part.get("no_op"):
            heads = fields.integer("num_attention_heads") // int(mixer_part["n_heads_in_group"])
        if not ffn_part.get("no_op"):
            width = int(2 * float(ffn_part["ffn_mult"]) * fields.integer("hidden_size") / 3)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise fields.error(
            f"block_configs: got {block!r}; expected attention.n_heads_in_group and ffn.ffn_mult, or no_op."
        ) from None
    if heads is not None:
        mixer = attention(fields, family, window=mixer_part.get("window_length"), num_kv_heads=heads)
    if width is not None:
        ffn = dense_ffn(fields, family, -(-width // 256) * 256)
    return Layer(mixer, ffn)

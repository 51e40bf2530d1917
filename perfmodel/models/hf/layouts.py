"""Which mixer and which feed-forward each layer has, from whatever the file uses to say so.

Written patterns come first (`block_configs`, `hybrid_override_pattern`, `layer_types`, ...), then periods and
offsets, then the rule of the family.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from perfmodel.errors import SpecError
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


def decoder_layers(fields: Fields, family: Family) -> list[Layer]:
    """All decoder layers in order; multi-token-prediction layers are not among them."""
    for name, what in _NOT_MODELLED.items():
        if fields.get(name):
            raise SpecError(f"{fields.source}: {name}: {what} is not modelled.")
    if fields.has("block_configs"):
        return [_searched_block(fields, family, block) for block in fields.items("block_configs")]
    pattern = _letters(fields)
    if pattern is not None:
        return [_lettered_layer(fields, family, letter) for letter in pattern]
    num_layers = fields.integer("num_hidden_layers")
    kinds = [_kind(fields, family, index, num_layers) for index in range(num_layers)]
    mixers = {kind: _mixer(fields, family, kind) for kind in dict.fromkeys(kinds)}
    ffns = _feed_forwards(fields, family, num_layers)
    layers = [Layer(mixers[kind], ffn) for kind, ffn in zip(kinds, ffns, strict=True)]
    if fields.model_type == "falcon_h1":  # a scan and an attention side by side: written one after the other
        return [half for layer in layers for half in (Layer(mamba(fields), None), layer)]
    return layers


def _feed_forwards(fields: Fields, family: Family, num_layers: int) -> list[FeedForward | None]:
    if fields.model_type in _SCANS:
        return [None] * num_layers
    if not num_experts(fields):
        return [dense_ffn(fields, family)] * num_layers
    moe = moe_ffn(fields, family)
    has_experts = [is_moe_layer(fields, index, num_layers) for index in range(num_layers)]
    dense = None if all(has_experts) else dense_ffn(fields, family)
    return [moe if sparse else dense for sparse in has_experts]


# A layer's kind: (name, uses rotary positions).
_Kind = tuple[str, bool]


def _kind(fields: Fields, family: Family, index: int, num_layers: int) -> _Kind:
    name = _kind_name(fields, family, index, num_layers)
    return name, _uses_rope(fields, index, num_layers)


def _kind_name(fields: Fields, family: Family, index: int, num_layers: int) -> str:
    """full | sliding | chunked | latent | linear | mamba."""
    if fields.has("kv_lora_rank"):
        return "latent"
    if fields.model_type in _SCANS:  # some carry num_attention_heads all the same
        return "mamba"
    kinds = fields.per_layer("layer_types", num_layers) or fields.per_layer("layers_block_type", num_layers)
    if kinds is not None:
        return _named_kind(fields, str(kinds[index]))
    hybrid = fields.per_layer("hybrid_layer_pattern", num_layers)  # MiMo-V2: 1 = sliding
    if hybrid is not None:
        return "sliding" if hybrid[index] else "full"
    listed = fields.per_layer("attn_type_list", num_layers)  # MiniMax: 0 = lightning attention
    if listed is not None and not all(listed):
        raise SpecError(f"{fields.source}: attn_type_list: lightning attention (0) is not modelled.")
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


def _named_kind(fields: Fields, name: str) -> str:
    known = {
        "full_attention": "full",
        "attention": "full",
        "hybrid": "full",
        "sliding_attention": "sliding",
        "chunked_attention": "chunked",
        "linear_attention": "linear",
        "mamba": "mamba",
    }
    if name not in known:
        raise SpecError(
            f"{fields.source}: layer_types: found {name!r}, which is not modelled; known: {', '.join(known)}."
        )
    return known[name]


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


def _mixer(fields: Fields, family: Family, kind: _Kind) -> Mixer:
    name, use_rope = kind
    full = partial(attention, fields, family, use_rope=use_rope)
    window = partial(_span, fields, "sliding_window")
    builders: dict[str, Callable[[], Mixer]] = {
        "full": full,
        "sliding": lambda: full(window=window()),
        "chunked": lambda: full(chunk=_span(fields, "attention_chunk_size")),
        "latent": lambda: latent_attention(fields),
        "linear": lambda: gated_delta_net(fields),
        "mamba": lambda: mamba(fields),
    }
    return builders[name]()


def _span(fields: Fields, name: str) -> int | None:
    """A window or chunk in tokens; one that holds the whole context limits nothing."""
    span = fields.integer(name)
    return span if span < fields.integer("max_position_embeddings", span + 1) else None


def _letters(fields: Fields) -> str | None:
    """Nemotron-H: M a scan, * attention, - dense, E experts; each layer holds one of them."""
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None and fields.model_type == "nemotron_h":
        letters = {
            "mamba": "M",
            "attention": "*",
            "mlp": "-",
            "moe": "E",
            "linear_attention": "M",
            "full_attention": "*",
        }
        pattern = "".join(letters.get(str(word), "?") for word in fields.items("layers_block_type")) or None
    if pattern is None:
        return None
    if not isinstance(pattern, str) or set(pattern) - set("M*-E"):
        raise SpecError(
            f"{fields.source}: hybrid_override_pattern: found {pattern!r}, allowed: the letters M, *, - and E."
        )
    num_layers = fields.integer("num_hidden_layers", len(pattern))
    if len(pattern) != num_layers:
        raise SpecError(
            f"{fields.source}: hybrid_override_pattern has {len(pattern)} letters, "
            f"but num_hidden_layers is {num_layers}."
        )
    return pattern


def _lettered_layer(fields: Fields, family: Family, letter: str) -> Layer:
    if letter == "M":
        return Layer(mamba(fields), None)
    if letter == "*":
        return Layer(attention(fields, family, use_rope=False), None)
    return Layer(None, moe_ffn(fields, family) if letter == "E" else dense_ffn(fields, family))


def _searched_block(fields: Fields, family: Family, block: Any) -> Layer:
    """One block of a searched architecture (nemotron-nas): each half may be absent or have its own width."""
    try:
        mixer_part, ffn_part = block["attention"], block["ffn"]
        no_mixer, no_ffn = bool(mixer_part.get("no_op")), bool(ffn_part.get("no_op"))
        if mixer_part.get("replace_with_linear") or ffn_part.get("replace_with_linear"):
            raise SpecError(f"{fields.source}: block_configs: replace_with_linear is not modelled.")
        heads = None if no_mixer else fields.integer("num_attention_heads") // int(mixer_part["n_heads_in_group"])
        width = None if no_ffn else _searched_width(float(ffn_part["ffn_mult"]), fields.integer("hidden_size"))
    except (KeyError, TypeError, AttributeError, ValueError):
        raise SpecError(
            f"{fields.source}: block_configs: found {block!r}, "
            f"expected attention.n_heads_in_group and ffn.ffn_mult, or no_op."
        ) from None
    window = None if no_mixer else mixer_part.get("window_length")
    mixer = None if no_mixer else attention(fields, family, window=window, num_kv_heads=heads)
    return Layer(mixer, None if no_ffn else dense_ffn(fields, family, width))


def _searched_width(multiplier: float, d: int) -> int:
    """int(2 * multiplier * d / 3), rounded up to a multiple of 256 (DeciLM's rule)."""
    width = int(2 * multiplier * d / 3)
    return -(-width // 256) * 256

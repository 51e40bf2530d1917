"""A Hugging Face `config.json` as a ModelSpec: any decoder-only text model, or the text part of a multimodal one.

Rules are driven by fields; what a family fixes in its code stands in `hf/families.py`. An unknown `model_type` with
recognised fields loads as a Llama-like decoder. Fields that do not concern the architecture are ignored.

Which mixer and which feed-forward a layer has: written patterns come first (`block_configs`, `hybrid_override_pattern`,
`layer_types`, ...), then periods and offsets, then the rule of the family."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.sandbox import read_json
from perfmodel.files.tables import load_table
from perfmodel.models.architecture import KEYED, FeedForward, Layer, Mixer, QuantizationSpec
from perfmodel.models.executed import format_of_name
from perfmodel.models.hf import blocks
from perfmodel.models.hf.families import (
    CLASS_DEFAULTS,
    Family,
    family_of,
    not_computed,
    pooling_of,
    refuse_unless_decoder,
)
from perfmodel.models.hf.fields import Fields, Json
from perfmodel.models.hf.quantization import quantization_from_config
from perfmodel.models.number_formats import format_of_dtype, with_quantization
from perfmodel.models.spec import ModelSpec, layer_runs
from perfmodel.models.vision import vision_encoder

HF_QUANT_CONFIG = "hf_quant_config.json"  # ModelOpt's, beside a config.json
_FORMATS = {"quantization_config", "compression_config", "quantization"}
_ENCODERS = {"images": "vision_config", "audio": "audio_config"}
_UNLIMITED_POSITIONS = 1 << 20  # scans without positions have no limit of their own
_SCANS = ("mamba", "mamba2", "falcon_mamba")
_TABLE = load_table("model_families")
_KINDS: Mapping[str, str] = _TABLE["layer_kinds"]
_EXPERTS_FP4 = QuantizationSpec(method="mxfp4", weights="mxfp4", group_size=32, kept=frozenset())


def model_from_config(
    config: Json, name: str, *, source: str = "config.json", origin: str = "", **about: Any
) -> ModelSpec:
    """Normalises a config.json as the model `name`. `source` names the file in errors.

    `origin` (who says so) and `about` (other fields of ModelSpec that a card adds) go into the result as they are.

    Raises SpecError in one sentence: the file, the field, and what is missing or wrong."""
    fields = Fields(config, source, CLASS_DEFAULTS)
    refuse_unless_decoder(fields)
    family = family_of(fields)
    layers = _decoder_layers(fields, family)
    is_parallel = fields.flag("parallel_attn", fields.flag("use_parallel_residual", family.parallel))
    # Falcon's newer layout has a norm for each of the parallel blocks unless it says one.
    num_block_norms = fields.integer("num_ln_in_parallel_attn", 2 if fields.flag("new_decoder_architecture") else 1)
    is_scan = not any(isinstance(layer.mixer, KEYED) for layer in layers)
    quantization = quantization_from_config(fields, layers)
    if fields.get("expert_dtype") == "fp4":
        layers = [replace(layer, formats=(("experts", _EXPERTS_FP4),)) for layer in layers]
    max_positions = _UNLIMITED_POSITIONS if is_scan else family.max_positions
    num_learned_positions = 0
    if family.position_offset is not None:
        num_learned_positions = fields.integer("max_position_embeddings") + family.position_offset
        num_learned_positions += fields.integer("type_vocab_size", 0, minimum=0)  # BERT adds the row of a token's type
    embedding_scale = fields.number("embedding_multiplier", 1.0)  # Granite
    if family.scales_embedding:  # Gemma, whatever the file
        embedding_scale = math.sqrt(fields.integer("hidden_size"))
    rope, (pooling, num_labels) = fields.get("rope_parameters"), pooling_of(fields)
    return ModelSpec(
        name=name,
        model_type=fields.model_type,
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings", max_positions) - family.padding_positions,
        layers=layer_runs(layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings", family.tied) or pooling is not None,  # without a head
        dtype=format_of_dtype(fields.text("dtype", "bfloat16")),
        quantization=quantization,
        norm_bias=family.norm_bias,
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        norm_offset=family.norm_offset,
        embedding_scale=embedding_scale,
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
        logit_cap=fields.optional_number("final_logit_softcapping"),
        parallel_blocks=is_parallel,
        shared_block_norm=is_parallel and family.shared_norm and num_block_norms != 2,
        num_learned_positions=num_learned_positions,
        lm_head_bias=fields.flag("lm_head_bias", family.lm_head_bias),
        norm_eps=fields.number("norm_eps", ModelSpec.norm_eps),
        has_position_axes=isinstance(rope, Mapping) and rope.get("mrope_section") is not None,
        other_inputs=tuple(name for name, key in _ENCODERS.items() if fields.has(key)),
        num_prediction_layers=fields.optional("num_nextn_predict_layers") or 0,
        not_computed=not_computed(fields),
        num_streams=fields.integer("hc_mult", 1),
        residual_block=fields.optional("attn_res_block_size"),
        source=origin,
        vision=vision_encoder(fields.outer, fields.integer("hidden_size")),
        pooling=about.pop("pooling", None) or pooling,
        num_labels=num_labels,
        **about,
    )


def load_config(path: str | Path, name: str | None = None, stored: Json | None = None) -> ModelSpec:
    """The ModelSpec of a config.json file; modelopt's `hf_quant_config.json` beside it is read too.

    stored: fields that count where the file has none of them: what its tensors are stored as

    Where none of these says how weights are quantized, and the checkpoint's name ends with a format, they are in that.
    """
    path = Path(path)
    config = _read_json(path)
    if stored and isinstance(config, dict):
        config = {**stored, **config}
    quant_path = path.with_name(HF_QUANT_CONFIG)
    if isinstance(config, dict) and "quantization_config" not in config and quant_path.is_file():
        config = {**config, "quantization_config": _read_json(quant_path)}
    # The folder's name for `.../Llama-3.1-8B/config.json`, else the file's.
    stem = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    model = model_from_config(config, name or stem.rsplit("--", 1)[-1].lower(), source=str(path))
    if stored or _FORMATS & set(config) or model.quantization.weights is not None:
        return model
    _, method = format_of_name(model.name) or format_of_name(name or path.stem) or (model.name, None)
    return replace(with_quantization(model, method), has_format_by_name=True) if method else model


def _read_json(path: Path) -> Any:
    try:
        return read_json(path)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise SpecError(f"{path}: is not valid JSON ({error}).") from None


def _decoder_layers(fields: Fields, family: Family) -> list[Layer]:
    """All decoder layers in order; multi-token-prediction layers are not among them."""
    for name, what in _TABLE["not_modelled"].items():
        if fields.get(name):
            raise fields.error(f"{name}: {what} is not modelled.")
    if fields.has("block_configs"):
        return [_searched_block(fields, family, block) for block in fields.items("block_configs")]
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None and fields.model_type == "nemotron_h":
        pattern = (
            "".join(_TABLE["pattern_letters"].get(str(word), "?") for word in fields.items("layers_block_type")) or None
        )
    if pattern is not None:
        # Nemotron-H: M a scan, * attention, - dense, E experts; each layer holds one of them.
        if not isinstance(pattern, str) or set(pattern) - set("M*-E"):
            raise fields.error(f"hybrid_override_pattern: got {pattern!r}; expected the letters M, *, - and E.")
        num_layers, num_letters = fields.integer("num_hidden_layers", len(pattern)), len(pattern)
        if num_letters != num_layers:
            problem = f"hybrid_override_pattern has {num_letters} letters, but num_hidden_layers is {num_layers}."
            raise fields.error(problem)
        builders = {
            "M": lambda: Layer(blocks.mamba(fields), None),
            "*": lambda: Layer(blocks.attention(fields, family, use_rope=False), None),
            "-": lambda: Layer(None, blocks.dense_ffn(fields, family)),
            "E": lambda: Layer(None, blocks.moe_ffn(fields, family)),
        }
        return [builders[letter]() for letter in pattern]
    num_layers = fields.integer("num_hidden_layers")
    kinds = [(_kind(fields, family, i, num_layers), _uses_rope(fields, i, num_layers)) for i in range(num_layers)]
    mixers = {kind: _mixer(fields, family, *kind) for kind in dict.fromkeys(kinds)}
    ffns: list[FeedForward | None] = [None] * num_layers
    if fields.model_type not in _SCANS and not blocks.num_experts(fields):
        ffns = [blocks.dense_ffn(fields, family)] * num_layers
    elif fields.model_type not in _SCANS:
        moe = blocks.moe_ffn(fields, family)
        has_experts = [blocks.is_moe_layer(fields, index, num_layers) for index in range(num_layers)]
        dense = None if all(has_experts) else blocks.dense_ffn(fields, family)
        ffns = [moe if is_sparse else dense for is_sparse in has_experts]
    layers = [Layer(mixers[kind], ffn) for kind, ffn in zip(kinds, ffns, strict=True)]
    if fields.model_type == "falcon_h1":  # a scan and an attention side by side: written one after the other
        return [half for layer in layers for half in (Layer(blocks.mamba(fields), None), layer)]
    return layers


def _kind(fields: Fields, family: Family, index: int, num_layers: int) -> str:
    """full | sliding | chunked | latent | linear | mamba."""
    if fields.has("o_lora_rank", "compress_ratios"):
        return f"compressed {_compress_ratio(fields, index, num_layers)}"
    linear = fields.get("linear_attn_config")
    if isinstance(linear, Mapping) and index + 1 in Fields(linear, fields.source).items("kda_layers"):  # from 1
        return "linear"
    if fields.has("kv_lora_rank"):
        words = fields.per_layer("layer_types", num_layers)
        if words is not None and words[index] == "linear_attention":
            return "linear"
        return "latent" if _has_own_choice(fields, index, num_layers) else "latent shared"
    sparse = fields.get("sparse_attention_config")
    if isinstance(sparse, Mapping):
        flags = Fields(sparse, fields.source).per_layer("sparse_attention_freq", num_layers)
        return "blocks" if flags is not None and flags[index] else "full"
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
    if fields.has("global_attn_every_n_layers"):  # ModernBERT
        return "sliding" if index % fields.integer("global_attn_every_n_layers") else "full"
    return "sliding" if _is_sliding(fields, family, index) else "full"


def _has_own_choice(fields: Fields, index: int, num_layers: int) -> bool:
    """Whether the indexer of layer `index` chooses by itself: what the file lists, or every n-th layer from one on, as
    GLM-5.2 says it (transformers, GlmMoeDsaConfig)."""
    kinds = fields.per_layer("indexer_types", num_layers)
    if kinds is not None:
        return bool(kinds[index] != "shared")
    if fields.has("index_topk_pattern"):
        raise fields.error("index_topk_pattern is not read; list the layers as indexer_types, full or shared.")
    first = fields.integer("index_skip_topk_offset", 2, minimum=0)
    return max(index - first + 1, 0) % fields.integer("index_topk_freq", 1) == 0


def _compress_ratio(fields: Fields, index: int, num_layers: int) -> int:
    """Tokens to a compressed key in layer `index` of DeepSeek-V4: what its files list, or the kind of its layers."""
    ratios = fields.per_layer("compress_ratios", num_layers)
    if ratios is None:
        words, rates = fields.per_layer("layer_types", num_layers), fields.get("compress_rates")
        known = _TABLE["compress_ratios"] | (dict(rates) if isinstance(rates, Mapping) else {})
        ratios = [known.get(str(word)) for word in words or ["none"] * num_layers]
    ratio = ratios[index]
    if not isinstance(ratio, int) or ratio < 0:
        raise fields.error(f"compress_ratios: got {ratio!r} of layer {index}; expected tokens to a key, 0 for none.")
    return ratio


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
    others = {"latent": blocks.latent_attention, "linear": blocks.gated_delta_net, "mamba": blocks.mamba}
    if kind in others:
        return others[kind](fields)
    if kind == "latent shared":
        return blocks.latent_attention(fields, is_choice_shared=True)
    if kind.startswith("compressed"):
        return blocks.compressed_attention(fields, int(kind.split()[1]))
    if kind == "blocks":
        return blocks.chosen_blocks(fields, blocks.attention(fields, family))
    window = _span(fields, "sliding_window") if kind == "sliding" else None
    chunk = _span(fields, "attention_chunk_size") if kind == "chunked" else None
    return blocks.attention(fields, family, window=window, chunk=chunk, use_rope=use_rope)


def _span(fields: Fields, name: str) -> int | None:
    """A window or chunk in tokens; one that holds the whole context limits nothing. ModernBERT's is as wide on each
    side of a token as half of `local_attention`."""
    around = fields.optional("local_attention") if name == "sliding_window" else None
    span = fields.integer(name) if around is None else 2 * (around // 2) + 1
    return span if span < fields.integer("max_position_embeddings", span + 1) else None


def _searched_block(fields: Fields, family: Family, block: Any) -> Layer:
    """One block of a searched architecture (nemotron-nas): each half may be absent or have its own width.

    A width is int(2 * ffn_mult * d / 3), rounded up to a multiple of 256 (DeciLM's rule)."""
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
        mixer = blocks.attention(fields, family, window=mixer_part.get("window_length"), num_kv_heads=heads)
    if width is not None:
        ffn = blocks.dense_ffn(fields, family, -(-width // 256) * 256)
    return Layer(mixer, ffn)

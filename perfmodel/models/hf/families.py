"""What a model family does that its config.json does not say: biases, norms, gating, tied embeddings.

A family that is not listed is read by its fields with the defaults of a Llama-like decoder. Sources: the modelling
files of transformers 4.57 and 5, and of the repositories that carry their own (deepseek_v3, kimi_k2, mimo_v2_flash,
minimax_m2, nemotron-nas)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.models.architecture import DEFAULT_ROUTING, Routing
from perfmodel.models.hf.fields import Fields
from perfmodel.models.spec import Pooling


@dataclass(frozen=True, slots=True)
class Family:
    """Defaults that the class of a model type fixes; None leaves the question to the fields."""

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    ffn_bias: bool = False
    gated_ffn: bool | None = None
    qk_norm: bool = False
    qk_norm_width: str = "head"
    tied: bool = False
    norm_bias: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0
    scales_embedding: bool = False
    routing: Routing = DEFAULT_ROUTING  # but for what the file says of it
    activation: str | None = None  # where the file's is a part of it
    parallel: bool = False
    shared_norm: bool = False
    lm_head_bias: bool = False
    position_offset: int | None = None  # a learned position table of max_position_embeddings + this many rows
    sinks: bool = False
    sliding_window_pattern: int | None = None  # every n-th layer is full attention
    head_dim: int | None = None
    max_positions: int | None = None  # where the file need not say
    is_encoder: bool = False  # tokens see both ways, and there is no language head
    padding_positions: int = 0  # rows of the position table that no token has


_BIASED = Family(qkv_bias=True, out_bias=True, ffn_bias=True, gated_ffn=False, norm_bias=True)
_GPT2 = replace(_BIASED, tied=True, position_offset=0)
_BERT = replace(_GPT2, pre_norms=False, post_norms=True, is_encoder=True)
_ROBERTA = replace(_BERT, padding_positions=2)
_PHI = replace(_BIASED, parallel=True, shared_norm=True, lm_head_bias=True)
_COHERE = Family(tied=True, parallel=True, shared_norm=True)
_QKV_ONLY = Family(out_bias=False)
_QWEN2 = replace(_QKV_ONLY, qkv_bias=True)
_QWEN3 = Family(qk_norm=True)
_QWEN3_NEXT = replace(_QWEN3, norm_offset=1.0)
_GEMMA = Family(tied=True, gated_ffn=True, norm_offset=1.0, scales_embedding=True, head_dim=256)
_GEMMA2 = replace(_GEMMA, post_norms=True, sliding_window_pattern=2)
_GEMMA3 = replace(_GEMMA2, qk_norm=True, sliding_window_pattern=6)
_WIDE_NORM = Family(qk_norm=True, qk_norm_width="all_heads")
_OLMO2 = replace(_WIDE_NORM, pre_norms=False, post_norms=True)
# Balanced by a bias instead of a loss (Wang et al. 2024); the defaults are those of transformers' DeepseekV3Config.
_BALANCED = Routing(scoring="sigmoid", bias_chooses=True, groups_by="top2")
_DEEPSEEK3 = Family(routing=replace(_BALANCED, scale=2.5))
_MINIMAX3 = replace(_QWEN3_NEXT, routing=replace(_BALANCED, scale=2.0))
_QWEN_MOE = Routing(renormalizes=False)

_FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2),
    "gpt_neo": replace(_GPT2, qkv_bias=False),
    "gptj": replace(_PHI, qkv_bias=False, out_bias=False),
    "gpt_neox": replace(_BIASED, parallel=True),
    "opt": replace(_GPT2, position_offset=2),
    "bloom": replace(_BIASED, tied=True, max_positions=2048),
    "falcon": replace(_COHERE, gated_ffn=False, norm_bias=True, max_positions=2048),
    "mpt": Family(gated_ffn=False, tied=True),
    "phi": _PHI,
    "starcoder2": replace(_BIASED, tied=True),
    "stablelm": replace(_QKV_ONLY, norm_bias=True),
    "nemotron": Family(gated_ffn=False, norm_bias=True),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, sliding_window_pattern=4),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA3),
    **dict.fromkeys(("gemma4", "gemma4_text"), replace(_GEMMA3, norm_offset=0.0)),
    **dict.fromkeys(("qwen", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text", "mimo"), _QWEN2),
    "qwen2_moe": replace(_QWEN2, routing=_QWEN_MOE),
    **dict.fromkeys(("qwen3", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text"), _QWEN3),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), _QWEN3),
    "qwen3_moe": replace(_QWEN3, routing=_QWEN_MOE),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_NEXT),
    **dict.fromkeys(("olmo2", "olmo3"), _OLMO2),
    "olmoe": replace(_WIDE_NORM, routing=_QWEN_MOE),
    **dict.fromkeys(("glm", "chatglm"), _QKV_ONLY),
    "glm4": replace(_QKV_ONLY, post_norms=True),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite"), replace(_QKV_ONLY, routing=_BALANCED)),
    "gpt_oss": Family(
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        gated_ffn=True,
        activation="swiglu_oai",
        sinks=True,
        sliding_window_pattern=2,
    ),
    "deepseek_v2": Family(routing=_QWEN_MOE),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "deepseek_v4", "kimi_k2", "kimi_linear"), _DEEPSEEK3),
    "minimax_m2": replace(_WIDE_NORM, routing=_BALANCED),
    **dict.fromkeys(("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"), _MINIMAX3),
    "nemotron_h": Family(gated_ffn=False, routing=_BALANCED),
    "llama4_text": Family(qk_norm_width="none"),
    "mamba": Family(tied=True),
    "bert": _BERT,
    **dict.fromkeys(("roberta", "xlm_roberta"), _ROBERTA),
    "modernbert": Family(tied=True, gated_ffn=True, is_encoder=True),
}

# What a family's class reads from its file and we compute in one way alone: the values that give that way.
_TEXT_ONLY = ("use_bidirectional_attention", False)
_NO_BIAS = ("attention_bias", False)
_SILU = ("hidden_act", "silu")
_ONE_WAY: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "gpt_oss": (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)),
    **dict.fromkeys(("gemma", "gemma2"), (_TEXT_ONLY,)),
    **dict.fromkeys(("gemma3", "gemma3_text"), (_TEXT_ONLY, ("attn_logit_softcapping", None))),
    "deepseek_v2": (_NO_BIAS, ("norm_topk_prob", False)),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), (_NO_BIAS,)),
    "mamba2": (_SILU,),
    "nemotron_h": (("mamba_hidden_act", "silu"),),
    # Convolutions of delta nets share the activation of feed-forward blocks.
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), (_SILU,)),
    "qwen3_5_moe_text": (_SILU, ("norm_topk_prob", True)),
}

# What the classes of nested text parts fill in (the files of Gemma 3 and LLaVA leave most of it out).
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
CLASS_DEFAULTS: Mapping[str, Mapping[str, int | str]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
}

# What a model returns in place of text, by its class: a vector, or scores of the whole prompt; others are refused.
_VECTOR_CLASS = re.compile(r"(?<!LMHead)(?<!Chat)(?<!ChatGLM)Model$")
_SCORE_CLASS = re.compile(r"ForSequenceClassification$")
_OTHER_CLASS = re.compile(r"ForTokenClassification$|RewardModel$")
_SPEECH_NAME = re.compile(r"(?:^|[-_])whisper(?:[-_.]|$)")
_NO_DECODER = ("bert", "electra", "clip", "siglip", "vit", "whisper", "wav2vec", "hubert", "bart", "pegasus", "t5")


def family_of(fields: Fields) -> Family:
    """The family's fixed choices; an unknown model type gets a Llama-like decoder's."""
    return _FAMILIES.get(fields.model_type, Family())


def not_computed(fields: Fields) -> tuple[str, ...]:
    """Fields of the file, as `name=value`, that change what the model computes and that our decoder does not honour."""
    known = _ONE_WAY.get(fields.model_type, ())
    return tuple(f"{name}={fields.get(name)}" for name, way in known if fields.get(name, way) != way)


def pooling_of(fields: Fields) -> tuple[Pooling | None, int]:
    """How the model that a file describes makes a vector of a prompt, and of how many scores; (None, 0) for text.

    The file does not say how: vLLM takes the first token of encoders and the last of decoders, as here. Without labels
    there are two, as in transformers' PretrainedConfig."""
    names = [str(name) for name in fields.items("architectures")]
    is_encoder = family_of(fields).is_encoder
    if not (is_encoder or any(_VECTOR_CLASS.search(name) or _SCORE_CLASS.search(name) for name in names)):
        return None, 0
    has_scores = any(map(_SCORE_CLASS.search, names))
    num_labels = fields.integer("num_labels", len(fields.get("id2label") or ()) or 2) if has_scores else 0
    return "cls" if is_encoder else "last", num_labels


def refuse_speech(name: str) -> None:
    """Raises SpecError for the name of a repository (`org/name`) whose model transcribes speech."""
    if _SPEECH_NAME.search(name.rpartition("/")[2].lower()):
        raise SpecError(f"{name} transcribes speech; only models of text are modelled.")


def refuse_unless_decoder(fields: Fields) -> None:
    """Raises SpecError for encoder-decoder and text-free models, and for encoders and heads of other kinds."""
    kind, outer = fields.model_type, str(fields.outer.get("model_type") or "")
    is_pair = bool(fields.get("is_encoder_decoder")) or fields.has("encoder_layers", "num_decoder_layers")
    masked = any(str(a).endswith("ForMaskedLM") for a in fields.items("architectures"))
    is_known = any(kind.startswith(word) or outer.startswith(word) or "bert" in kind for word in _NO_DECODER)
    if is_pair:
        raise fields.error(f"{kind} is an encoder-decoder model; only decoder-only text models are modelled.")
    if (masked or is_known) and not family_of(fields).is_encoder:
        known = ", ".join(name for name, family in _FAMILIES.items() if family.is_encoder)
        raise fields.error(f"{kind} is neither a decoder-only text model nor an encoder that is modelled: {known}.")
    for name in map(str, fields.items("architectures")):
        if _OTHER_CLASS.search(name):
            raise fields.error(
                f"{name} returns scores of tokens; only text, vectors and scores of prompts are modelled."
            )
    if not fields.has("vocab_size"):
        raise fields.error(
            "vocab_size is missing, so this is not a text model's config.json "
            "(of a multimodal model, the text part stands under text_config)."
        )

"""What a model family does that its config.json does not say: biases, norms, gating, tied embeddings.

The families are those of `workloads/tables/model_families.yaml`; one that is not listed is read by its fields with the
defaults of a Llama-like decoder."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from perfmodel.errors import SpecError
from perfmodel.files.tables import load_table
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


_TABLE = load_table("model_families")
CLASS_DEFAULTS: Mapping[str, Mapping[str, int | str]] = _TABLE["class_defaults"]


def _families() -> dict[str, Family]:
    """By model type."""
    named: dict[str, Family] = {"": Family()}
    result: dict[str, Family] = {}
    for name, row in _TABLE["families"].items():
        facts = {"types": [name], "like": "", **row}
        types, like = facts.pop("types"), named[facts.pop("like")]
        routing = {"routing": Routing(**facts["routing"])} if "routing" in facts else {}
        named[name] = replace(like, **(facts | routing))
        result |= dict.fromkeys(types, named[name])
    return result


_FAMILIES = _families()

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
    known = _TABLE["one_way"].get(fields.model_type, {}).items()
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

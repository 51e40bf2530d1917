"""A Hugging Face `config.json` as a ModelSpec: any decoder-only text model, or the text part of a multimodal one.

Rules are driven by fields; what a family fixes in its code stands in `hf/families.py`. An unknown `model_type` with
recognised fields loads as a Llama-like decoder. Fields that do not concern the architecture are ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.sandbox import read_json
from perfmodel.models.architecture import Attention, LatentAttention
from perfmodel.models.executed import format_of_name
from perfmodel.models.hf.families import CLASS_DEFAULTS, family_of, refuse_unless_decoder
from perfmodel.models.hf.fields import Fields, Json
from perfmodel.models.hf.layouts import decoder_layers
from perfmodel.models.hf.quantization import quantization_from_config
from perfmodel.models.number_formats import format_of_dtype, with_quantization
from perfmodel.models.spec import ModelSpec, layer_runs

HF_QUANT_CONFIG = "hf_quant_config.json"  # ModelOpt's, beside a config.json
_FORMATS = {"quantization_config", "compression_config", "quantization"}
_ENCODERS = {"images": "vision_config", "audio": "audio_config"}
_UNLIMITED_POSITIONS = 1 << 20  # scans without positions have no limit of their own


def model_from_config(
    config: Json, name: str, *, source: str = "config.json", origin: str = "", **about: Any
) -> ModelSpec:
    """Normalises a config.json as the model `name`. `source` names the file in errors.

    `origin` (who says so) and `about` (other fields of ModelSpec that a card adds) go into the result as they are.

    Raises SpecError in one sentence: the file, the field, and what is missing or wrong.
    """
    fields = Fields(config, source, CLASS_DEFAULTS)
    refuse_unless_decoder(fields)
    family = family_of(fields)
    layers = decoder_layers(fields, family)
    is_parallel = fields.flag("parallel_attn", fields.flag("use_parallel_residual", family.parallel))
    # Falcon's newer layout has a norm for each of the parallel blocks unless it says one.
    num_block_norms = fields.integer("num_ln_in_parallel_attn", 2 if fields.flag("new_decoder_architecture") else 1)
    is_scan = not any(isinstance(layer.mixer, Attention | LatentAttention) for layer in layers)
    max_positions = _UNLIMITED_POSITIONS if is_scan else family.max_positions
    num_learned_positions = 0
    if family.position_offset is not None:
        num_learned_positions = fields.integer("max_position_embeddings") + family.position_offset
    embedding_scale = fields.number("embedding_multiplier", 1.0)  # Granite
    if family.scales_embedding:  # Gemma, whatever the file
        embedding_scale = math.sqrt(fields.integer("hidden_size"))
    rope = fields.get("rope_parameters")
    return ModelSpec(
        name=name,
        model_type=fields.model_type,
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings", max_positions),
        layers=layer_runs(layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings", family.tied),
        dtype=format_of_dtype(fields.text("dtype", "bfloat16")),
        quantization=quantization_from_config(fields, layers),
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
        source=origin,
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

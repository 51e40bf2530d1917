"""Rotary positions from fields: `rope_theta`, `rope_scaling`, `rope_parameters`, for each kind of layer."""

import math
from collections.abc import Mapping
from typing import Any

from perfmodel.models.architecture import Rope, RopeScaling
from perfmodel.models.hf.fields import Fields

_THETA = 10_000.0  # of transformers' LlamaConfig
_PLAIN = ("default", "none", "mrope")  # mrope: positions of a text are the same in all of its sections
_SYNONYMS = {"su": "longrope"}
# What the modelling files of transformers rotate by pairs of neighbours.
_INTERLEAVED = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm", "glm4", "glm_moe_dsa", "cohere")


def rope_of(fields: Fields, head_dim: int, is_sliding: bool = False) -> Rope:
    """The rotary positions of a layer whose heads have `head_dim` elements; `is_sliding`: of one with a window."""
    block = _block(fields, is_sliding)
    theta, is_local = block.get("rope_theta"), is_sliding and fields.has("rope_local_base_freq")
    if theta is None:
        theta = fields.number("rope_local_base_freq" if is_local else "rope_theta", _THETA)
    if is_local:  # Gemma 3 stretches the layers that see everything
        block = {}
    share = block.get("partial_rotary_factor") or fields.number("partial_rotary_factor", fields.number("rotary_pct", 1))
    dim = fields.optional("rotary_dim") or int(head_dim * _number(fields, "partial_rotary_factor", share))
    return Rope(
        theta=_number(fields, "rope_theta", theta),
        dim=None if dim == head_dim else dim,
        scaling=_scaling(fields, block),
        is_interleaved=fields.flag("rope_interleave", fields.model_type in _INTERLEAVED),
    )


def latent_softmax_scale(fields: Fields, width: int) -> float | None:
    """What MLA multiplies scores by, where that is not 1 / sqrt(width): YaRN's factor enters it squared (DeepSeek's
    modelling files); None where it does not."""
    block = _block(fields, is_sliding=False)
    of_all = block.get("mscale_all_dim")
    if not of_all or _kind(block) is None:
        return None
    return _yarn_factor(_number(fields, "factor", block.get("factor")), float(of_all)) ** 2 / math.sqrt(width)


def _block(fields: Fields, is_sliding: bool) -> Mapping[str, Any]:
    """The block that says how frequencies scale, or that of the layer's kind where there is one for each."""
    block = fields.get("rope_parameters")
    if not isinstance(block, Mapping):
        return {}
    nested = block.get("sliding_attention" if is_sliding else "full_attention")
    if isinstance(nested, Mapping):
        return nested
    return {} if any(isinstance(value, Mapping) for value in block.values()) else block


def _kind(block: Mapping[str, Any]) -> str | None:
    kind = str(block.get("rope_type") or block.get("type") or "default")
    return None if kind in _PLAIN else _SYNONYMS.get(kind, kind)


def _scaling(fields: Fields, block: Mapping[str, Any]) -> RopeScaling | None:
    kind = _kind(block)
    if kind is None:
        return None
    trained = fields.optional("max_position_embeddings")
    original = (
        block.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings") or trained
    )
    factor = block.get("factor")
    if factor is None and trained and original and kind in ("yarn", "longrope"):
        factor = trained / original
    if kind == "dynamic":  # its code counts from what the file states as the limit
        original = trained
    lengths = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return RopeScaling(
        kind=kind,
        factor=None if factor is None else _number(fields, "factor", factor),
        original_positions=original,
        **{name: _number(fields, name, block.get(name) or default) for name, default in lengths.items()},
        truncates=bool(block.get("truncate", True)),
        amplitude=_amplitude(fields, kind, factor, original, block),
        short_factors=_factors(fields, block, "short_factor"),
        long_factors=_factors(fields, block, "long_factor"),
    )


def _amplitude(fields: Fields, kind: str, factor: Any, original: Any, block: Mapping[str, Any]) -> float:
    """Stated, or by the rule of YaRN (Peng et al. 2023, 0.1 ln s + 1) or LongRoPE (sqrt(1 + ln s / ln L))."""
    stated = block.get("attention_factor")
    if stated is not None:
        return _number(fields, "attention_factor", stated)
    if kind not in ("yarn", "longrope") or factor is None or not original:
        return 1.0
    stretch = _number(fields, "factor", factor)
    if kind == "longrope":
        return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    one, of_all = block.get("mscale"), block.get("mscale_all_dim")
    if one and of_all:
        return _yarn_factor(stretch, float(one)) / _yarn_factor(stretch, float(of_all))
    return _yarn_factor(stretch)


def _yarn_factor(stretch: float, weight: float = 1.0) -> float:
    return 1.0 if stretch <= 1 else 0.1 * weight * math.log(stretch) + 1.0


def _factors(fields: Fields, block: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = block.get(name) or ()
    if not isinstance(values, list | tuple):
        raise fields.error(f"rope_scaling.{name}: got {values!r}; expected a list of numbers.")
    return tuple(_number(fields, name, value) for value in values)


def _number(fields: Fields, name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise fields.error(f"rope_scaling.{name}: got {value!r}; expected a positive number.")
    return float(value)

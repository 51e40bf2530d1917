"""`Fields`: a config.json read by the current name of a field, whatever name the file uses, with errors that say which.

Knows names, types and nesting; nothing of what a field means for the architecture."""

from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.errors import SpecError

Json = Mapping[str, Any]

# Today's name -> all names in use, in order of preference.
_NAMES = {
    "hidden_size": "hidden_size n_embd d_model dim",
    "num_hidden_layers": "num_hidden_layers n_layer n_layers num_layers",
    "num_attention_heads": "num_attention_heads n_head n_heads",
    "num_key_value_heads": "num_key_value_heads num_kv_heads n_head_kv n_kv_heads multi_query_group_num "
    + "num_attention_groups",
    "head_dim": "head_dim attention_head_dim kv_channels",
    "intermediate_size": "intermediate_size ffn_dim n_inner ffn_hidden_size",
    "vocab_size": "vocab_size padded_vocab_size",
    "max_position_embeddings": "max_position_embeddings n_positions max_sequence_length max_seq_len seq_length n_ctx "
    + "model_max_length max_position_embedding",
    "hidden_act": "hidden_act mlp_hidden_act hidden_activation activation_function activation",
    "dtype": "dtype torch_dtype",
    "norm_eps": "rms_norm_eps layer_norm_epsilon layer_norm_eps norm_epsilon norm_eps",
    "rope_parameters": "rope_parameters rope_scaling",
    "rope_theta": "rope_theta global_rope_theta",
    "rope_local_base_freq": "rope_local_base_freq local_rope_theta",
    "num_experts": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "num_experts_per_tok": "num_experts_per_tok num_experts_per_token experts_per_token moe_top_k moe_k moe_topk "
    + "top_k_experts",
    "moe_intermediate_size": "moe_intermediate_size expert_ffn_hidden_size",
    "n_shared_experts": "n_shared_experts num_shared_experts moe_num_shared_experts num_shared_expert",
    "n_group": "n_group num_expert_group",
    "moe_latent_size": "moe_latent_size routed_expert_hidden_size",
    "norm_topk_prob": "norm_topk_prob moe_renormalize",
    "scoring_func": "scoring_func moe_router_activation_func",
    "sliding_window": "sliding_window sliding_window_size",
    "sliding_window_pattern": "sliding_window_pattern _sliding_window_pattern",
    "mamba_num_heads": "mamba_num_heads mamba_n_heads",
    "mamba_head_dim": "mamba_head_dim mamba_d_head",
    "mamba_state_size": "ssm_state_size mamba_d_state state_size",
    "mamba_num_groups": "mamba_n_groups n_groups",
    "mamba_conv_kernel": "mamba_d_conv conv_kernel",
    "mamba_expand": "mamba_expand expand",
    "mamba_chunk_size": "mamba_chunk_size chunk_size",
    "mamba_dt_rank": "mamba_dt_rank time_step_rank",
    "mamba_conv_bias": "mamba_conv_bias use_conv_bias",
    "mamba_proj_bias": "use_bias mamba_proj_bias",
    "lm_head_bias": "lm_head_bias use_lm_head_bias",
    "attention_bias": "attention_bias use_qkv_bias qkv_bias add_qkv_bias",
}
_SYNONYMS: Mapping[str, tuple[str, ...]] = {name: tuple(names.split()) for name, names in _NAMES.items()}

_LARGEST = 10**12  # beyond any size in use: a slip of the keyboard, or a damaged file
_MAX_LAYERS = 10_000

# Where the text part of a multimodal file is nested.
_TEXT_BLOCKS = ("text_config", "language_config", "llm_config", "thinker_config")


class Fields:
    """One config.json (its text part), read by today's field names. `source` names the file in error messages.

    `class_defaults` (model type -> fields) answer for what a nested text part leaves to its class."""

    def __init__(self, config: Json, source: str, class_defaults: Mapping[str, Json] | None = None) -> None:
        if not isinstance(config, Mapping):
            raise SpecError(f"{source}: got {type(config).__name__}; expected a JSON object with the model's fields.")
        self.source = source
        self.outer = config
        self.config = _text_part(config)
        self.model_type = str(self.config.get("model_type") or config.get("model_type") or "unknown").replace("-", "_")
        self.fallback = (class_defaults or {}).get(self.model_type, {}) if self.config is not config else {}

    def error(self, sentence: str) -> SpecError:
        """A mistake in the file, which it names."""
        return SpecError(f"{self.source}: {sentence}")

    def get(self, name: str, default: Any = None) -> Any:
        """The value under any of the field's names; null counts as absent. The outer file answers for the text part."""
        for block in (self.config, self.outer, self.fallback):
            for key in _SYNONYMS.get(name, (name,)):
                value = block.get(key)
                if value is not None:
                    return value
        return default

    def has(self, *names: str) -> bool:
        """Whether any of the fields is there and not null."""
        return any(self.get(name) is not None for name in names)

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; without a default its absence is an error."""
        value = self.get(name, default)
        if value is None:
            names = " or ".join(_SYNONYMS.get(name, (name,))[:3])
            raise self.error(f"{names} is missing; without it the model's size is not known.")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        largest = _MAX_LAYERS if name == "num_hidden_layers" else _LARGEST
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= largest:
            raise self.error(f"{name}: got {value!r}; expected a whole number, {minimum} to {largest}.")
        return value

    def optional(self, name: str) -> int | None:
        """A whole number, or None where the field is absent, null or 0."""
        return self.integer(name, 0, minimum=0) or None

    def flag(self, name: str, default: bool = False) -> bool:
        """A true/false field."""
        value = self.get(name, default)
        if not isinstance(value, bool | int):
            raise self.error(f"{name}: got {value!r}; expected true or false.")
        return bool(value)

    def text(self, name: str, default: str) -> str:
        """A string field."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.error(f"{name}: got {value!r}; expected a name.")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _LARGEST:
            raise self.error(f"{name}: got {value!r}; expected a positive number.")
        return value

    def optional_number(self, name: str) -> float | None:
        """A positive number, or None where the field is absent or null."""
        return self.number(name, 1.0) if self.has(name) else None

    def items(self, name: str) -> list[Any]:
        """A list; an absent one is empty."""
        value = self.get(name, [])
        if not isinstance(value, list | tuple):
            raise self.error(f"{name}: got {value!r}; expected a list.")
        return list(value)

    def per_layer(self, name: str, num_layers: int) -> list[Any] | None:
        """A list with one entry per layer (a longer one is cut, it also describes prediction layers), or None."""
        value = self.get(name)
        if value is None or (isinstance(value, Sequence) and not isinstance(value, str) and not value):
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.error(f"{name}: got {value!r}; expected a list with one entry per layer.")
        if len(value) < num_layers:
            raise self.error(f"{name} has {len(value)} entries, but num_hidden_layers is {num_layers}.")
        return list(value[:num_layers])


def _text_part(config: Json) -> Json:
    """The block that describes the text decoder: nested in multimodal files, else the file itself."""
    for name in _TEXT_BLOCKS:
        block = config.get(name)
        if isinstance(block, Mapping) and block:
            return _text_part(block)
    return config

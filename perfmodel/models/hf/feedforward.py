"""Feed-forward blocks from fields: dense, mixture of experts, and which layers have which."""

__all__ = ["dense_ffn", "is_moe_layer", "moe_ffn", "num_experts"]

from perfmodel.errors import SpecError
from perfmodel.models.architecture import DenseFFN, MoEFFN
from perfmodel.models.hf.families import Family
from perfmodel.models.hf.fields import Fields

_PLAIN_ACTIVATIONS = ("relu", "relu2")  # no published decoder gates these


def num_experts(fields: Fields) -> int:
    """Routed experts per MoE layer; 0 for dense models (a single expert is a dense block)."""
    nested = fields.get("ffn_config")
    stated = nested.get("moe_num_experts", 0) if isinstance(nested, dict) else 0
    count = fields.integer("num_experts", stated, minimum=0)
    return count if count > 1 else 0


def dense_ffn(fields: Fields, family: Family, intermediate_size: int | None = None) -> DenseFFN:
    """A dense block; Llama 4 writes the width of its dense layers as `intermediate_size_mlp`."""
    return DenseFFN(
        intermediate_size=intermediate_size or _dense_width(fields),
        gated=_is_gated(fields, family),
        activation=_activation(fields),
        bias=_has_bias(fields, family),
    )


def moe_ffn(fields: Fields, family: Family) -> MoEFFN:
    """A mixture of experts with its shared part."""
    experts = num_experts(fields)
    nested = fields.get("ffn_config")
    nested = nested if isinstance(nested, dict) else {}
    top_k = fields.integer("num_experts_per_tok", nested.get("moe_top_k"))
    if top_k > experts:
        raise SpecError(f"{fields.source}: num_experts_per_tok: found {top_k}, but there are {experts} experts.")
    width = fields.optional("moe_intermediate_size") or fields.integer(
        "intermediate_size", nested.get("ffn_hidden_size")
    )
    shared = _shared_width(fields, width)
    return MoEFFN(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=width,
        shared_intermediate_size=shared,
        # The sigmoid gate comes with Qwen's way of writing the shared width.
        shared_gate=shared > 0 and fields.has("shared_expert_intermediate_size"),
        gated=_is_gated(fields, family),
        activation=_activation(fields),
        bias=_has_bias(fields, family),
        router_bias=_has_router_bias(fields),
        num_groups=fields.integer("n_group", 1),
        top_k_groups=fields.integer("topk_group", 1),
        latent_size=fields.optional("moe_latent_size"),
    )


def is_moe_layer(fields: Fields, index: int, num_layers: int) -> bool:
    """Whether layer `index` (from 0) of a model with experts has them."""
    kinds = fields.per_layer("mlp_layer_types", num_layers)
    if kinds is not None:
        return bool(kinds[index] != "dense")
    listed = fields.get("moe_layers")
    if isinstance(listed, list) and listed:
        return index in listed
    if fields.has("interleave_moe_layer_step"):  # Llama 4: every step-th layer, counted from 1
        return (index + 1) % fields.integer("interleave_moe_layer_step") == 0
    if fields.has("expert_layer_period"):  # Jamba
        return (index - fields.integer("expert_layer_offset", 0, minimum=0)) % fields.integer(
            "expert_layer_period"
        ) == 0
    if fields.has("moe_layer_start_index"):  # Ernie 4.5
        start = fields.integer("moe_layer_start_index", minimum=0)
        return index >= start and (index + 1) % fields.integer("moe_layer_interval", 1) == 0
    if index < fields.integer("first_k_dense_replace", 0, minimum=0) or index in fields.items("mlp_only_layers"):
        return False
    frequency = fields.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        flags = fields.per_layer("moe_layer_freq", num_layers)
        return flags is None or bool(flags[index])
    if index % fields.integer("moe_layer_freq", 1):
        return False
    return (index + 1) % fields.integer("decoder_sparse_step", 1) == 0


def _dense_width(fields: Fields) -> int:
    width = fields.optional("intermediate_size_mlp") or fields.optional("intermediate_size")
    if width is not None:
        # The first Qwen counts gate and up together.
        return width // 2 if fields.model_type == "qwen" else width
    shared = fields.optional("shared_intermediate_size")  # Granite hybrids without experts
    if shared is not None:
        return shared
    if fields.model_type in _FOUR_TIMES or fields.has("expansion_ratio"):
        return fields.integer("expansion_ratio", 4) * fields.integer("hidden_size")
    return fields.integer("intermediate_size")


_FOUR_TIMES = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "bloom", "falcon", "mpt", "phi", "codegen")


def _shared_width(fields: Fields, expert_width: int) -> int:
    """All shared experts together. Qwen, Granite and MiniMax write a width, DeepSeek a number of experts."""
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if fields.has(name):
            return fields.integer(name, minimum=0)
    if fields.has("interleave_moe_layer_step"):
        return expert_width  # Llama 4: always one, as wide as a routed expert
    each = fields.optional("moe_shared_expert_intermediate_size") or expert_width
    return each * fields.integer("n_shared_experts", 0, minimum=0)


def _activation(fields: Fields) -> str:
    return fields.text("hidden_act", "silu")


def _is_gated(fields: Fields, family: Family) -> bool:
    return family.gated_ffn if family.gated_ffn is not None else _activation(fields) not in _PLAIN_ACTIVATIONS


def _has_bias(fields: Fields, family: Family) -> bool:
    """Falcon's `bias` covers all its linear layers."""
    return fields.flag("mlp_bias", family.ffn_bias or fields.flag("bias"))


def _has_router_bias(fields: Fields) -> bool:
    """One value per expert: a true bias (gpt-oss) or the correction of DeepSeek's auxiliary-loss-free balancing."""
    corrected = fields.get("topk_method") == "noaux_tc" or fields.flag("use_routing_bias")
    return corrected or fields.model_type in ("gpt_oss", "nemotron_h", "glm4_moe")

"""Blocks from fields: mixers (attention and its rotary positions, latents, delta nets, scans), feed-forward blocks, and
which layers have which."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perfmodel.files.tables import load_table
from perfmodel.models import architecture as arch
from perfmodel.models.executed import FAMILIES
from perfmodel.models.hf.families import Family
from perfmodel.models.hf.fields import Fields
from perfmodel.models.number_formats import format_of_dtype

_PLAIN_ACTIVATIONS = ("relu", "relu2")  # gated only by decoders that gate every activation
_THETA = 10_000.0  # of transformers' LlamaConfig
_PLAIN_ROPES = ("default", "none", "mrope")  # mrope: positions of a text are the same in all of its sections
_ROPE_SYNONYMS = {"su": "longrope"}
_CHOSEN_BELOW = 128  # tokens to a compressed key; so many and more leave few keys, all of which are seen
_TABLE = load_table("model_families")


def attention(
    fields: Fields,
    family: Family,
    *,
    window: int | None = None,
    chunk: int | None = None,
    use_rope: bool = True,
    num_kv_heads: int | None = None,
) -> arch.Attention:
    """Softmax attention of a layer of `family`, by the `fields` of its file. A sliding layer takes the `swa_*` sizes
    where the file has its own for them (MiMo-V2).

    window, chunk: how far back it sees, in tokens; None: all
    use_rope:      whether positions are rotated
    num_kv_heads:  where the layer has a number of its own"""
    prefix = "swa_" if window is not None and fields.has("swa_num_attention_heads") else ""
    num_heads = fields.integer(f"{prefix}num_attention_heads")
    head_dim = fields.optional(f"{prefix}head_dim") or fields.optional("head_dim") or family.head_dim
    if head_dim is None:
        head_dim, rest = divmod(d := fields.integer("hidden_size"), num_heads)
        if rest:
            raise fields.error(
                f"head_dim is missing and hidden_size {d} is not a multiple of num_attention_heads {num_heads}."
            )
    if num_kv_heads is None:
        num_kv_heads = _num_kv_heads(fields, num_heads, prefix)
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise fields.error(
            f"num_key_value_heads: got {num_kv_heads}, which does not divide num_attention_heads {num_heads}."
        )
    bias = fields.flag("attention_bias", fields.flag("bias"))
    has_qk_norm = fields.flag("use_qk_norm", fields.flag("qk_layernorm", family.qk_norm))
    norm_widths = {"per_layer": "all_heads", "per_head": "head"}
    sinks = "add_full_attention_sink_bias" if window is None else "add_swa_attention_sink_bias"
    if window is None and family.scales_embedding and fields.has("global_head_dim"):  # Gemma 4
        head_dim = fields.integer("global_head_dim")
        if fields.flag("attention_k_eq_v", True):
            num_kv_heads = fields.optional("num_global_key_value_heads") or num_kv_heads
    softmax_scale = fields.optional_number("attention_multiplier")  # Granite
    if fields.has("query_pre_attn_scalar"):  # Gemma
        softmax_scale = 1 / math.sqrt(fields.number("query_pre_attn_scalar", 1.0))
    return arch.Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=fields.integer(f"{prefix}v_head_dim", head_dim),
        window=window,
        chunk=chunk,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=bias if family.out_bias is None else family.out_bias,
        qk_norm=has_qk_norm or family.qk_norm,
        qk_norm_width=norm_widths.get(str(fields.get("qk_norm_type")), family.qk_norm_width),
        # Qwen3-Next and Qwen3.5 always gate, whether they say so or not.
        output_gate=fields.flag("attn_output_gate", fields.model_type.startswith(("qwen3_next", "qwen3_5"))),
        sinks=fields.flag(sinks, family.sinks),
        rope=_rope_of(fields, head_dim, window is not None) if use_rope and family.position_offset is None else None,
        softmax_scale=softmax_scale,
        logit_cap=fields.optional_number("attn_logit_softcapping"),
        q_rank=fields.optional("share_q_dim"),
        is_causal=not (family.is_encoder or fields.flag("use_bidirectional_attention"))
        and fields.flag("is_causal", True),
    )


def _num_kv_heads(fields: Fields, num_heads: int, prefix: str) -> int:
    """Key/value heads; Falcon and StarCoder say `multi_query` instead, unless Falcon's newer layout counts them."""
    is_multi_query = fields.flag("multi_query", fields.model_type in ("falcon", "gpt_bigcode"))
    if is_multi_query and not fields.flag("new_decoder_architecture"):
        return fields.integer("multi_query_group_num", 1)
    nested = _nested(fields, "attn_config").get("kv_n_heads")  # MPT, DBRX
    return int(nested) if nested else fields.integer(f"{prefix}num_key_value_heads", num_heads)


def _nested(fields: Fields, name: str) -> dict[str, Any]:
    block = fields.get(name)
    return block if isinstance(block, dict) else {}


def latent_attention(fields: Fields, is_choice_shared: bool = False) -> arch.LatentAttention:
    """MLA, by its ranks; a file's `head_dim` is the rotary part and is not read. is_choice_shared: an earlier layer's
    indexer chooses"""
    plain, rotary = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    is_rotated = not fields.flag("mla_use_nope")
    return arch.LatentAttention(
        num_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.optional("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=plain,
        qk_rope_head_dim=rotary,
        v_head_dim=fields.integer("v_head_dim"),
        indexer=_indexer(fields, is_choice_shared) if fields.has("index_topk") else None,
        rope=_rope_of(fields, rotary) if is_rotated else None,
        softmax_scale=_latent_softmax_scale(fields, plain + rotary),
        output_gate=fields.flag("mla_use_output_gate"),
    )


def compressed_attention(fields: Fields, ratio: int) -> arch.CompressedAttention:
    """DeepSeek-V4's, of a layer that compresses `ratio` tokens to one; those that are few it chooses among."""
    names = ("num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window")
    num_heads, head_dim, query_rank, groups, rank, window = map(fields.integer, names)
    rotary, rope = fields.integer("qk_rope_head_dim", 64), _rope_of(fields, fields.integer("qk_rope_head_dim", 64))
    if ratio:
        rope = replace(rope, theta=fields.number("compress_rope_theta", rope.theta))
    else:  # only positions of compressed keys are stretched
        rope = replace(rope, scaling=None)
    indexer = _indexer(fields) if 0 < ratio < _CHOSEN_BELOW else None
    return arch.CompressedAttention(num_heads, head_dim, rotary, query_rank, groups, rank, window, ratio, indexer, rope)


def _indexer(fields: Fields, is_shared: bool = False) -> arch.Indexer:
    num_heads, size, top_k = map(fields.integer, ("index_n_heads", "index_head_dim", "index_topk"))
    return arch.Indexer(num_heads, size, top_k, is_shared=is_shared)


def chosen_blocks(fields: Fields, dense: arch.Attention) -> arch.Attention:
    """`dense` to the blocks that an indexer chooses (MiniMax-M3), whose keys are cached in 16 bits (vLLM, "auto" of
    indexer_kv_dtype)."""
    nested, names = _nested(fields, "sparse_attention_config"), ("num_index_heads", "index_dim")
    flat = zip(("n_heads", "head_dim", "topk_blocks", "block_size"), (*names, "topk_blocks", "block_size"), strict=True)
    num_heads, size, num_blocks, block = (fields.integer(f"index_{x}", nested.get(f"sparse_{y}")) for x, y in flat)
    indexer = arch.Indexer(num_heads, size, num_blocks, key_bytes=2.0, scale_bytes=0.0)
    return replace(dense, sparsity=arch.BlockSparsity(block, num_blocks), indexer=indexer)


def gated_delta_net(fields: Fields) -> arch.GatedDeltaNet:
    """The linear attention of Qwen3-Next and Qwen3.5, and of Kimi-Linear and Kimi-K3, whose files have a block for it,
    or names of transformers' own."""
    block = _nested(fields, "linear_attn_config")
    if block or fields.has("linear_num_heads"):
        size = fields.integer("linear_head_dim", block.get("head_dim"))
        heads = fields.integer("linear_num_heads", block.get("num_heads"))
        kernel = fields.integer("linear_conv_kernel_dim", block.get("short_conv_kernel_size", 4))
        gate_rank = None if block.get("use_full_rank_gate") else size
        return arch.GatedDeltaNet(heads, heads, size, size, kernel, decay_rank=size, gate_rank=gate_rank)
    return arch.GatedDeltaNet(
        num_key_heads=fields.integer("linear_num_key_heads"),
        num_value_heads=fields.integer("linear_num_value_heads"),
        key_head_dim=fields.integer("linear_key_head_dim"),
        value_head_dim=fields.integer("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim", 4),
        state_format=format_of_dtype(fields.text("mamba_ssm_dtype", "float32")),
        names_state_format=fields.has("mamba_ssm_dtype"),
    )


def mamba(fields: Fields) -> arch.Mamba:
    """Mamba-2 where the file has scan heads, else Mamba-1 (mamba, jamba, falcon_mamba)."""
    d = fields.integer("hidden_size")
    expanded = int(fields.number("mamba_expand", 2) * d)
    common: dict[str, Any] = {
        "state_size": fields.integer("mamba_state_size"),
        "conv_kernel": fields.integer("mamba_conv_kernel", 4),
        "conv_bias": fields.flag("mamba_conv_bias", True),
        "proj_bias": fields.flag("mamba_proj_bias"),
    }
    limits = [  # files write infinity in several ways
        float(limit) if isinstance(limit, int | float) and limit < math.inf else None
        for limit in [*fields.items("time_step_limit"), 0.0, None][:2]
    ]
    is_pure = fields.model_type == "mamba2"
    if not (fields.has("mamba_num_heads") or is_pure):
        is_auto = fields.get("mamba_dt_rank", "auto") == "auto"
        return arch.Mamba(
            num_heads=expanded,
            head_dim=1,
            num_groups=1,
            dt_rank=math.ceil(d / 16) if is_auto else fields.integer("mamba_dt_rank"),
            inner_norm=fields.model_type == "jamba",
            **common,
        )
    num_heads = fields.integer("num_heads" if is_pure else "mamba_num_heads")
    head_name = "head_dim" if is_pure else "mamba_head_dim"
    is_auto = fields.get(head_name, "auto") == "auto"
    inner = fields.optional("mamba_d_ssm") or expanded
    return arch.Mamba(
        num_heads=num_heads,
        head_dim=max(inner // num_heads, 1) if is_auto else fields.integer(head_name),
        num_groups=fields.integer("mamba_num_groups", 1),
        chunk_size=fields.integer("mamba_chunk_size", 256),
        inner_norm=fields.flag("mamba_rms_norm", True),
        dt_min=limits[0] or 0.0,
        dt_max=limits[1],
        **common,
    )


def num_experts(fields: Fields) -> int:
    """Routed experts per MoE layer; 0 for dense models (a single expert is a dense block)."""
    count = fields.integer("num_experts", _nested(fields, "ffn_config").get("moe_num_experts", 0), minimum=0)
    return count if count > 1 else 0


def _ffn_choices(fields: Fields, family: Family) -> dict[str, Any]:
    """What dense blocks and experts have in common."""
    activation = fields.text("hidden_act", "silu")
    is_gated = activation not in _PLAIN_ACTIVATIONS or fields.model_type in FAMILIES
    return {
        "activation": activation,
        "gated": is_gated if family.gated_ffn is None else family.gated_ffn,
        "bias": fields.flag("mlp_bias", family.ffn_bias or fields.flag("bias")),  # Falcon's covers all linear layers
    }


def dense_ffn(fields: Fields, family: Family, intermediate_size: int | None = None) -> arch.DenseFFN:
    """A dense block; Llama 4 writes the width of its dense layers as `intermediate_size_mlp`."""
    return arch.DenseFFN(intermediate_size or _dense_width(fields), **_ffn_choices(fields, family))


def _dense_width(fields: Fields) -> int:
    names = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size")
    width = next(filter(None, map(fields.optional, names)), None)
    if width is not None:
        # The first Qwen counts gate and up together.
        return width // 2 if fields.model_type == "qwen" else width
    shared = fields.optional("shared_intermediate_size")  # Granite hybrids without experts
    if shared is not None:
        return shared
    if fields.model_type in _TABLE["four_times"] or fields.has("expansion_ratio"):
        return fields.integer("expansion_ratio", 4) * fields.integer("hidden_size")
    return fields.integer("intermediate_size")


def moe_ffn(fields: Fields, family: Family) -> arch.MoEFFN:
    """A mixture of experts with its shared part."""
    experts, nested = num_experts(fields), _nested(fields, "ffn_config")
    top_k = fields.integer("num_experts_per_tok", nested.get("moe_top_k"))
    if top_k > experts:
        raise fields.error(f"num_experts_per_tok: got {top_k}, but there are {experts} experts.")
    width = fields.optional("moe_intermediate_size") or fields.integer(
        "intermediate_size", nested.get("ffn_hidden_size")
    )
    shared, routing = _shared_width(fields, width), family.routing
    choices = _ffn_choices(fields, family)
    # One value per expert: a true bias (gpt-oss) or the correction of DeepSeek's auxiliary-loss-free balancing.
    is_corrected = fields.get("topk_method") == "noaux_tc" or fields.flag("use_routing_bias")
    has_groups = fields.get("topk_method") != "greedy"  # DeepSeek-V2-Lite
    return arch.MoEFFN(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=width,
        shared_intermediate_size=shared,
        # The sigmoid gate comes with Qwen's way of writing the shared width.
        shared_gate=shared > 0 and fields.has("shared_expert_intermediate_size"),
        router_bias=is_corrected or fields.model_type in _TABLE["biased_routers"],
        num_groups=fields.integer("n_group", 1) if has_groups else 1,
        top_k_groups=fields.integer("topk_group", 1) if has_groups else 1,
        latent_size=fields.optional("moe_latent_size"),
        routing=replace(
            routing,
            scoring=fields.text("scoring_func", routing.scoring),
            renormalizes=fields.flag("norm_topk_prob", routing.renormalizes),
            scale=fields.number("routed_scaling_factor", routing.scale),
        ),
        **choices | {"activation": family.activation or choices["activation"]},
    )


def _shared_width(fields: Fields, expert_width: int) -> int:
    """All shared experts together. Qwen, Granite and MiniMax write a width, DeepSeek a number of experts."""
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"):
        if fields.has(name):
            return fields.integer(name, minimum=0)
    if fields.has("interleave_moe_layer_step"):
        return expert_width  # Llama 4: always one, as wide as a routed expert
    if fields.has("enable_moe_block"):
        return fields.integer("intermediate_size")  # Gemma 4: a dense block beside the experts
    width = fields.optional("moe_shared_expert_intermediate_size") or expert_width
    return width * fields.integer("n_shared_experts", 0, minimum=0)


def is_moe_layer(fields: Fields, index: int, num_layers: int) -> bool:
    """Whether layer `index` (from 0) of a model with experts has them."""
    kinds = fields.per_layer("mlp_layer_types", num_layers)
    if kinds is not None:
        return bool(kinds[index] != "dense")
    listed = fields.get("moe_layers") or fields.get("moe_layers_enum")
    if isinstance(listed, list) and listed:
        return index in listed
    if fields.has("interleave_moe_layer_step"):  # Llama 4: every step-th layer, counted from 1
        return (index + 1) % fields.integer("interleave_moe_layer_step") == 0
    if fields.has("expert_layer_period"):  # Jamba
        offset = fields.integer("expert_layer_offset", 0, minimum=0)
        return (index - offset) % fields.integer("expert_layer_period") == 0
    if fields.has("moe_layer_start_index"):  # Ernie 4.5
        start = fields.integer("moe_layer_start_index", minimum=0)
        return index >= start and (index + 1) % fields.integer("moe_layer_interval", 1) == 0
    if index < fields.integer("first_k_dense_replace", 0, minimum=0) or index in fields.items("mlp_only_layers"):
        return False
    if isinstance(fields.get("moe_layer_freq"), list):
        flags = fields.per_layer("moe_layer_freq", num_layers)
        return flags is None or bool(flags[index])
    if index % fields.integer("moe_layer_freq", 1):
        return False
    return (index + 1) % fields.integer("decoder_sparse_step", 1) == 0


def _rope_of(fields: Fields, head_dim: int, is_sliding: bool = False) -> arch.Rope:
    """The rotary positions (`rope_theta`, `rope_scaling` or `rope_parameters`) of a layer whose heads have `head_dim`
    elements; `is_sliding`: of one with a window."""
    block = _rope_block(fields, is_sliding)
    theta, is_local = block.get("rope_theta"), is_sliding and fields.has("rope_local_base_freq")
    if theta is None:
        theta = fields.number("rope_local_base_freq" if is_local else "rope_theta", _THETA)
    if is_local:  # Gemma 3 stretches the layers that see everything
        block = {}
    share = block.get("partial_rotary_factor") or fields.number("partial_rotary_factor", fields.number("rotary_pct", 1))
    dim = fields.optional("rotary_dim") or int(head_dim * _rope_number(fields, "partial_rotary_factor", share))
    return arch.Rope(
        theta=_rope_number(fields, "rope_theta", theta),
        dim=None if dim == head_dim else dim,
        scaling=_rope_scaling(fields, block),
        is_interleaved=fields.flag("rope_interleave", fields.model_type in _TABLE["interleaved"]),
    )


def _latent_softmax_scale(fields: Fields, width: int) -> float | None:
    """What MLA multiplies scores by, where that is not 1 / sqrt(width): YaRN's factor enters it squared (DeepSeek's
    modelling files); None where it does not."""
    block = _rope_block(fields, is_sliding=False)
    of_all = block.get("mscale_all_dim")
    if not of_all or _rope_kind(block) is None:
        return None
    return _yarn_factor(_rope_number(fields, "factor", block.get("factor")), float(of_all)) ** 2 / math.sqrt(width)


def _rope_block(fields: Fields, is_sliding: bool) -> Mapping[str, Any]:
    """The block that says how frequencies scale, or that of the layer's kind where there is one for each."""
    block = fields.get("rope_parameters")
    if not isinstance(block, Mapping):
        return {}
    nested = block.get("sliding_attention" if is_sliding else "full_attention")
    if isinstance(nested, Mapping):
        return nested
    return {} if any(isinstance(value, Mapping) for value in block.values()) else block


def _rope_kind(block: Mapping[str, Any]) -> str | None:
    kind = str(block.get("rope_type") or block.get("type") or "default")
    return None if kind in _PLAIN_ROPES else _ROPE_SYNONYMS.get(kind, kind)


def _rope_scaling(fields: Fields, block: Mapping[str, Any]) -> arch.RopeScaling | None:
    kind = _rope_kind(block)
    if kind is None:
        return None
    trained = fields.optional("max_position_embeddings")
    name = "original_max_position_embeddings"
    original = block.get(name) or fields.get(name) or trained
    factor = block.get("factor")
    if factor is None and trained and original and kind in ("yarn", "longrope"):
        factor = trained / original
    if kind == "dynamic":  # its code counts from what the file states as the limit
        original = trained
    lengths = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return arch.RopeScaling(
        kind=kind,
        factor=None if factor is None else _rope_number(fields, "factor", factor),
        original_positions=original,
        **{name: _rope_number(fields, name, block.get(name) or default) for name, default in lengths.items()},
        truncates=bool(block.get("truncate", True)),
        amplitude=_amplitude(fields, kind, factor, original, block),
        short_factors=_rope_factors(fields, block, "short_factor"),
        long_factors=_rope_factors(fields, block, "long_factor"),
    )


def _amplitude(fields: Fields, kind: str, factor: Any, original: Any, block: Mapping[str, Any]) -> float:
    """Stated, or by the rule of YaRN (Peng et al. 2023, 0.1 ln s + 1) or LongRoPE (sqrt(1 + ln s / ln L))."""
    stated = block.get("attention_factor")
    if stated is not None:
        return _rope_number(fields, "attention_factor", stated)
    if kind not in ("yarn", "longrope") or factor is None or not original:
        return 1.0
    stretch = _rope_number(fields, "factor", factor)
    if kind == "longrope":
        return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    one, of_all = block.get("mscale"), block.get("mscale_all_dim")
    if one and of_all:
        return _yarn_factor(stretch, float(one)) / _yarn_factor(stretch, float(of_all))
    return _yarn_factor(stretch)


def _yarn_factor(stretch: float, weight: float = 1.0) -> float:
    return 1.0 if stretch <= 1 else 0.1 * weight * math.log(stretch) + 1.0


def _rope_factors(fields: Fields, block: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = block.get(name) or ()
    if not isinstance(values, list | tuple):
        raise fields.error(f"rope_scaling.{name}: got {values!r}; expected a list of numbers.")
    return tuple(_rope_number(fields, name, value) for value in values)


def _rope_number(fields: Fields, name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise fields.error(f"rope_scaling.{name}: got {value!r}; expected a positive number.")
    return float(value)

"""A decoder loaded from a reference's files beside the reference itself: the largest difference of all logits. Tiny
random models of Hugging Face `transformers`, one for each family and feature whose computation is compared."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import Any

import torch

from perfmodel.models import load_model
from perfmodel.specs import EngineSpec
from perfmodel_executors.kernels import Kernels
from perfmodel_executors.models.batch import TokenSegment, build_batch
from perfmodel_executors.models.decoder import Decoder, load_decoder
from perfmodel_executors.models.support import CPU

_SIZES: dict[str, Any] = {
    **{"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 101},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"tie_word_embeddings": False, "pad_token_id": 0, "initializer_range": 0.3},
}


@dataclass(frozen=True)
class Reference:
    """A `family` as people call it, with the feature that this one shows, and the fields of its config."""

    family: str
    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


_HEAD = {"head_dim": 16}
_TIED = {"tie_word_embeddings": True}
_WINDOW: dict[str, Any] = {"sliding_window": 9}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_ONE_GROUP = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 40}
_LATENT: dict[str, Any] = {
    **{"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1},
    **{"n_shared_experts": 2, "n_group": 4, "topk_group": 2, **_ROUTED},
}
_MAMBA = {"conv_kernel": 4, "n_groups": 2, "chunk_size": 16}
_HALF_ROTARY = _rope("default", partial_rotary_factor=0.5) | _HEAD
_DELTA_NET = {
    **_rope("default", partial_rotary_factor=0.25),
    **{"num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4},
    # A head whose state says next to nothing is normalised all the same; this bounds what rounding becomes.
    "rms_norm_eps": 1e-3,
}
_LONGROPE: dict[str, Any] = {"sliding_window": None}
_LONGROPE |= _rope("longrope", short_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 2.5], long_factor=[2.0, 2.2, 3.0, 4.0, 5.0, 6.0])
_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
_YARN = {"factor": 8.0, "original_max_position_embeddings": 32}
_ROPES = {
    **{"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}},
    **{"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
}
_GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0}
_GREEDY = {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
_SCALED, _YARN_SCALED = {"routed_scaling_factor": 2.5}, _rope("yarn", mscale=1.0, mscale_all_dim=1.0, **_YARN)
_LIMITED = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5, "norm_topk_prob": False}

REFERENCES: dict[str, Reference] = {
    "llama": Reference("Llama 1, 2", "llama"),
    "llama-mqa": Reference("Llama 1, 2", "llama", {"num_key_value_heads": 1} | _TIED),
    "llama-biases": Reference("Llama 1, 2", "llama", {"attention_bias": True, "mlp_bias": True} | _HEAD),
    "llama-llama3": Reference("Llama 3", "llama", _LLAMA3),
    "llama-yarn": Reference("Llama 3", "llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-linear": Reference("Llama 3", "llama", _rope("linear", factor=4.0)),
    "llama-dynamic": Reference("Llama 3", "llama", _rope("dynamic", factor=2.0)),
    "mistral": Reference("Mistral", "mistral", _WINDOW),
    "qwen2": Reference("Qwen2", "qwen2"),
    "qwen3": Reference("Qwen3", "qwen3", _HEAD),
    "phi3": Reference("Phi-3", "phi3", {"sliding_window": 13}),
    "phi3-longrope-short": Reference("Phi-3", "phi3", _LONGROPE | {"original_max_position_embeddings": 128}, 128),
    "phi3-longrope-long": Reference("Phi-3", "phi3", _LONGROPE | {"original_max_position_embeddings": 16}),
    "smollm3": Reference("SmolLM3", "smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "granite": Reference("Granite", "granite", _GRANITE),
    "olmo2": Reference("OLMo 2", "olmo2"),
    "mixtral": Reference("Mixtral", "mixtral", {"num_local_experts": 6, "sliding_window": None}),
    "qwen2-moe": Reference("Qwen2-MoE", "qwen2_moe", _SHARED | {"norm_topk_prob": False, "mlp_only_layers": [0]}),
    "qwen3-moe": Reference("Qwen3-MoE", "qwen3_moe", _EXPERTS | {"norm_topk_prob": True} | _HEAD),
    "qwen3-moe-not-renormalised": Reference("Qwen3-MoE", "qwen3_moe", _EXPERTS | {"norm_topk_prob": False} | _HEAD),
    "gemma": Reference("Gemma", "gemma", _HEAD | _TIED),
    "gemma2": Reference(
        "Gemma 2",
        "gemma2",
        {"num_hidden_layers": 4, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 3.0, **_HEAD, **_TIED, **_WINDOW},
    ),
    "gemma3": Reference(
        "Gemma 3",
        "gemma3_text",
        {"num_hidden_layers": 6, "query_pre_attn_scalar": 12, "rope_parameters": _ROPES, **_HEAD, **_TIED, **_WINDOW},
    ),
    "gpt-oss": Reference(
        "gpt-oss",
        "gpt_oss",
        {"num_hidden_layers": 4, "num_local_experts": 6, "num_experts_per_tok": 2, **_HEAD, **_WINDOW}
        | _rope("yarn", beta_fast=32.0, beta_slow=1.0, truncate=False, **_YARN),
    ),
    "deepseek-v2": Reference("DeepSeek-V2", "deepseek_v2", _LATENT | _LIMITED),
    "deepseek-v2-lite": Reference("DeepSeek-V2", "deepseek_v2", _LATENT | _GREEDY),
    "deepseek-v3": Reference("DeepSeek-V3", "deepseek_v3", _LATENT | _SCALED),
    "deepseek-v3-yarn": Reference("DeepSeek-V3", "deepseek_v3", _LATENT | _SCALED | _YARN_SCALED),
    "mamba2": Reference("Mamba 2", "mamba2", _MAMBA | {"state_size": 16, "expand": 2, "num_heads": 8, "head_dim": 12}),
    "nemotron-h": Reference(
        "Nemotron-H",
        "nemotron_h",
        {"ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 12, "num_hidden_layers": 4}
        | {"layers_block_type": ["mamba", "mlp", "attention", "moe"], "moe_shared_expert_intermediate_size": 20}
        # NVIDIA's own code and vLLM limit time steps by time_step_limit; transformers by this, and only in prompts.
        | {"time_step_min": 1e-9, **_HEAD, **_MAMBA, **_ROUTED, **_ONE_GROUP},
    ),
    "qwen3-next": Reference("Qwen3-Next", "qwen3_next", _DELTA_NET | _SHARED | {"norm_topk_prob": True}),
    "qwen3.5": Reference("Qwen3.5", "qwen3_5_text", _DELTA_NET),
    "qwen3.5-moe": Reference("Qwen3.5", "qwen3_5_moe_text", _DELTA_NET | _SHARED | {"norm_topk_prob": True}),
    "glm4-moe": Reference(
        "GLM-4.5",
        "glm4_moe",
        {"attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
        | {**_HALF_ROTARY, **_ROUTED, **_ONE_GROUP},
    ),
    "minimax-m2": Reference(
        "MiniMax-M2", "minimax_m2", _HALF_ROTARY | {"num_local_experts": 8, "num_experts_per_tok": 3}
    ),
}


def build(reference: Reference) -> Any:
    """The model in fp32, with weights, norms and biases that are none of them 0 or 1. Needs `transformers`."""
    library: Any = import_module("transformers")
    library.logging.set_verbosity_error()  # of configurations that no checkpoint has
    library.utils.logging.disable_progress_bar()
    torch.manual_seed(7)
    config = library.AutoConfig.for_model(reference.model_type, **(_SIZES | reference.fields))
    config.dtype = torch.float32
    model = library.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name or not tensor.is_floating_point() or name.endswith("embed_scale"):
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("A_log"):  # states that remember: where all decays at once, norms divide noise by noise
                tensor.copy_(0.3 * noise - 1)
            elif tensor.ndim > 1:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
            else:
                tensor.add_(0.3 * noise)
    return model


BLOCK = 4
TOLERANCE = 1e-4  # of a logit in fp32
# (new tokens, tokens before them) of each sequence in each step.
Step = Sequence[tuple[int, int]]
# Prompts in chunks, decodes beside them, and a sequence that comes late.
STEPS: Sequence[Step] = (
    ((7, 0), (30, 0)),
    ((1, 7), (11, 30)),
    ((13, 8), (1, 41)),
    ((1, 21), (1, 42)),
    ((1, 22), (9, 43), (21, 0)),
)


def executed(
    reference: Reference, model: Any, folder: Path, device: torch.device = CPU, kernels: Kernels | None = None
) -> Decoder:
    """The decoder with the weights of `model`, by way of files in `folder`; on `device`, by `kernels` (torch's)."""
    model.save_pretrained(folder)
    engine = EngineSpec(dtype="float32", block_size=BLOCK, max_model_len=reference.max_model_len)
    return load_decoder(load_model(folder / "model.safetensors"), engine, device=device, kernels=kernels)


def largest_difference(decoder: Decoder, model: Any, steps: Sequence[Step] = STEPS, seed: int = 0) -> float:
    """Between all logits of `steps` through the paged cache and those of `model` in one pass; inf for other tokens."""
    count = max(map(len, steps))
    length = max(new + done for step in steps for new, done in step)
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(1, decoder.model.vocab_size, (count, length), generator=generator).tolist()
    width = -(-length // BLOCK)
    tables = [list(range(width * i, width * (i + 1)))[::-1] for i in range(count)]
    with torch.inference_mode():
        expected = [model(torch.tensor([text]), use_cache=False).logits[0].float() for text in texts]
        cache, worst = decoder.new_cache(BLOCK, width * count), 0.0
        for step in steps:
            rows = [(i, done, done + new) for i, (new, done) in enumerate(step) if new]
            segments = [TokenSegment(texts[i][a:b], a, tables[i], is_verified=True) for i, a, b in rows]
            logits = decoder.forward(build_batch(segments, BLOCK, decoder.device), cache).cpu()
            wanted = torch.cat([expected[i][a:b] for i, a, b in rows])
            if not torch.equal(logits.argmax(-1), wanted.argmax(-1)):
                return float("inf")
            apart = float((logits - wanted).abs().max())
            if isnan(apart):  # max(0.0, nan) is 0.0
                return apart
            worst = max(worst, apart)
    return worst

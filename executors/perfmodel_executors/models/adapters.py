"""LoRA adapters: random thin matrices beside linear layers. A step's rows are grouped by the adapter that their request
names, and each group goes through its own, one adapter after another: y += (x A^T) B^T."""

import math
from typing import Any

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.adapters import AdapterTarget, block_targets
from perfmodel.ops.sharding import Sharding
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel_executors.kernels.weight_formats import AdaptedWeight, AdapterBatch
from perfmodel_executors.models.weights import AttentionWeights, DecoderWeights, FFNWeights


def add_adapters(
    weights: DecoderWeights, model: ModelSpec, engine: EngineSpec, count: int, seed: int = 0
) -> AdapterBatch:
    """`count` random adapters beside the layers that `engine` names; returns what they read of a step. Raises
    PerfmodelError for what is not executed."""
    named = engine.lora_target_modules
    cases = {
        "embedding and LM head": named is None or bool({"embed_tokens", "lm_head"} & set(named)),
        "more than there are slots": count > engine.max_loras,
        "layers with a gate on the output": any(getattr(x.mixer, "output_gate", False) for x, _ in model.layers),
    }
    for what, applies in cases.items():
        if applies:
            raise PerfmodelError(
                f"{model.name}: adapters of {what} are not executed; set engine.lora_target_modules to linear layers "
                f"(qkv_proj, o_proj, gate_up_proj, down_proj) and engine.max_loras to their number, or simulate it."
            )
    assert named is not None
    batch, dtype = AdapterBatch(), weights.final_norm.dtype
    generator = torch.Generator(weights.final_norm.device).manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, device=weights.final_norm.device)
        return values.div_(math.sqrt(shape[-1])).to(dtype)

    def adapted(weight: Any, target: AdapterTarget) -> Any:
        if target.name not in named:
            return weight
        rank = engine.max_lora_rank
        inputs_ASRK = drawn(count, len(target.widths), rank, target.num_in)
        return AdaptedWeight(weight, inputs_ASRK, tuple(drawn(count, n, rank) for n in target.widths), batch)

    for layer, own in zip(model.iter_layers(), weights.layers, strict=True):
        for block, held in ((layer.mixer, own.mixer), (layer.ffn, own.ffn)):
            targets = block_targets(block, model.hidden_size, Sharding())
            if isinstance(held, AttentionWeights):
                held.qkv, held.out = adapted(held.qkv, targets[0]), adapted(held.out, targets[1])
            elif isinstance(held, FFNWeights):
                held.up, held.down = adapted(held.up, targets[0]), adapted(held.down, targets[1])
    return batch

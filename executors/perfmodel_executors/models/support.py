"""What the decoder runs, and a sentence for what it does not."""

import math
import os
import sys
from dataclasses import replace

import torch

from perfmodel.errors import DoesNotFitError, PerfmodelError
from perfmodel.models.architecture import Attention, MoEFFN, QuantizationSpec
from perfmodel.models.executed import why_not_executed
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import served_model
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.traffic import ExpertRouting
from perfmodel_executors.kernels.kv_pages import FP8, Packing
from perfmodel_executors.models.kept import Tier
from perfmodel_executors.models.quantized import check_quantization, refuse

CPU = torch.device("cpu")

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_PACKED_BITS = {"int8": 8, "int4": 4, "int2": 2}
_KV_DTYPES = _DTYPES | {"fp8": FP8, "int8": torch.int8}


def torch_dtype(model: ModelSpec) -> torch.dtype:
    sentence = f"weights in {model.dtype} are not executed yet; set engine.dtype to bfloat16 or float32."
    refuse(model.name, {sentence: model.dtype not in _DTYPES})
    return _DTYPES[model.dtype]


def with_plain_weights(model: ModelSpec) -> ModelSpec:
    """The model with the weights of a GGUF file dequantised when they are loaded, for what changes or compares them."""
    if model.weights_origin is None or model.quantization.method != "gguf":
        return model
    return replace(model, quantization=QuantizationSpec(kv_cache=model.quantization.kv_cache))


def kv_dtype(model: ModelSpec, dtype: torch.dtype) -> torch.dtype:
    name = model.quantization.kv_cache
    return dtype if name in (None, model.dtype) or kv_packing(model) else _KV_DTYPES[name]


def kv_packing(model: ModelSpec) -> Packing | None:
    return _packing(model.quantization, model.quantization.kv_cache)


def _packing(quantization: QuantizationSpec, name: str | None) -> Packing | None:
    bits = _PACKED_BITS.get(name or "")
    return Packing(bits, quantization.kv_group_size) if bits and quantization.kv_group_size else None


def kv_tiers(model: ModelSpec, dtype: torch.dtype) -> list[Tier]:
    """How the newest tokens are kept, newest tier first, where they are in other formats than the oldest."""
    own, dtypes = model.quantization, _KV_DTYPES | {model.dtype: dtype}
    return [Tier(tokens, dtypes.get(name, torch.uint8), _packing(own, name)) for tokens, name in own.kv_recent]


def check_memory(what: str, num_bytes: float, device: torch.device = CPU) -> None:
    """Raises DoesNotFitError for what the device's memory cannot hold, before the machine finds out."""
    if device.type == "meta":  # shapes without memory
        return
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the allocator keeps of dropped tensors is free, too
        free, total = torch.cuda.mem_get_info(device)
        if num_bytes > free:
            raise DoesNotFitError(
                f"{what} of {num_bytes / 1e9:.1f} GB do not fit {torch.cuda.get_device_name(device)}, which has "
                f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free; lower gpu_memory_utilization, set "
                f"num_gpu_blocks_override, or raise tensor_parallel_size."
            )
        return
    physical = math.inf  # where the system does not say it
    if sys.platform != "win32":
        physical = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if num_bytes > 0.8 * physical:
        raise DoesNotFitError(
            f"{what} of {num_bytes / 1e9:.1f} GB do not fit this machine, which has {physical / 1e9:.1f} GB; execute a "
            f"smaller model, or fewer KV blocks (engine.num_gpu_blocks_override)."
        )


def _attention(model: ModelSpec) -> list[Attention]:
    return [layer.mixer for layer, _ in model.layers if isinstance(layer.mixer, Attention)]


def check_executable(model: ModelSpec, attention: str = "flash") -> None:
    """Raises PerfmodelError with one sentence that names what is not executed yet; attention: flash | standard."""
    check_quantization(model)
    quantization, packing, mixers = model.quantization, kv_packing(model), _attention(model)
    is_standard = attention == "standard"
    kv_cache, group = quantization.kv_cache, quantization.kv_group_size
    is_other = packing is None and kv_cache not in (None, model.dtype, *_KV_DTYPES)
    limited = any(m.span is not None or m.sparsity is not None for m in mixers)
    has_terms = any(_has_own_softmax(m) and (is_standard or m.is_rolling or m.sparsity is not None) for m in mixers)
    unfit = [m.head_dim for m in mixers if packing and not all(map(packing.fits, (m.head_dim, m.v_head_dim)))]
    cases = {
        f"a KV cache in {kv_cache} is not executed yet; set kv_cache_dtype to auto, fp8, int8, int4 or int2.": is_other,
        **_kept_cases(model, mixers, is_standard),
        # A token is packed when it comes; rolling caches look at it before it is stored.
        "a rolling KV cache (model_changes.window) with scales in groups is not executed yet; set kv_cache_dtype to "
        "auto, fp8 or int8, or simulate it.": packing is not None and any(m.is_rolling for m in mixers),
        f"heads of {unfit[:1] and unfit[0]} are not whole groups of {group}; set engine.kv_cache_group_size to a "
        f"divisor.": bool(unfit),
        # Standard attention computes and throws away what a window or blocks hide; there is no kernel that does.
        "standard attention is executed over all keys only, and this model limits what a query sees; set "
        "engine.attention to flash, or leave the window or the blocks out.": is_standard and limited,
        # They have one kernel, over all keys, a window or a chunk.
        "capped scores or sinks in the softmax are not executed with standard attention, a rolling KV cache "
        "(model_changes.window) or blocks (model_changes.sparse); leave those out.": has_terms,
    }
    refuse(model.name, cases)
    sparsity = model.weight_sparsity
    is_packed, reason = quantization.weights is not None or sparsity is not None, why_not_executed(model)
    is_single = sparsity is not None and not sparsity.is_2_4
    missing = {
        reason or "": reason is not None,
        "a product by single sparse weights (prune with storage: sparse; dense storage runs)": is_single,
        "early exit (model_changes.early_exit) from layers of quantised or 2:4 sparse weights": is_packed
        and model.exits is not None,
    }
    refuse(model.name, missing, "{} is not executed yet; it can be simulated.")


def _has_own_softmax(mixer: Attention) -> bool:
    return mixer.logit_cap is not None or mixer.sinks


def _kept_cases(model: ModelSpec, mixers: list[Attention], is_standard: bool) -> dict[str, bool]:
    """Tiers by age and eviction by scores have one way each to attend: over all keys, of 16 bits or of integers."""
    formats = [name for _, name in model.quantization.kv_recent]
    evicts = any(mixer.evicts_to is not None for mixer in mixers)
    if not formats and not evicts:
        return {}
    what = "a KV cache in several precisions" if formats else "a KV cache that evicts tokens"
    known = (model.dtype, "int8", "int4", "int2") if formats else (model.dtype,)
    other = [name for name in (*formats, model.quantization.kv_cache or model.dtype) if name not in known]
    how = "and evicting, too," if evicts and formats else f"with {other[0] if other else None}"
    limits = [m for m in mixers if m.evicts_to is None and (m.span is not None or m.sparsity is not None)]
    is_other = bool(other) or (evicts and bool(formats))
    is_limited = any(map(_has_own_softmax, mixers)) or bool(formats and limits)
    return {
        f"{what} {how} is not executed; set its formats to {' or '.join(('auto', *known[1:]))}.": is_other,
        f"{what} is executed for attention over all keys, without caps and sinks; simulate it.": is_limited,
        f"{what} is not executed with standard attention; set attention to flash.": bool(formats) and is_standard,
    }


def check_engine(engine: EngineSpec) -> None:
    """Raises PerfmodelError for what the engine plans and the decoder does not run yet."""
    offload = engine.kv_offload
    cases = {
        "a generation of FlashAttention (engine.flash_attn_version) is not executed yet; it can be "
        "simulated.": engine.flash_attn_version is not None,
        "TF32 (engine.float32_matmul_precision=high) is not executed yet; it can be "
        "simulated.": engine.float32_matmul_precision == "high",
        "sums in FP16 (engine.allow_fp16_accumulation) is not executed yet; it can be "
        "simulated.": engine.allow_fp16_accumulation,
        "copies of KV blocks beside a step (engine.kv_offload.overlap=true) are not executed, only copies before it; "
        "set engine.kv_offload.overlap to false, or simulate it.": offload is not None and offload.overlap,
        "loads beside steps, other write policies than write_back and secondary tiers (engine.kv_offload) are not "
        "executed; leave them out, or simulate them.": offload is not None and offload.is_tiered,
        "a second tier of KV blocks (engine.kv_offload) is not executed beside drafts, whose models keep keys and "
        "values of their own; leave out engine.speculative_config, or simulate it.": offload is not None
        and engine.speculative_config is not None,
    }
    for sentence, applies in cases.items():
        if applies:
            raise PerfmodelError(sentence)


def check_blocks(model: ModelSpec, block_size: int) -> None:
    """Raises PerfmodelError where the blocks that a query sees are not whole KV blocks."""
    for block in (mixer.sparsity.block for mixer in _attention(model) if mixer.sparsity is not None):
        sentence = (
            f"model_changes.sparse.block={block} is not a multiple of engine.block_size={block_size}, and what is seen "
            f"is read by whole KV blocks; change one of them."
        )
        refuse(model.name, {sentence: block % block_size != 0})


def check_capacity(model: ModelSpec, routing: ExpertRouting, is_expert_parallel: bool = False) -> None:
    """Raises PerfmodelError for experts of a fixed capacity that have biases, or that ranks share out whole."""
    if routing.capacity_factor is None:
        return
    has_biases = any(isinstance(layer.ffn, MoEFFN) and layer.ffn.bias for layer, _ in model.layers)
    cases = {
        "experts of a fixed capacity are not executed whole on several ranks; leave out routing.capacity_factor or "
        "engine.enable_expert_parallel, or simulate it.": is_expert_parallel,
        "experts with biases are not executed with a fixed capacity; leave out routing.capacity_factor, or simulate "
        "it.": has_biases,
    }
    refuse(model.name, cases)


def check_served(model: ModelSpec, engine: EngineSpec) -> None:
    """Raises PerfmodelError for what the engine does with keys and values of a model that keeps something else."""
    model = served_model(model, engine)
    has_others = any(not isinstance(layer.mixer, Attention | None) for layer, _ in model.layers)
    cases = {
        "two halves of a step that take turns (engine.enable_dbo) are not executed; leave it out, or simulate it.": (
            engine.enable_dbo
        ),
        "feed-forward blocks on devices of their own (engine.afd_config) are not executed; leave it out, or simulate "
        "it.": engine.afd_config is not None,
        "prompts whose tokens ranks share out (engine.prefill_context_parallel_size) are not executed; leave it out, "
        "or simulate it.": engine.prefill_context_parallel_size > 1,
        "steps without a KV cache (engine.kv_cache=off) have no tokens to evict or to round; leave out "
        "engine.kv_eviction, kv_tiers and kv_cache_residual_tokens.": engine.kv_cache == "off"
        and model.keeps_beside_blocks,
        "steps without a KV cache (engine.kv_cache=off) are executed for softmax attention only, and this model has "
        "other mixers; set engine.kv_cache to paged.": engine.kv_cache == "off" and has_others,
        "a second tier holds KV blocks (engine.kv_offload), and this model keeps states or tokens beside them, which "
        "would be missing when a sequence comes back; leave it out, or simulate it.": engine.kv_offload is not None
        and model.has_states,
        "drafted tokens that are turned down would have to be taken out of recurrent states again, or of keys kept by "
        "age or score; execute it without engine.speculative_config.": engine.speculative_config is not None
        and model.has_states,
    }
    refuse(model.name, cases)


def check_capturable(
    model: ModelSpec, attention: str, is_expert_parallel: bool = False, num_stripes: int = 1, num_adapters: int = 0
) -> None:
    """Raises PerfmodelError for decodes that a CUDA graph cannot hold, since their kernels ask the host for lengths."""
    reasons = {
        "standard attention (engine.attention)": attention == "standard",
        "a KV cache in several precisions": bool(model.quantization.kv_recent),
        "outliers multiplied apart (llm_int8)": model.quantization.outlier_share > 0,
        "early exit (model_changes.early_exit)": model.exits is not None,
        "a rank's share of whole experts (engine.enable_expert_parallel)": is_expert_parallel,
        "a share of the cached tokens (engine.decode_context_parallel_size)": num_stripes > 1,
        "LoRA adapters (engine.enable_lora)": num_adapters > 0,
    }
    how = "{} is executed by kernels that CUDA graphs cannot hold; set engine.enforce_eager to true, or simulate it."
    refuse(model.name, reasons, how)

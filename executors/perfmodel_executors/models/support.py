"""What the decoder runs, and a sentence for what it does not."""

import math
import os
import sys
from dataclasses import replace

import torch

from perfmodel.errors import DoesNotFitError, PerfmodelError
from perfmodel.models.architecture import (
    Attention,
    Mixer,
    MoEFFN,
    QuantizationSpec,
)
from perfmodel.models.executed import why_not_executed
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import served_model
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.traffic import ExpertRouting
from perfmodel_executors.kernels.kv_pages import FP8, Packing
from perfmodel_executors.models.kept import Tier
from perfmodel_executors.models.quantized import check_quantization

CPU = torch.device("cpu")

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


_PACKED_BITS = {"int8": 8, "int4": 4, "int2": 2}
_KV_DTYPES = _DTYPES | {"fp8": FP8, "int8": torch.int8}


def torch_dtype(model: ModelSpec) -> torch.dtype:
    """The dtype of weights and activations."""
    if model.dtype not in _DTYPES:
        raise PerfmodelError(
            f"{model.name}: weights in {model.dtype} are not executed yet; set engine.dtype to bfloat16 or float32."
        )
    return _DTYPES[model.dtype]


def with_plain_weights(model: ModelSpec) -> ModelSpec:
    """The model with the weights of a GGUF file dequantised when they are loaded, for what changes or compares them."""
    if model.weights_origin is None or model.quantization.method != "gguf":
        return model
    return replace(model, quantization=QuantizationSpec(kv_cache=model.quantization.kv_cache))


def kv_dtype(model: ModelSpec, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache of a model that computes in `dtype`: the same, unless its quantisation names one."""
    name = model.quantization.kv_cache
    return dtype if name in (None, model.dtype) or kv_packing(model) else _KV_DTYPES[name]


def kv_packing(model: ModelSpec) -> Packing | None:
    """How integers in groups are stored in the KV cache; None for formats without groups."""
    quantization = model.quantization
    bits = _PACKED_BITS.get(quantization.kv_cache or "")
    return Packing(bits, quantization.kv_group_size) if bits and quantization.kv_group_size else None


def kv_tiers(model: ModelSpec, dtype: torch.dtype) -> list[Tier]:
    """How the newest tokens are kept, newest tier first, where they are in other formats than the oldest."""
    quantization, found = model.quantization, []
    for tokens, name in quantization.kv_recent:
        bits = _PACKED_BITS.get(name) if quantization.kv_group_size else None
        packing = Packing(bits, quantization.kv_group_size) if bits else None
        found.append(Tier(tokens, dtype if name == model.dtype else _KV_DTYPES.get(name, torch.uint8), packing))
    return found


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
    physical = _physical_bytes()
    if num_bytes > 0.8 * physical:
        raise DoesNotFitError(
            f"{what} of {num_bytes / 1e9:.1f} GB do not fit this machine, which has {physical / 1e9:.1f} GB; execute a "
            f"smaller model, or fewer KV blocks (engine.num_gpu_blocks_override)."
        )


def _physical_bytes() -> float:
    """The size of this machine's memory; infinite where the system does not say it, as on Windows."""
    if sys.platform != "win32":
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    else:
        return math.inf


def check_executable(model: ModelSpec, attention: str = "flash") -> None:
    """Raises PerfmodelError with one sentence that names what is not executed yet; attention: flash | standard."""
    check_quantization(model)
    quantization = model.quantization
    packing = kv_packing(model)
    if packing is None and quantization.kv_cache not in (None, model.dtype, *_KV_DTYPES):
        raise PerfmodelError(
            f"{model.name}: a KV cache in {quantization.kv_cache} is not executed yet; set kv_cache_dtype to auto, "
            f"fp8, int8, int4 or int2."
        )
    _check_kept(model, attention)
    if packing is not None:
        _check_packing(model, packing)
    if attention == "standard":
        _check_standard(model)
    _check_softmax(model, attention)
    missing = why_not_executed(model) or _missing_around(model)
    if missing:
        raise PerfmodelError(f"{model.name}: {missing} is not executed yet; it can be simulated.")


def _check_kept(model: ModelSpec, attention: str) -> None:
    """Tiers by age and eviction by scores have one way each to attend: over all keys, of 16 bits or of integers."""
    quantization = model.quantization
    formats = [name for _, name in quantization.kv_recent]
    mixers = [layer.mixer for layer, _ in model.layers if isinstance(layer.mixer, Attention)]
    evicts = any(mixer.evicts_to is not None for mixer in mixers)
    if not formats and not evicts:
        return
    what = "a KV cache in several precisions" if formats else "a KV cache that evicts tokens"
    integers = ("int8", "int4", "int2")
    known = (model.dtype, *integers) if formats else (model.dtype,)
    other = [name for name in (*formats, quantization.kv_cache or model.dtype) if name not in known]
    if other or (evicts and formats):
        found = "and evicting, too," if evicts and formats else f"with {other[0]}"
        raise PerfmodelError(
            f"{model.name}: {what} {found} is not executed; set its formats to {' or '.join(('auto', *known[1:]))}."
        )
    limited = [m for m in mixers if m.evicts_to is None and (m.span is not None or m.sparsity is not None)]
    limited += [m for m in mixers if m.logit_cap is not None or m.sinks]
    if (formats and limited) or (evicts and any(m.logit_cap is not None or m.sinks for m in mixers)):
        raise PerfmodelError(
            f"{model.name}: {what} is executed for attention over all keys, without caps and sinks; simulate it."
        )
    if formats and attention == "standard":
        raise PerfmodelError(f"{model.name}: {what} is not executed with standard attention; set attention to flash.")


def _check_packing(model: ModelSpec, packing: Packing) -> None:
    """A token is packed when it comes; rolling caches look at it before it is stored."""
    for layer, _ in model.layers:
        mixer = layer.mixer
        if not isinstance(mixer, Attention):
            continue
        if mixer.is_rolling:
            raise PerfmodelError(
                f"{model.name}: a rolling KV cache (model_changes.window) with scales in groups is not executed yet; "
                f"set kv_cache_dtype to auto, fp8 or int8, or simulate it."
            )
        if not all(map(packing.fits, (mixer.head_dim, mixer.v_head_dim))):
            raise PerfmodelError(
                f"{model.name}: heads of {mixer.head_dim} are not whole groups of {packing.group_size}; set "
                f"engine.kv_cache_group_size to a divisor."
            )


def check_engine(engine: EngineSpec) -> None:
    """Raises PerfmodelError for what the engine plans and the decoder does not run yet."""
    unsupported = {
        "a generation of FlashAttention (engine.flash_attn_version)": engine.flash_attn_version is not None,
        "TF32 (engine.float32_matmul_precision=high)": engine.float32_matmul_precision == "high",
        "sums in FP16 (engine.allow_fp16_accumulation)": engine.allow_fp16_accumulation,
    }
    missing = next((name for name, is_used in unsupported.items() if is_used), None)
    if missing:
        raise PerfmodelError(f"{missing} is not executed yet; it can be simulated.")
    if engine.kv_offload is not None and engine.kv_offload.overlap:
        raise PerfmodelError(
            "copies of KV blocks beside a step (engine.kv_offload.overlap=true) are not executed, only copies before "
            "it; set engine.kv_offload.overlap to false, or simulate it."
        )
    if engine.kv_offload is not None and engine.speculative_config is not None:
        raise PerfmodelError(
            "a second tier of KV blocks (engine.kv_offload) is not executed beside drafts, whose models keep keys and "
            "values of their own; leave out engine.speculative_config, or simulate it."
        )


def _check_standard(model: ModelSpec) -> None:
    """Standard attention computes and throws away what a window or blocks hide; there is no kernel that does."""
    for layer, _ in model.layers:
        mixer = layer.mixer
        if isinstance(mixer, Attention) and (mixer.span is not None or mixer.sparsity is not None):
            raise PerfmodelError(
                f"{model.name}: standard attention is executed over all keys only, and this model limits what a query "
                f"sees; set engine.attention to flash, or leave the window or the blocks out."
            )


def check_blocks(model: ModelSpec, block_size: int) -> None:
    """Raises PerfmodelError where the blocks that a query sees are not whole KV blocks."""
    for layer, _ in model.layers:
        sparsity = layer.mixer.sparsity if isinstance(layer.mixer, Attention) else None
        if sparsity is not None and sparsity.block % block_size:
            raise PerfmodelError(
                f"{model.name}: model_changes.sparse.block={sparsity.block} is not a multiple of engine.block_size="
                f"{block_size}, and what is seen is read by whole KV blocks; change one of them."
            )


def check_capacity(model: ModelSpec, routing: ExpertRouting, is_expert_parallel: bool = False) -> None:
    """Raises PerfmodelError for experts of a fixed capacity that have biases, or that ranks share out whole."""
    if routing.capacity_factor is not None and is_expert_parallel:
        raise PerfmodelError(
            f"{model.name}: experts of a fixed capacity are not executed whole on several ranks; leave out "
            f"routing.capacity_factor or engine.enable_expert_parallel, or simulate it."
        )
    if routing.capacity_factor is not None and any(
        isinstance(layer.ffn, MoEFFN) and layer.ffn.bias for layer, _ in model.layers
    ):
        raise PerfmodelError(
            f"{model.name}: experts with biases are not executed with a fixed capacity; leave out "
            f"routing.capacity_factor, or simulate it."
        )


def check_served(model: ModelSpec, engine: EngineSpec) -> None:
    """Raises PerfmodelError for what the engine does with keys and values of a model that keeps something else."""
    model = served_model(model, engine)
    if engine.kv_cache == "off" and model.keeps_beside_blocks:
        raise PerfmodelError(
            f"{model.name}: steps without a KV cache (engine.kv_cache=off) have no tokens to evict or to round; leave "
            f"out engine.kv_eviction, kv_tiers and kv_cache_residual_tokens."
        )
    if engine.kv_cache == "off" and any(not isinstance(m, Attention | None) for m in _mixers(model)):
        raise PerfmodelError(
            f"{model.name}: steps without a KV cache (engine.kv_cache=off) are executed for softmax attention only, "
            f"and this model has other mixers; set engine.kv_cache to paged."
        )
    if engine.kv_offload is not None and model.has_states:
        raise PerfmodelError(
            f"{model.name}: a second tier holds KV blocks (engine.kv_offload), and this model keeps states or tokens "
            f"beside them, which would be missing when a sequence comes back; leave it out, or simulate it."
        )
    if engine.speculative_config is not None and model.has_states:
        raise PerfmodelError(
            f"{model.name}: drafted tokens that are turned down would have to be taken out of recurrent states again, "
            f"or of keys kept by age or score; execute it without engine.speculative_config."
        )


def _mixers(model: ModelSpec) -> list[Mixer | None]:
    return [layer.mixer for layer, _ in model.layers]


def check_capturable(model: ModelSpec, attention: str, is_expert_parallel: bool = False) -> None:
    """Raises PerfmodelError for decodes that a CUDA graph cannot hold, since their kernels ask the host for lengths."""
    mixers = [layer.mixer for layer, _ in model.layers if isinstance(layer.mixer, Attention)]
    reasons = {
        "standard attention (engine.attention)": attention == "standard",
        "a rolling KV cache (model_changes.window)": any(mixer.is_rolling for mixer in mixers),
        "a KV cache in several precisions": bool(model.quantization.kv_recent),
        "outliers multiplied apart (llm_int8)": model.quantization.outlier_share > 0,
        "early exit (model_changes.early_exit)": model.exits is not None,
        "a rank's share of whole experts (engine.enable_expert_parallel)": is_expert_parallel,
    }
    for reason, is_used in reasons.items():
        if is_used:
            raise PerfmodelError(
                f"{model.name}: {reason} is executed by kernels that CUDA graphs cannot hold; set engine.enforce_eager "
                f"to true, or simulate it."
            )


def _check_softmax(model: ModelSpec, attention: str) -> None:
    """Capped scores and sinks have one kernel, over all keys, a window or a chunk."""
    for layer, _ in model.layers:
        mixer = layer.mixer
        if not isinstance(mixer, Attention) or (mixer.logit_cap is None and not mixer.sinks):
            continue
        if attention == "standard" or mixer.is_rolling or mixer.sparsity is not None:
            raise PerfmodelError(
                f"{model.name}: capped scores or sinks in the softmax are not executed with standard attention, a "
                f"rolling KV cache (model_changes.window) or blocks (model_changes.sparse); leave those out."
            )


def _missing_around(model: ModelSpec) -> str | None:
    unsupported = {
        "a product by single sparse weights (prune with storage: sparse; dense storage runs)": model.weight_sparsity
        is not None
        and not model.weight_sparsity.is_2_4,
        "early exit (model_changes.early_exit) from layers of quantised or 2:4 sparse weights": model.exits is not None
        and (model.quantization.weights is not None or model.weight_sparsity is not None),
    }
    return next((name for name, is_used in unsupported.items() if is_used), None)

"""What the decoder runs, and a sentence for what it does not."""

__all__ = ["check_executable", "torch_dtype"]

import torch

from perfmodel.errors import PerfmodelError
from perfmodel.specs.model.architecture import Attention, DenseFFN, Layer, MoEFFN
from perfmodel.specs.model.spec import ModelSpec
from perfmodel_executors.kernels.swiglu.reference import ACTIVATIONS

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def torch_dtype(model: ModelSpec, engine_dtype: str = "auto") -> torch.dtype:
    """The engine's dtype, or the model's where that is `auto`."""
    name = model.dtype if engine_dtype == "auto" else engine_dtype
    if name not in _DTYPES:
        raise PerfmodelError(
            f"{model.name}: weights in {name} are not executed yet; set engine.dtype to bfloat16 or float32."
        )
    return _DTYPES[name]


def check_executable(model: ModelSpec) -> None:
    """Raises PerfmodelError with one sentence that names what is not executed yet."""
    if model.quantization.method != "none":
        raise PerfmodelError(
            f"{model.name}: {model.quantization.method} weights are not executed yet; use a bf16 card."
        )
    missing = next(filter(None, (_missing(layer) for layer, _ in model.layers)), None) or _missing_around(model)
    if missing:
        raise PerfmodelError(f"{model.name}: {missing} is not executed yet; it can be simulated.")


def _missing_around(model: ModelSpec) -> str | None:
    unsupported = {
        "LayerNorm": model.norm_bias,
        "a second norm after each block": model.post_norms,
        "mixer and feed-forward in parallel": model.parallel_blocks,
        "a learned position table": model.num_learned_positions > 0,
        "a bias in the LM head": model.lm_head_bias,
    }
    return next((name for name, is_used in unsupported.items() if is_used), None)


def _missing(layer: Layer) -> str | None:
    mixer, ffn = layer.mixer, layer.ffn
    if mixer is not None and not isinstance(mixer, Attention):
        return f"the mixer {type(mixer).__name__}"
    if mixer is not None and mixer.sinks:
        return "attention with sinks"
    if mixer is not None and mixer.qk_norm and mixer.qk_norm_width != "head":
        return "a norm of queries and keys over all heads"
    if isinstance(ffn, MoEFFN):
        if ffn.num_groups > 1:
            return f"routing limited to {ffn.top_k_groups} of {ffn.num_groups} expert groups"
        if ffn.latent_size is not None:
            return "a mixture of experts in a latent space"
        if ffn.bias or ffn.router_bias:
            return "a mixture of experts with biases"
    if isinstance(ffn, DenseFFN | MoEFFN) and ffn.activation not in ACTIVATIONS:
        return f"the activation {ffn.activation}"
    return None

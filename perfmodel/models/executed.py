"""Which models the executed clock computes as their makers do, and a sentence's end for those that it only simulates.

Facts of specs alone, so that lists of models can say it without torch. That the families below are computed rightly is
proved against Hugging Face's implementations (`tests/parity/test_against_transformers.py`, docs/parity.md).

The number format that a checkpoint's name ends with: `nvidia/Llama-3.3-70B-Instruct-FP8`, `Qwen3-32B-AWQ`."""

import re
from collections.abc import Mapping

from perfmodel.files.tables import load_table
from perfmodel.models import architecture as arch
from perfmodel.models.spec import ModelSpec

# Model types of config.json files. `unknown` is a file without one, read as a Llama-like decoder.
FAMILIES: tuple[str, ...] = tuple(load_table("model_families")["executed"])
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "sigmoid", "silu", "swiglu_oai")
ROPE_SCALINGS = ("linear", "dynamic", "llama3", "yarn", "longrope")


def why_not_executed(model: ModelSpec) -> str | None:
    """What of `model` is simulated alone, as the subject of "... is not executed yet"; None where all is executed."""
    unsupported = {
        "attention to later tokens": model.is_encoder,
        "scores of a prompt": model.num_labels > 0,
        "pooling of other states than the last": model.pooling not in (None, "last"),
        "LayerNorm": model.norm_bias,
        "mixer and feed-forward in parallel": model.parallel_blocks,
        "a learned position table": model.num_learned_positions > 0,
        "a bias in the LM head": model.lm_head_bias,
        "residuals of several hidden states": model.num_streams > 1 or model.residual_block is not None,
    }
    reason = next((name for name, is_used in unsupported.items() if is_used), None)
    reason = reason or next((f"{field} of {model.model_type} models" for field in model.not_computed), None)
    for layer, _ in model.layers:
        reason = reason or _of_mixer(layer.mixer) or _of_ffn(layer.ffn) or _of_changes(model, layer)
    if reason is None and model.model_type not in FAMILIES:
        return f"the computation of {model.model_type} models"
    return reason


def _of_mixer(mixer: arch.Mixer | None) -> str | None:
    if isinstance(mixer, arch.Attention) and mixer.qk_norm and mixer.qk_norm_width == "none":
        return "a norm of queries and keys without weights"
    if isinstance(mixer, arch.CompressedAttention):
        return "attention to compressed keys"
    if getattr(mixer, "indexer", None) is not None:
        return "the indexer of sparse attention"
    if isinstance(mixer, arch.GatedDeltaNet) and mixer.decay_rank is not None:
        return "Kimi delta attention"
    if isinstance(mixer, arch.LatentAttention) and (mixer.rope is None or mixer.output_gate):
        return "latent attention without rotation or with a gate"
    if isinstance(mixer, arch.Mamba) and (mixer.dt_rank is not None or not mixer.inner_norm):
        return "a scan other than Mamba-2"
    rope = mixer.rope if isinstance(mixer, arch.Attention | arch.LatentAttention | arch.LinearAttention) else None
    scaling = None if rope is None else rope.scaling
    if scaling is None:
        return None
    if scaling.kind not in ROPE_SCALINGS:
        return f"{scaling.kind} scaling of rotary frequencies"
    needs_factor, needs_length = scaling.kind != "dynamic", scaling.kind in ("llama3", "yarn", "longrope")
    if (needs_factor and scaling.factor is None) or (needs_length and scaling.original_positions is None):
        return f"{scaling.kind} scaling of rotary frequencies whose factor the file leaves out"
    return None


def _of_ffn(ffn: arch.FeedForward | None) -> str | None:
    if ffn is not None and ffn.activation not in ACTIVATIONS:
        return f"the activation {ffn.activation}"
    if isinstance(ffn, arch.DenseFFN) and ffn.activation == "swiglu_oai":
        return "a clamped gate outside of experts"
    if isinstance(ffn, arch.MoEFFN) and ffn.latent_size is not None:
        return "a mixture of experts in a latent space"
    return None


def _of_changes(model: ModelSpec, layer: arch.Layer) -> str | None:
    """Early exits and drafts by a model's own layers take plain attention behind norms."""
    is_plain = isinstance(layer.mixer, arch.Attention) and model.pre_norms
    if model.exits is not None and not is_plain:
        return "early exit (model_changes.early_exit) from layers other than attention behind a norm"
    if model.weight_sparsity is not None and isinstance(layer.ffn, arch.MoEFFN):
        return "sparsity of experts (model_changes.prune)"
    return None


_QUANTIZATION_OF: Mapping[str, str | None] = load_table("number_formats")["name_endings"]
# Who scales FP8 weights by blocks of 128 x 128 instead of by tensors or channels.
_FP8_IN_BLOCKS = ("qwen",)
_FORMAT_AT_THE_END = re.compile(
    rf"(?P<name>.+?)-(?:quantized[.])?(?P<format>{'|'.join(_QUANTIZATION_OF)})(?:-v\d+)?", re.IGNORECASE
)


def format_of_name(name: str) -> tuple[str, str | None] | None:
    """The name without the number format at its end, and the `quantization` that this is, None for BF16; None for a
    name that ends with none."""
    match = _FORMAT_AT_THE_END.fullmatch(name)
    if match is None:
        return None
    method = _QUANTIZATION_OF[match["format"].lower()]
    is_by_blocks = method == "fp8" and re.split("/|--", name)[0].lower() in _FP8_IN_BLOCKS
    return match["name"], "fp8_block" if is_by_blocks else method

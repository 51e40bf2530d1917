"""Number formats: how many bytes a weight takes, and what an engine's `quantization` or `dtype` argument means.

Knows formats and methods by name (`workloads/tables/number_formats.yaml`); nothing of kernels or of how a checkpoint
writes its settings (`hf/quantization.py`).
What a cached token takes: number formats by its age, and how many tokens eviction leaves of a sequence."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.files.tables import load_table
from perfmodel.models.architecture import Attention, MoEFFN, QuantizationSpec
from perfmodel.models.spec import ModelSpec
from perfmodel.models.weights.gguf import GGML_BLOCKS, GGUF_MIXES, component_bits

_TABLE = load_table("number_formats")
BITS_PER_WEIGHT: Mapping[str, float] = {
    **_TABLE["bits"],
    # llama.cpp's block formats, scales included
    **{name: 8 * size / elements for name, elements, size in GGML_BLOCKS.values() if elements > 1},
}
_SCALE_BITS: Mapping[str, float] = _TABLE["scale_bits"]
GROUPED_FORMATS = ("int8", "int4", "int3", "int2")  # elements may share scales in groups of any size
_MATMUL_RATE: Mapping[str, str] = _TABLE["matmul_rate"]
_DTYPES: Mapping[str, str] = _TABLE["dtypes"]
_KV_DTYPES: Mapping[str, str] = _TABLE["kv_dtypes"]
METHODS: Mapping[str, QuantizationSpec] = {name: QuantizationSpec(**row) for name, row in _TABLE["methods"].items()}
_UNPACK: Mapping[str, float] = _TABLE["unpack"]
_WITHOUT_INSTRUCTION: Mapping[str, float] = _TABLE["unpack_without_instruction"]


def kv_format(name: str) -> str:
    """The number format that an engine's `kv_cache_dtype` names. Raises SpecError for an unknown one."""
    form = _KV_DTYPES.get(name, name)
    if form not in BITS_PER_WEIGHT:
        near = did_you_mean(name, ["auto", *_KV_DTYPES, *BITS_PER_WEIGHT])
        raise SpecError(f"unknown format {name!r} of the KV cache; expected auto, fp8, int8, int4 or another.{near}")
    return form


def bytes_per_weight(format: str, group_size: int = 0, group_rows: int = 1) -> float:
    """Bytes of one stored weight, its share of the group's scale included.

    bytes = (bits + scale_bits / (group_size * group_rows)) / 8; formats that fix their scales (mxfp4, nvfp4, ...) carry
    them in `bits`. int4 in groups of 128 with a 16-bit scale: (4 + 16/128)/8 = 0.515625. A scale per tensor or channel
    (group_size 0) is not counted."""
    bits = BITS_PER_WEIGHT.get(format)
    if bits is None:
        raise SpecError(
            f"unknown number format {format!r}; known: {', '.join(BITS_PER_WEIGHT)}."
            f"{did_you_mean(format, BITS_PER_WEIGHT)}"
        )
    scale = _SCALE_BITS.get(format, 0.0) / (group_size * group_rows) if group_size else 0.0
    return (bits + scale) / 8


def component_bytes(quantization: QuantizationSpec, component: str) -> float:
    """Bytes of one stored weight of a quantized component: a mean over its tensors where these are in several formats.

    The quantization has a format for weights."""
    assert quantization.weights is not None
    bits = dict(quantization.bits).get(component)
    if bits is not None:
        return bits / 8
    return bytes_per_weight(quantization.weights, quantization.group_size, quantization.group_rows)


def kv_element_bytes(format: str, group_size: int = 0) -> float:
    """Bytes of one cached key or value element, its share of the group's scale and zero point (16 bits each) included.

    (bits + 2 * 16 / group) / 8 for integers in groups; other formats have a scale per tensor or token, not counted.
    Source: KIVI (Liu et al. 2024), asymmetric quantization in groups."""
    plain = bytes_per_weight(format)
    return plain + 2 * 16 / group_size / 8 if group_size and format in GROUPED_FORMATS else plain


def matmul_rate(format: str) -> str:
    """The key of `peak_flops_per_s` at which operands of `format` are multiplied (nvfp4 and mxfp4: fp4)."""
    return _MATMUL_RATE.get(format, format)


def format_of_dtype(dtype: str) -> str:
    """ "bfloat16" or "torch.bfloat16" -> "bf16"; our own names pass through."""
    form = _DTYPES.get(dtype.removeprefix("torch.").lower())
    if form is None:
        raise SpecError(f"dtype: got {dtype!r}; expected bfloat16, float16, float32.{did_you_mean(dtype, _DTYPES)}")
    return form


def with_dtype(model: ModelSpec, dtype: str) -> ModelSpec:
    """The model with `dtype` for everything that is not quantized; "auto" keeps the checkpoint's.

    As in vLLM, a float32 checkpoint under "auto" is the caller's to narrow; here nothing changes."""
    return model if dtype == "auto" else replace(model, dtype=format_of_dtype(dtype))


def with_quantization(model: ModelSpec, method: str | None, group_size: int | None = None) -> ModelSpec:
    """The model as an engine's `quantization` argument has it; None or "auto" keeps the checkpoint's own.

    group_size: integer weights that share a scale, -1 for one per output channel; None: the method's own

    The same format asked of a checkpoint already in it changes nothing; another format stands for the checkpoint
    published in that one. Embedding, LM head, router and norms stay in the model's dtype. In 4-bit float formats the
    attention of a mixture-of-experts model stays too, as in the published NVFP4 and MXFP4 checkpoints of DeepSeek-V3,
    Kimi-K2.5, MiniMax-M2.5, Qwen3.5 and gpt-oss."""
    if method is None or method.lower() == "auto":
        return model
    key, have = method.lower().replace("-", "_"), model.quantization
    if key not in METHODS and key not in GGUF_MIXES:
        known = (*METHODS, *GGUF_MIXES)
        raise SpecError(f"engine.quantization: got {method!r}; expected {', '.join(known)}.{did_you_mean(key, known)}")
    if key in GGUF_MIXES:  # as llama.cpp's quantizer writes the model: embedding and LM head, too
        kept = frozenset({"router", "norms"})
        bits = component_bits(model, key, BITS_PER_WEIGHT)
        wanted = QuantizationSpec("gguf", GGUF_MIXES[key].main, kept=kept, bits=bits, mix=key)
    else:
        wanted = METHODS[key]
    if group_size is not None:
        if wanted.weights not in GROUPED_FORMATS:
            names = ", ".join(name for name, spec in METHODS.items() if spec.weights in GROUPED_FORMATS)
            raise SpecError(
                f"engine.quantization_group_size: got {group_size} with quantization={key}, whose scales are as its "
                f"definition has them; group sizes go with {names}."
            )
        wanted = replace(wanted, group_size=max(group_size, 0))
    is_same = all(getattr(have, name) == getattr(wanted, name) for name in ("weights", "activations", "outlier_share"))
    is_same = is_same and (group_size is None or have.group_size == wanted.group_size)
    is_same = is_same and have.inputs_come_quantized >= wanted.inputs_come_quantized
    if key in METHODS and wanted.weights is not None and is_same:
        return model
    if wanted.weights in ("mxfp4", "nvfp4") and any(isinstance(layer.ffn, MoEFFN) for layer, _ in model.layers):
        wanted = replace(wanted, kept=wanted.kept | {"attention", "linear_attention"})
    quantization = replace(wanted, kv_cache=have.kv_cache, kv_group_size=have.kv_group_size, kv_recent=have.kv_recent)
    return replace(model, quantization=quantization)


class Surplus(NamedTuple):
    """The newest `tokens` of a sequence take so many bytes and operations more per element than older ones."""

    tokens: int
    num_bytes: float
    operations: float


def unpack_operations(model: ModelSpec) -> float:
    """Vector operations per element of the oldest cached tokens to make a number of it."""
    return _operations(model, model.quantization.kv_cache or "")


def _operations(model: ModelSpec, form: str) -> float:
    return _UNPACK.get(form, _WITHOUT_INSTRUCTION.get(form, 0.0) if model.converts_fp8 else 0.0)


def kv_surplus(model: ModelSpec) -> tuple[Surplus, ...]:
    """What the newest tokens take beyond the next older ones, tier by tier, so that n tokens take per element

    n e + sum over tiers of min(n, tokens) num_bytes     with e of the oldest"""
    recent, group = model.quantization.kv_recent, model.quantization.kv_group_size
    forms = [form for _, form in recent] + [model.quantization.kv_cache or model.dtype]
    tiers, total = [], 0
    for (tokens, newer), older in zip(recent, forms[1:], strict=True):
        total += tokens
        num_bytes = kv_element_bytes(newer, group) - kv_element_bytes(older, group)
        if num_bytes < 0:
            raise SpecError(
                f"engine.kv_tiers: got {older} behind {newer}, which takes less room; older tokens cannot be more "
                f"precise than they were, order the tiers from wide to narrow."
            )
        tiers.append(Surplus(total, num_bytes, _operations(model, newer) - _operations(model, older)))
    return tuple(tiers)


def surplus_tokens(model: ModelSpec) -> float:
    """The room that the newest tokens of a long sequence take beyond older ones, in tokens of the oldest format."""
    quantization = model.quantization
    oldest = kv_element_bytes(quantization.kv_cache or model.dtype, quantization.kv_group_size)
    return sum(tier.tokens * tier.num_bytes for tier in kv_surplus(model)) / oldest


def with_eviction(model: ModelSpec, num_tokens: int, num_recent: int = 0) -> ModelSpec:
    """The model with `num_tokens` kept of each sequence in every layer of plain attention that keeps all of them, the
    `num_recent` newest among them.

    Raises SpecError where there is no such layer."""
    layers, has_evicting = [], False
    for layer, count in model.layers:
        mixer = layer.mixer
        if isinstance(mixer, Attention) and mixer.span is None and mixer.sparsity is None:
            mixer = replace(mixer, evicts_to=num_tokens, num_recent_tokens=num_recent, is_rolling=True)
        has_evicting |= isinstance(mixer, Attention) and mixer.evicts_to is not None  # also of a model asked twice
        layers.append((replace(layer, mixer=mixer), count))
    if not has_evicting:
        raise SpecError(
            f"engine.kv_eviction: {model.name} has no layer of plain attention that keeps all keys (latents are scored "
            f"through what they are expanded to, windows evict by age); leave kv_eviction out."
        )
    return replace(model, layers=tuple(layers))

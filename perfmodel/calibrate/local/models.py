"""The model of a recorded figure: its card where there is one, else a shape made of its parameters; as its file has it.

A model without a card is a decoder of the usual proportions: width 110 times the layers, heads of 128, a tied table of
words below 4e9 parameters, and as many parameters in all, and active ones, as the row says. Number formats are those of
the file's type, scaled to the bytes that the file has: types mix formats, and vendors mix them differently.
"""

__all__ = ["LocalModel", "local_model"]

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from perfmodel.errors import SpecError
from perfmodel.models.architecture import Attention, DenseFFN, Layer, MoEFFN, QuantizationSpec
from perfmodel.models.cards import load_model
from perfmodel.models.number_formats import BITS_PER_WEIGHT, with_dtype, with_quantization
from perfmodel.models.params import count_parameters, weight_bytes
from perfmodel.models.spec import COMPONENTS, ModelSpec
from perfmodel.models.weights.gguf import GGUF_MIXES

_WIDTH_PER_LAYER = 110.0  # of Llama 3 (128, 102), Qwen2.5 (107, 80) and Qwen3 (114, 80): the mean of all
_HEAD = 128
_WORDS = 128_256
_FEWEST_PARAMS = 3e7  # below it a table of words would be all
_TIED_BELOW = 4e9
_LAYER_SHARE = 12.6  # parameters of a layer over the square of its width, gated blocks with grouped heads
_EXPERTS_PER_TOKEN = 8
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*[bB](?![a-z])")
_KEPT = frozenset({"router", "norms"})
_STORED = tuple(name for name in COMPONENTS if name not in _KEPT)
_FLOATS = ("f16", "bf16", "fp16", "all f32", "f32", "fp32")
_OWN_BITS = re.compile(r"mlx-q(\d)")
_OWN_SCALE_BITS = 0.5  # MLX: a scale and a bias of 16 bits for 64 weights
# By bits of a weight, where a type's name says nothing.
_BY_BITS = ("iq1_m", "iq2_xxs", "q2_k", "iq3_xxs", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")


@dataclass(frozen=True)
class LocalModel:
    """is_known: its shape is from a card"""

    spec: ModelSpec
    is_known: bool


@lru_cache(maxsize=4096)
def local_model(name: str, params: float, active_params: float, file_type: str, file_size_bytes: float) -> LocalModel:
    """The model called `name` as a file of `file_type` has it.

    params, active_params: in all, and those that a token uses; 0 where they are not known or the same
    file_type, file_size_bytes: GGUF's or MLX's name of the formats; of the tensors, 0 if unknown

    Raises SpecError for a model without a card, parameters and a size in its name.
    """
    try:
        spec, is_known = load_model(name), True
    except SpecError:
        found = params or _named_size(name) or _stored_params(file_type, file_size_bytes)
        spec, is_known = _of_parameters(name, found, active_params), False
    plain = with_dtype(replace(spec, quantization=QuantizationSpec()), "float16")
    stored = _as_stored(plain, spec, file_type, file_size_bytes)
    return LocalModel(stored, is_known)


def _named_size(name: str) -> float:
    """Parameters as a name has them, "Mistral Small 24B"; 0 where it has none."""
    found = _SIZE.search(name)
    return 1e9 * float(found[1]) if found is not None else 0.0


def _stored_params(file_type: str, file_size_bytes: float) -> float:
    """As many as a file of this size holds in this type; 0 where one of them is not known."""
    key = _key(file_type)
    named = [name for name in BITS_PER_WEIGHT if key.startswith(name)]
    return 8 * file_size_bytes / BITS_PER_WEIGHT[max(named, key=len)] if named else 0.0


def _key(file_type: str) -> str:
    """A type as llama.cpp calls it: publishers' prefixes, and mixes larger than M, left out."""
    return file_type.lower().replace("ud-", "").replace("_xl", "_m")


def _of_parameters(name: str, params: float, active_params: float) -> ModelSpec:
    """A decoder of the usual proportions with so many parameters."""
    if not params:
        raise SpecError(f"{name}: no card, no parameters, no size in its name and none of its file.")
    if params < _FEWEST_PARAMS:
        raise SpecError(f"{name}: {params:,.0f} parameters are no language model.")
    active = active_params if 0 < active_params < 0.9 * params else params
    tables = 1 if params < _TIED_BELOW else 2
    words = _WORDS
    while words * tables * _width(active) > 0.4 * active:
        words //= 2
    body = active - words * tables * _width(active)
    hidden = _width(body)
    layers = max(1, round(body / (_LAYER_SHARE * hidden**2))) if active == params else _sparse_layers(hidden)
    heads = max(1, hidden // _HEAD)
    mixer = Attention(heads, max(1, heads // 4), _HEAD, _HEAD)
    attention = hidden * _HEAD * (2 * heads + 2 * mixer.num_kv_heads)
    left = body / layers - attention
    if active == params:
        layer = Layer(mixer, DenseFFN(max(_HEAD, round(left / (3 * hidden)))))
    else:
        layer = Layer(mixer, _experts(hidden, (params - active) / layers, max(left, 0.2 * body / layers)))
    return ModelSpec(name, "llama", hidden, words, 1 << 17, ((layer, layers),), tie_word_embeddings=tables == 1)


def _width(params: float) -> int:
    """The hidden size of a dense decoder with so many parameters in its layers."""
    width: float = (params * _WIDTH_PER_LAYER / _LAYER_SHARE) ** (1 / 3)
    return _HEAD * max(2, round(width / _HEAD))


def _sparse_layers(hidden: int) -> int:
    """Mixtures of experts have the layers of a dense model twice as wide (Qwen3: 48 at 2,048, 94 at 4,096)."""
    return max(8, round(2 * hidden / _WIDTH_PER_LAYER))


def _experts(hidden: int, unused: float, used: float) -> MoEFFN:
    """Experts of which a token uses `used` parameters in a layer, and not `unused`."""
    num_experts = max(_EXPERTS_PER_TOKEN + 1, round(_EXPERTS_PER_TOKEN * (1 + unused / used)))
    inner = max(64, round((used + unused) / (3 * hidden * num_experts)))
    return MoEFFN(num_experts, _EXPERTS_PER_TOKEN, inner)


def _as_stored(plain: ModelSpec, card: ModelSpec, file_type: str, file_size_bytes: float) -> ModelSpec:
    key = _key(file_type)
    own = _OWN_BITS.fullmatch(key)
    experts_stay = key in _FLOATS and card.quantization.weights == "mxfp4"
    if key == "mxfp4" or experts_stay:
        bits = {name: BITS_PER_WEIGHT["mxfp4" if "experts" in name else "q8_0"] for name in _STORED}
        stored = _of_bits(plain, "mxfp4", bits)
    elif key in _FLOATS:
        return plain
    elif own is not None:
        stored = _of_bits(
            plain, "int4" if int(own[1]) < 6 else "int8", dict.fromkeys(_STORED, int(own[1]) + _OWN_SCALE_BITS)
        )
    elif key in GGUF_MIXES:
        stored = with_quantization(plain, key)
    else:
        stored = _nearest(plain, key, file_size_bytes)
    return _scaled(stored, file_size_bytes)


def _of_bits(plain: ModelSpec, form: str, bits: dict[str, float]) -> ModelSpec:
    formats = QuantizationSpec("gguf", form, kept=_KEPT, bits=tuple(sorted(bits.items())))
    return replace(plain, quantization=formats)


def _nearest(plain: ModelSpec, key: str, file_size_bytes: float) -> ModelSpec:
    """A type that no mix is called: the mix or format whose name it begins with, else by the bits of a weight."""
    named = [name for name in (*GGUF_MIXES, *BITS_PER_WEIGHT) if key.startswith(name)]
    if not named and file_size_bytes:
        found = 8 * file_size_bytes / count_parameters(plain).total
        named = [min(_BY_BITS, key=lambda name: abs(BITS_PER_WEIGHT[name] - found))]
    if not named:
        named = [name for name in GGUF_MIXES if name.startswith(key[:3])] or ["q4_k_m"]
    name = max(named, key=len)
    if name in GGUF_MIXES:
        return with_quantization(plain, name)
    return _of_bits(plain, name, dict.fromkeys(_STORED, BITS_PER_WEIGHT[name]))


def _scaled(stored: ModelSpec, file_size_bytes: float) -> ModelSpec:
    """The model whose formats take the bytes that the file has."""
    if not file_size_bytes:
        return stored
    ratio = file_size_bytes / sum(weight_bytes(stored).values())
    bits = tuple((name, value * ratio) for name, value in stored.quantization.bits)
    return replace(stored, quantization=replace(stored.quantization, bits=bits))

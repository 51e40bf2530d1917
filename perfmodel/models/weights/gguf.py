"""The header of a .gguf file as config.json fields: metadata keys, and what the tensor list says beside them.

Reads versions 2 and 3, little-endian; standard library only. Knows the container and llama.cpp's key names.
llama.cpp's file types: a name such as Q4_K_M stands for a mix: most tensors of a dense decoder in one block format,
the values' projection, the FFN's way down and the LM head in wider ones, some of them in some layers only. Experts, and
mixers other than attention, are in the main format. Source: `llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp,
for Llama-like models without an importance matrix."""

import re
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from perfmodel.errors import SpecError
from perfmodel.files.sandbox import refuse_path
from perfmodel.files.tables import load_table
from perfmodel.models.architecture import Attention, DenseFFN, Layer
from perfmodel.models.spec import ModelSpec

_TABLE = load_table("gguf")
# ggml tensor type -> (name, elements per block, bytes per block)
GGML_BLOCKS: Mapping[int, tuple[str, int, int]] = {int(kind): tuple(row) for kind, row in _TABLE["blocks"].items()}
_UNKNOWN = ("unknown", 1, 2)
_PLAIN: Mapping[str, str] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}

_COMPONENTS = {name: re.compile(pattern) for name, pattern in _TABLE["components"].items()}

# Metadata value type -> struct format; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LARGEST = 1 << 28  # no header has a longer string or list: a larger length means a damaged file

_Tensors = Mapping[str, tuple[tuple[int, ...], int]]


@dataclass
class GgufHeader:
    """Metadata (long lists by their length only) and the tensors' shapes, innermost dimension first, and types."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)


def read_gguf(path: Path) -> GgufHeader:
    """Raises SpecError for a file that is no GGUF, is cut off or has lengths that cannot be."""
    refuse_path(path)
    try:
        with path.open("rb") as stream:
            return _read(stream, path)
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError):
        raise SpecError(f"{path}: the GGUF header is cut off or damaged.") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}).") from None


def _read(stream: BinaryIO, path: Path) -> GgufHeader:
    if stream.read(4) != b"GGUF":
        raise SpecError(f"{path}: is not a GGUF file (it does not start with 'GGUF').")
    (version,) = _unpack(stream, "I")
    if version not in (2, 3):
        raise SpecError(f"{path}: GGUF version: got {version}; expected 2 or 3.")
    num_tensors, num_keys = _unpack(stream, "QQ")
    header = GgufHeader()
    for _ in range(_length(num_keys)):
        key = _string(stream)
        header.metadata[key] = _value(stream, *_unpack(stream, "I"))
    for _ in range(_length(num_tensors)):
        name = _string(stream)
        (num_dims,) = _unpack(stream, "I")
        shape = _unpack(stream, f"{min(num_dims, 8)}Q") or (1,)  # a single number
        if 0 in shape:
            raise SpecError(f"{path}: tensor {name[:80]!r}: got the shape {shape}; expected at least one element.")
        kind, _offset = _unpack(stream, "IQ")
        header.tensors[name] = (shape, kind)
    return header


def _unpack(stream: BinaryIO, code: str) -> tuple[Any, ...]:
    return struct.unpack("<" + code, stream.read(struct.calcsize("<" + code)))


def _length(count: int) -> int:
    if count > _LARGEST:
        raise struct.error("impossible length")
    return count


def _string(stream: BinaryIO) -> str:
    (size,) = _unpack(stream, "Q")
    text = stream.read(_length(size))
    if len(text) < size:
        raise struct.error("cut off")
    return text.decode("utf-8")


def _value(stream: BinaryIO, kind: int) -> Any:
    """A metadata value; a list of more than 1024 numbers, or of strings, is read as its length.

    A list of lists is an error, as in llama.cpp (ggml/src/gguf.cpp, "invalid GGUF type")."""
    if kind == 8:
        return _string(stream)
    is_list, count = kind == 9, 1
    if is_list:
        kind, count = _unpack(stream, "IQ")
    if kind == 8:
        for _ in range(_length(count)):
            (size,) = _unpack(stream, "Q")
            stream.seek(_length(size), 1)
        return count
    if kind not in _SCALARS:
        if is_list and count == 0:
            return []
        raise struct.error(f"metadata type {kind}")
    code = _SCALARS[kind]
    if is_list and count > 1024:
        stream.seek(struct.calcsize("<" + code) * _length(count), 1)
        return count
    values = list(_unpack(stream, f"{count}{code}"))
    return values if is_list else values[0]


def config_from_gguf(header: GgufHeader, path: Path) -> dict[str, Any]:
    """config.json fields from the metadata, and biases, norms and tied embeddings from the tensors' names."""
    meta, tensors = header.metadata, header.tensors
    arch = meta.get("general.architecture")
    if not isinstance(arch, str):
        raise SpecError(f"{path}: general.architecture is missing from the GGUF metadata.")
    config: dict[str, Any] = {"model_type": _TABLE["model_types"].get(arch, arch)}
    for name, key in _TABLE["keys"].items():
        value = meta.get(f"{arch}.{key}")
        if not value:  # 0 stands for "has none" (the heads of a Mamba, the experts of a dense model)
            continue
        if isinstance(value, list):  # one entry per layer
            if len(set(value)) != 1:
                raise SpecError(
                    f"{path}: {arch}.{key} differs between layers; such models load from their config.json."
                )
            value = value[0]
        config[name] = value
    if arch == "deepseek2" and not any("exp_probs_b" in name for name in tensors):
        config["model_type"] = "deepseek_v2"  # V3 chooses experts with a bias
    config.setdefault("vocab_size", meta.get("tokenizer.ggml.tokens"))
    if "kv_lora_rank" in config:  # MLA; older files have its head sizes without the suffix
        rope = meta.get(f"{arch}.rope.dimension_count", 64)
        key_length = meta.get(f"{arch}.attention.key_length_mla") or config.get("head_dim")
        config["qk_rope_head_dim"] = rope
        config["qk_nope_head_dim"] = key_length - rope if key_length else None
        config["v_head_dim"] = meta.get(f"{arch}.attention.value_length_mla") or config.get("v_head_dim")
    scaling = "llama3" if "rope_freqs.weight" in tensors else meta.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        config["rope_parameters"] = {"rope_type": scaling}
    if "token_embd.weight" in tensors:
        config["vocab_size"] = tensors["token_embd.weight"][0][-1]
        config["tie_word_embeddings"] = "output.weight" not in tensors
    for field_name, ending in (("use_qk_norm", "attn_q_norm.weight"), ("attention_bias", "attn_output.bias")):
        if any(name.endswith(ending) for name in tensors):
            config[field_name] = True
    return config | _number_format(tensors)


def _number_format(tensors: _Tensors) -> dict[str, Any]:
    """`dtype`, or `quantization_config`, by the format of most elements."""
    elements: Counter[str] = Counter()
    for name, (shape, kind) in tensors.items():
        if name.startswith("blk.") and len(shape) > 1:
            elements[GGML_BLOCKS.get(kind, _UNKNOWN)[0]] += prod(shape)
    if not elements:
        return {}
    main = elements.most_common(1)[0][0]
    if main in _PLAIN:
        return {"dtype": _PLAIN[main]}
    return {"quantization_config": {"quant_method": "gguf", "format": main, "bits": _stored_bits(tensors)}}


def _stored_bits(tensors: _Tensors) -> dict[str, float]:
    """Mean bits of a stored weight of each component that has some in blocks; of those it is all that is stored."""
    elements, bits, in_blocks = defaultdict[str, float](float), defaultdict[str, float](float), set[str]()
    for name, (shape, kind) in tensors.items():
        component = next((component for component, pattern in _COMPONENTS.items() if pattern.match(name)), None)
        if component is None:
            continue
        form, per_block, size = GGML_BLOCKS.get(kind, _UNKNOWN)
        elements[component] += prod(shape)
        bits[component] += 8 * prod(shape) * size / per_block
        if form not in _PLAIN:
            in_blocks.add(component)
    means = {name: bits[name] / elements[name] for name in elements if name in in_blocks}
    if "output.weight" not in tensors and "embedding" in means:  # one table of words for both
        means["lm_head"] = means["embedding"]
    return means


def _more_bits(i: int, n: int) -> bool:
    """llama.cpp's `use_more_bits`: the first and last eighth, and every third layer between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


# Where a wider format is taken: layer i of n.
_WHERE: Mapping[str, Callable[[int, int], bool]] = {
    "all": lambda i, n: True,
    "more_bits": _more_bits,
    "first 2": lambda i, n: i < 2,
    "first 4": lambda i, n: i < 4,
    "first eighth": lambda i, n: i < n // 8,
    "first sixteenth": lambda i, n: i < n // 16,
}


@dataclass(frozen=True)
class GgufMix:
    """main: the format of all tensors but those named; `tensors`: name -> (format, where), the first that applies."""

    main: str
    tensors: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    head: str = "q6_k"
    embedding: str | None = None


GGUF_MIXES = {name: GgufMix(**{"main": name, **row}) for name, row in _TABLE["mixes"].items()}


def tensor_formats(model: ModelSpec, name: str) -> list[dict[str, str]]:
    """The formats that each layer's tensors `qk`, `v`, `out`, `up` and `down` have in the mix `name`."""
    mix, layers = GGUF_MIXES[name], list(model.iter_layers())
    return [
        {
            tensor.removesuffix("_shared"): _format_of(mix, tensor, i, len(layers))
            for _, tensor, _ in _tensors(layer, model.hidden_size)
        }
        for i, layer in enumerate(layers)
    ]


def table_formats(model: ModelSpec, name: str) -> dict[str, str]:
    """The formats of `embedding` and `lm_head`; a table of words that is both is stored as the LM head."""
    mix = GGUF_MIXES[name]
    return {"lm_head": mix.head, "embedding": mix.head if model.tie_word_embeddings else mix.embedding or mix.main}


def component_bits(model: ModelSpec, name: str, bits: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """(component, mean bits of a stored weight) of `model` in the mix `name`; `bits`: of a weight in each format.

    Mixers and blocks of other kinds are in the main format."""
    mix, layers = GGUF_MIXES[name], list(model.iter_layers())
    sizes, stored_bits = defaultdict[str, float](float), defaultdict[str, float](float)
    for i, layer in enumerate(layers):
        for component, tensor, size in _tensors(layer, model.hidden_size):
            sizes[component] += size
            stored_bits[component] += size * bits[_format_of(mix, tensor, i, len(layers))]
    means = {component: stored_bits[component] / size for component, size in sizes.items()}
    means |= {component: bits[form] for component, form in table_formats(model, name).items()}
    return tuple(sorted(means.items()))


def _format_of(mix: GgufMix, tensor: str, layer: int, num_layers: int) -> str:
    rules = mix.tensors.get(tensor, mix.tensors.get(tensor.removesuffix("_shared"), ()))
    return next((wide for wide, where in rules if _WHERE[where](layer, num_layers)), mix.main)


def _tensors(layer: Layer, hidden: int) -> list[tuple[str, str, int]]:
    """(component, tensor, weights) of what a mix distinguishes; `v_shared`: four query heads or more to a KV head."""
    tensors: list[tuple[str, str, int]] = []
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, Attention):
        keys = (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim
        values = "v_shared" if mixer.num_heads >= 4 * mixer.num_kv_heads else "v"
        tensors = [
            ("attention", "qk", keys * hidden),
            ("attention", values, mixer.num_kv_heads * mixer.v_head_dim * hidden),
            ("attention", "out", mixer.num_heads * mixer.v_head_dim * hidden),
        ]
    if isinstance(ffn, DenseFFN):
        size = ffn.intermediate_size * hidden
        tensors += [("dense_ffn", "up", (2 if ffn.gated else 1) * size), ("dense_ffn", "down", size)]
    return tensors

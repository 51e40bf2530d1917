"""A ModelSpec from the header of a weights file: .gguf, or .safetensors beside its config.json or by names and shapes.

Only headers are read, never weights; standard library only."""

import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.catalog import expanded
from perfmodel.files.sandbox import parse_json, read_json, refuse_path
from perfmodel.models.hf.config import HF_QUANT_CONFIG, load_config, model_from_config
from perfmodel.models.spec import ModelSpec
from perfmodel.models.weights.gguf import config_from_gguf, read_gguf

_LONGEST_HEADER = 100_000_000  # the safetensors library refuses longer ones too
_ASSUMED_POSITIONS = 131072
_LARGEST_EXTENT = 1 << 40  # of a tensor: no parameter count is larger
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MATRIX = 2


def load_header(path: str | Path) -> ModelSpec:
    """The model in a .gguf file, a .safetensors file or a `model.safetensors.index.json`.

    Beside a config.json the safetensors files add the name, and how weights are stored where that does not say it.
    Raises SpecError for damaged files, and for architectures that names and shapes leave open."""
    path = expanded(path)
    refuse_path(path)
    if path.suffix == ".gguf":
        header = read_gguf(path)
        name = str(header.metadata.get("general.name") or path.stem).lower().replace(" ", "-")
        config, origin = config_from_gguf(header, path), f"GGUF header {path.name}"
        return model_from_config(config, name, source=str(path), origin=origin, weights_path=str(path))
    stem = path.name.removesuffix(".index.json").removesuffix(".safetensors")
    name = (path.parent.name if stem.startswith("model") and path.parent.name else stem).lower()
    config_file = path.with_name("config.json")
    if config_file.is_file():
        is_open = path.suffix == ".safetensors" and not states_format(config_file)
        stored = stored_settings(read_safetensors(path), name) if is_open else {}
        return replace(load_config(config_file, name, stored), weights_path=str(path))
    tensors = {tensor: entry for file in weight_files(path) for tensor, entry in read_safetensors(file).items()}
    origin = f"tensor shapes in {path.name}; context limit of {_ASSUMED_POSITIONS} assumed"
    config = _config_from_shapes(tensors, path)
    return model_from_config(config, name, source=str(path), origin=origin, weights_path=str(path))


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that `path` stands for: for an index, and for one file of several, all there are."""
    if path.name.endswith(".index.json"):
        try:
            names = sorted(set(read_json(path)["weight_map"].values()), key=str)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise SpecError(f"{path}: is not a safetensors index (a JSON object with weight_map).") from None
        for name in names:
            if not isinstance(name, str) or name in ("", "..") or name != Path(name).name:
                raise SpecError(f"{path}: weight_map: got {str(name)[:80]!r}; expected the name of a file beside it.")
        return [path.with_name(name) for name in names]
    shards = re.sub(r"-\d+-of-(\d+)\.safetensors$", r"-*-of-\1.safetensors", path.name)
    return sorted(path.parent.glob(shards)) or [path]


def stored_beside(config: Path) -> dict[str, Any]:
    """Fields that the header of a .safetensors file in the same folder says, where no file says the format; {} where
    there is none that can be read.

    Raises SpecError for weights in a format that names and types leave open."""
    files = sorted(config.parent.glob("*.safetensors")) if config.name == "config.json" else []
    if not files or states_format(config):
        return {}
    try:
        tensors = read_safetensors(files[0])
    except SpecError:  # a pointer, or a download that was cut off: no word on the format
        return {}
    return stored_settings(tensors, config.parent.name)


def given_fields(config: Path) -> set[str]:
    """The fields of the file that are not null, those of its text model too; none of one that cannot be read."""
    try:
        fields = read_json(config)
    except (OSError, ValueError):
        return set()
    blocks = [fields, fields.get("text_config")] if isinstance(fields, dict) else []
    return {key for block in blocks if isinstance(block, dict) for key, value in block.items() if value is not None}


def states_format(config: Path) -> bool:
    """Whether the file, or ModelOpt's beside it, says how weights are quantized."""
    return "quantization_config" in given_fields(config) or config.with_name(HF_QUANT_CONFIG).is_file()


def stored_settings(tensors: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`dtype`, and `quantization_config` where most elements of the matrices are in fewer than 16 bits.

    tensors: of a safetensors header: name -> {"dtype": "BF16", "shape": [...]}
    name:    of the checkpoint, for errors

    Raises SpecError for a format that names and types leave open."""
    sizes: Counter[str] = Counter()
    for entry in tensors.values():
        shape = entry.get("shape") if isinstance(entry, Mapping) else None
        if isinstance(shape, list) and len(shape) >= _MATRIX and all(isinstance(size, int) for size in shape):
            sizes[str(entry.get("dtype"))] += prod(shape)
    if not sizes:
        return {}
    most = sizes.most_common(1)[0][0]
    plain = next((_DTYPES[form] for form, _ in sizes.most_common() if form in _DTYPES), "bfloat16")
    stored: dict[str, Any] = {"dtype": plain}
    return stored if most in _DTYPES else stored | {"quantization_config": _format(most, tensors, name)}


def _format(most: str, tensors: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings by the names of the scales: `weight_scale_inv` of 128 x 128 blocks (DeepSeek), `weight_scale_2` of
    NVFP4 (ModelOpt), `_blocks` and `_scales` of MXFP4 (gpt-oss)."""
    endings = {tensor.rpartition(".")[2] for tensor in tensors}
    if most.startswith("F8_E"):
        block = {"weight_block_size": [128, 128]} if "weight_scale_inv" in endings else {}
        return {"quant_method": "fp8", **block}
    if most == "U8" and any(ending.endswith("_blocks") for ending in endings):
        return {"quant_method": "mxfp4"}
    if most == "U8" and "weight_scale_2" in endings:
        return {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    raise SpecError(
        f"{name}: most of its weights are stored as {most}, and no config.json says how they are quantized; name the "
        f"format with engine.quantization, and the checkpoint that it was made from as the model."
    )


def read_safetensors(path: Path) -> dict[str, Any]:
    """The tensors in the JSON header of one file: 8 bytes of length, little-endian, then the object.

    Raises SpecError for a damaged file."""
    refuse_path(path)
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LONGEST_HEADER:
                raise SpecError(f"{path}: is not a safetensors file (its header would be {length} bytes long).")
            header = parse_json(stream.read(length))
    except (struct.error, ValueError):
        raise SpecError(f"{path}: the safetensors header is cut off or damaged.") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}).") from None
    if not isinstance(header, dict):
        raise SpecError(f"{path}: the safetensors header is cut off or damaged.")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _config_from_shapes(tensors: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """config.json fields of a Llama-like dense decoder. The head size is the q-norm's width, else assumed 128 or 64."""
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    others: dict[str, tuple[int, ...]] = {}
    for name, entry in tensors.items():
        shape = entry.get("shape") if isinstance(entry, dict) and isinstance(entry.get("dtype"), str) else None
        if not isinstance(shape, list) or not shape or not all(map(_is_extent, shape)):
            raise SpecError(f"{path}: tensor {name[:80]}: has no dtype and shape of positive whole numbers.")
        if match := _LAYER.search(name):
            layers.setdefault(int(match[1]), {})[match[2]] = tuple(shape)
        else:
            others[name.rsplit("embed_tokens", 1)[-1] if "embed_tokens" in name else name] = tuple(shape)
    first = {name: shape for name, shape in layers.get(0, {}).items() if len(shape) == 2 or "proj.weight" not in name}
    embedding = others.get(".weight", ())
    needed = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.gate_proj.weight")
    missing = [f"layers.0.{name}" for name in needed if name not in first]
    if len(embedding) != 2:
        missing.insert(0, "embed_tokens.weight")
    if missing:
        raise SpecError(
            f"{path}: no tensor {missing[0]} of two dimensions; put the model's config.json beside it to say what it "
            f"is."
        )
    q, k = first["self_attn.q_proj.weight"][0], first["self_attn.k_proj.weight"][0]
    head_dim = first.get("self_attn.q_norm.weight", (0,))[0] or (128 if q % 128 == 0 and k % 128 == 0 else 64)
    dtype = tensors[next(name for name in tensors if name.endswith("layers.0.self_attn.q_proj.weight"))]["dtype"]
    has_out_bias = "self_attn.o_proj.bias" in first
    config: dict[str, Any] = {
        "model_type": "qwen2" if "self_attn.q_proj.bias" in first and not has_out_bias else "llama",
        "vocab_size": embedding[0],
        "hidden_size": embedding[1],
        "num_hidden_layers": max(layers) + 1,
        "num_attention_heads": q // head_dim,
        "num_key_value_heads": k // head_dim,
        "head_dim": head_dim,
        "intermediate_size": first["mlp.gate_proj.weight"][0],
        "max_position_embeddings": _ASSUMED_POSITIONS,
        "use_qk_norm": "self_attn.q_norm.weight" in first,
        "attention_bias": has_out_bias,
        "mlp_bias": "mlp.down_proj.bias" in first,
        "tie_word_embeddings": "lm_head.weight" not in others,
    }
    if dtype == "F8_E4M3":
        return config | {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    if dtype not in _DTYPES:
        raise SpecError(f"{path}: tensors of type {dtype} need the config.json that says how they are quantized.")
    return config | {"dtype": _DTYPES[dtype]}


def _is_extent(value: Any) -> bool:
    return type(value) is int and 0 < value <= _LARGEST_EXTENT

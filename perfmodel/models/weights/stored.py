"""What the tensors of a checkpoint are stored as, in the fields of a config.json that leaves it open."""

from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.sandbox import read_json

HF_QUANT_CONFIG = "hf_quant_config.json"  # ModelOpt's, beside a config.json

_PLAIN = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MATRIX = 2


def said_fields(config: Path) -> set[str]:
    """The fields of the file that are not null, those of its text model too; none of one that cannot be read."""
    try:
        fields = read_json(config)
    except (OSError, ValueError):
        return set()
    blocks = [fields, fields.get("text_config")] if isinstance(fields, dict) else []
    return {key for block in blocks if isinstance(block, dict) for key, value in block.items() if value is not None}


def is_format_said(config: Path) -> bool:
    """Whether the file, or ModelOpt's beside it, says how weights are quantized."""
    return "quantization_config" in said_fields(config) or config.with_name(HF_QUANT_CONFIG).is_file()


def stored_settings(tensors: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`dtype`, and `quantization_config` where most elements of the matrices are in fewer than 16 bits.

    tensors: of a safetensors header: name -> {"dtype": "BF16", "shape": [...]}
    name:    of the checkpoint, for errors

    Raises SpecError for a format that names and types leave open.
    """
    sizes: Counter[str] = Counter()
    for entry in tensors.values():
        shape = entry.get("shape") if isinstance(entry, Mapping) else None
        if isinstance(shape, list) and len(shape) >= _MATRIX and all(isinstance(size, int) for size in shape):
            sizes[str(entry.get("dtype"))] += prod(shape)
    if not sizes:
        return {}
    most = sizes.most_common(1)[0][0]
    plain = next((_PLAIN[form] for form, _ in sizes.most_common() if form in _PLAIN), "bfloat16")
    return {"dtype": plain} if most in _PLAIN else {"dtype": plain, "quantization_config": _format(most, tensors, name)}


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

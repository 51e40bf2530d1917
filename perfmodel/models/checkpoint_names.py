"""The number format that a checkpoint's name ends with: `nvidia/Llama-3.3-70B-Instruct-FP8`, `Qwen3-32B-AWQ`."""

import re

# What a checkpoint's name ends with, and which quantization that is: weights as the tools of that name write them.
_QUANTIZATION_OF: dict[str, str | None] = {
    "fp8": "fp8",
    "fp8-dynamic": "fp8",
    "fp8-block": "fp8_block",
    "nvfp4": "nvfp4",
    "fp4": "nvfp4",
    "fp8-kv": "fp8",
    "mxfp4": "mxfp4",
    "awq": "awq",
    "awq-int4": "awq",
    "awq-4bit": "awq",
    "gptq": "gptq",
    "gptq-int4": "gptq",
    "gptq-4bit": "gptq",
    "gptq-int8": "w8a16",
    "int4": "w4a16",
    "w4a16": "w4a16",
    "w4a16-g128": "w4a16",
    "int8": "w8a8",
    "w8a8": "w8a8",
    "w8a16": "w8a16",
    "bnb-4bit": "bitsandbytes",
    "bf16": None,
}
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

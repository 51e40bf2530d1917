"""Pages of the KV cache, plain or quantised: the type that the attention operators share."""

from perfmodel_executors.kernels.kv_pages.packing import Packing, packed, unpacked
from perfmodel_executors.kernels.kv_pages.pages import (
    FP8,
    FP8_MAX,
    INT8_MAX,
    LEAST_SCALE,
    KVPages,
    dequantized,
    empty_pages,
    quantized,
)

__all__ = [
    "FP8",
    "FP8_MAX",
    "INT8_MAX",
    "LEAST_SCALE",
    "KVPages",
    "Packing",
    "dequantized",
    "empty_pages",
    "packed",
    "quantized",
    "unpacked",
]

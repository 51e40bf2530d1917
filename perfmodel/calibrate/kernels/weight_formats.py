"""How the names of number formats in tables of GEMMs and experts multiply, and what a call of them moves."""

__all__ = ["WEIGHT_FORMATS", "WeightFormat"]

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One number format of a table.

    name: in calibration keys; rate: the peak rate that multiplies; weight_bytes, input_bytes: per element, scales
    included; quantizes_input: a kernel reads the input in 2 bytes and writes it at `input_bytes` first
    """

    name: str
    rate: str
    weight_bytes: float
    input_bytes: float
    quantizes_input: bool = False

    @property
    def quantized_bytes(self) -> float:
        """Per input element, read and written by the quantizing kernel."""
        return 2.0 + self.input_bytes if self.quantizes_input else 0.0


_W4 = 0.5 + 2 / 128  # 4 bits, a 16-bit scale per 128
_MXFP4 = 0.5 + 1 / 32
_NVFP4 = 0.5 + 1 / 16

# `sq` is TensorRT-LLM's SmoothQuant plugin, timed on input that is int8 already.
WEIGHT_FORMATS = MappingProxyType(
    {
        "bfloat16": WeightFormat("bf16", "bf16", 2, 2),
        "float16": WeightFormat("bf16", "bf16", 2, 2),
        "fp8": WeightFormat("fp8", "fp8", 1, 1, quantizes_input=True),
        "fp8_static": WeightFormat("fp8", "fp8", 1, 1, quantizes_input=True),
        "fp8_block": WeightFormat("fp8_block", "fp8", 1, 1, quantizes_input=True),
        "int8": WeightFormat("int8", "int8", 1, 1, quantizes_input=True),
        "fp8_wo": WeightFormat("fp8_wo", "bf16", 1, 2),
        "int8_wo": WeightFormat("int8_wo", "bf16", 1, 2),
        "int4_wo": WeightFormat("int4_wo", "bf16", _W4, 2),
        "sq": WeightFormat("int8", "int8", 1, 1),
        "w4afp8": WeightFormat("w4afp8", "fp8", _W4, 1, quantizes_input=True),
        "w4a16_mxfp4": WeightFormat("mxfp4_wo", "bf16", _MXFP4, 2),
        "w4a8_mxfp4_mxfp8": WeightFormat("w4a8_mxfp4", "fp8", _MXFP4, 1 + 1 / 32, quantizes_input=True),
        "mxfp4": WeightFormat("mxfp4", "fp4", _MXFP4, _MXFP4, quantizes_input=True),
        "nvfp4": WeightFormat("nvfp4", "fp4", _NVFP4, _NVFP4, quantizes_input=True),
    }
)

"""What a weight [N, K] of a linear layer (N outputs, K inputs) is stored as.

Containers are compared by identity, so that a library's own packing of one can be remembered beside it.
"""

# ruff: noqa: N815 (fields carry the suffix of their shape, like the variables)

from dataclasses import dataclass

from torch import Tensor

from perfmodel_executors.kernels.weight_formats.gguf_reading import BLOCK_SIZES

FP8_BLOCK = 128  # rows and columns that share a scale of a BlockFp8Weight


@dataclass(frozen=True, eq=False)
class _ScaledRows:
    """w = values * scales[:, None]: 8-bit values with an fp32 scale for each output."""

    values_NK: Tensor
    scales_N: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values_NK.shape[0], self.values_NK.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values_NK.nbytes + self.scales_N.nbytes


@dataclass(frozen=True, eq=False)
class Int8Weight(_ScaledRows):
    """Values in INT8.

    quantizes_input: activations are quantised to INT8 too, with a scale for each token
    outlier_threshold: columns of activations with a larger magnitude are multiplied apart, unquantised (LLM.int8)
    input_scale: fp32, of no dimension: of all activations, known beforehand (SmoothQuant); None: each token's own
    """

    quantizes_input: bool = False
    outlier_threshold: float | None = None
    input_scale: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Fp8Weight(_ScaledRows):
    """Values in e4m3; equal scales make a scale per tensor.

    quantizes_input: activations are quantised to e4m3 too, with a scale for each token
    """

    quantizes_input: bool = True


@dataclass(frozen=True, eq=False)
class BlockFp8Weight:
    """Values in e4m3 with a scale for each block of 128 x 128 (DeepSeek-V3), whose last ones may be smaller.

    scales_RG: fp32 [ceil(N / 128), ceil(K / 128)]; activations have a scale for each token and 128 inputs
    """

    values_NK: Tensor
    scales_RG: Tensor
    quantizes_input: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        return self.values_NK.shape[0], self.values_NK.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values_NK.nbytes + self.scales_RG.nbytes


@dataclass(frozen=True, eq=False)
class Fp4Weight:
    """Values in E2M1 with a scale for each output and group of inputs: of 32 in E8M0 (MXFP4), of 16 in E4M3 (NVFP4).

    packed_NJ:    uint8 [N, K / 2]: byte j of 32 has input j of 64 in its low four bits and input 32 + j in the others
    scales_GN:    uint8 [K / group, N], the scales' own bits
    row_scales_N: fp32, multiplies each output (equal ones make NVFP4's scale of a tensor); None: without
    """

    packed_NJ: Tensor
    scales_GN: Tensor
    row_scales_N: Tensor | None = None
    quantizes_input: bool = False

    @property
    def group_size(self) -> int:
        return self.shape[1] // len(self.scales_GN)

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed_NJ.shape[0], 2 * self.packed_NJ.shape[1]

    @property
    def num_bytes(self) -> int:
        rows = self.row_scales_N.nbytes if self.row_scales_N is not None else 0
        return self.packed_NJ.nbytes + self.scales_GN.nbytes + rows


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """w = (q - zero) * scale, q in 0..15, with a scale (and zero point) for each output and group of inputs.

    packed_NJ: uint8 [N, K / 2]. A group of G inputs takes G / 2 bytes: byte j has input j of the group in its low four
               bits and input G/2 + j in its high four. So one mask and one shift give two contiguous halves of a group,
               and neither loads nor products need a shuffle.
    scales_GN: [K / G, N] in the dtype of the activations
    zeros_GN:  uint8 [K / G, N]; None where all are 8 (symmetric)
    """

    packed_NJ: Tensor
    scales_GN: Tensor
    zeros_GN: Tensor | None
    group_size: int
    quantizes_input: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed_NJ.shape[0], 2 * self.packed_NJ.shape[1]

    @property
    def num_bytes(self) -> int:
        zeros = self.zeros_GN.nbytes if self.zeros_GN is not None else 0
        return self.packed_NJ.nbytes + self.scales_GN.nbytes + zeros


@dataclass(frozen=True, eq=False)
class Int4Int8Weight:
    """w = (q - zero) * scale * row scale, q in 0..15, where (q - zero) * scale is an INT8 number: what INT8 activations
    are multiplied by (QServe's progressive groups; Lin et al. 2024, section 4.1).

    packed_NJ:           as of an Int4Weight
    scales_GN, zeros_GN: uint8 [K / G, N]
    row_scales_N:        fp32
    """

    packed_NJ: Tensor
    scales_GN: Tensor
    zeros_GN: Tensor
    row_scales_N: Tensor
    group_size: int
    quantizes_input: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed_NJ.shape[0], 2 * self.packed_NJ.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.packed_NJ, self.scales_GN, self.zeros_GN, self.row_scales_N))


@dataclass(frozen=True, eq=False)
class Sparse24Weight:
    """Two of each four consecutive inputs are kept (2:4).

    values_NJ:  [N, K / 2], the kept ones in order
    indices_NP: uint8 [N, K / 8]: for two fours of inputs each, the low four bits for the first: its first kept position
                (0..3) and, two bits higher, its second
    """

    values_NJ: Tensor
    indices_NP: Tensor
    quantizes_input: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.values_NJ.shape[0], 2 * self.values_NJ.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values_NJ.nbytes + self.indices_NP.nbytes


@dataclass(frozen=True, eq=False)
class SignsWeight:
    """w = scale * s with s in -1, 0, 1 (2 bits) or -1, 1 (1 bit), and one scale for the whole matrix.

    bytes_NJ: uint8 [N, K / n] of n = 8 / bits codes each: input i shares its byte with i + K / n, i + 2 K / n, ..., so
              that a field of all bytes is a contiguous part of the inputs
    scale:    fp32, of no dimension
    """

    bytes_NJ: Tensor
    scale: Tensor
    bits: int = 2
    quantizes_input: bool = True

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    @property
    def shape(self) -> tuple[int, int]:
        return self.bytes_NJ.shape[0], self.per_byte * self.bytes_NJ.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.bytes_NJ.nbytes + self.scale.nbytes


@dataclass(frozen=True, eq=False)
class GgufWeight:
    """Rows in llama.cpp's blocks, whose scales lie beside their codes.

    blocks_NJ: uint8 [N, K / weights of a block * bytes of a block]
    form:      q4_0, q8_0, q4_k, ...: a key of BLOCK_SIZES
    """

    blocks_NJ: Tensor
    form: str
    quantizes_input: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        weights, size = BLOCK_SIZES[self.form]
        return self.blocks_NJ.shape[0], self.blocks_NJ.shape[1] // size * weights

    @property
    def num_bytes(self) -> int:
        return self.blocks_NJ.nbytes


MatrixWeight = (
    Tensor
    | Int8Weight
    | Int4Weight
    | Int4Int8Weight
    | Fp8Weight
    | BlockFp8Weight
    | Fp4Weight
    | Sparse24Weight
    | SignsWeight
    | GgufWeight
)


@dataclass(frozen=True, eq=False)
class LowRankWeight:
    """W = outputs_NR inputs_RK: two thin matrices, each in a format of its own; x goes through the second first."""

    inputs_RK: MatrixWeight
    outputs_NR: MatrixWeight

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs_NR.shape[0], self.inputs_RK.shape[1]


@dataclass(frozen=True, eq=False)
class RowsWeight:
    """Parts of the outputs one below the other, each in a format of its own."""

    parts: tuple[MatrixWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


Weight = MatrixWeight | LowRankWeight | RowsWeight

"""The loops of a kernel that multiply matrices, read from its disassembly: what one iteration of one warp asks of each
unit of a compute unit. Shapes of products stand in their names: HMMA.16816 is 16 x 8 x 16 of a warp, HGMMA.64x256x16 of
a warpgroup of four. Those of Blackwell's tensor memory are of a whole block, and their shape is in a descriptor, a
constant: M / 16 from bit 24 on, N / 8 from bit 17, and 32 bytes deep. Source: PTX ISA, "Instruction descriptor".
"""

import re
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*[^;]*);")
_BRANCH = re.compile(r"^BRA.*`\((\.L_x_\d+)\)")
_WARP_PRODUCT = re.compile(r"^(?:HMMA|IMMA|QMMA)\.(?:SP\.)?(16)(8)(\d+)")
_GROUP_PRODUCT = re.compile(
    r"^(?:HGMMA|QGMMA|IGMMA)\.64x(\d+)x(\d+)\.\S*?(BF16|F16|TF32|E4M3|E5M2|S8)\b\S*\s+R\d+, (R\d+, )?"
)
_BLOCK_PRODUCT = re.compile(r"^UTC([HQI])MMA\S* .*idesc\[(UR\d+)\]")
_BLOCK_SHAPE = re.compile(r"^UTC([HQI])MMA\S* .*idesc\[(\d+)\]")
_BLOCK_FORMATS = {"H": "bf16", "Q": "fp8", "I": "int8"}
_BLOCK_DEPTH_BYTES = 32
_CONSTANT = re.compile(r"^UMOV (UR\d+), 0x([0-9a-f]+)")
_FORMATS = {"BF16": "bf16", "F16": "fp16", "TF32": "tf32", "E4M3": "fp8", "E5M2": "fp8", "S8": "int8"}
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp8": 1, "int8": 1}
_SHARED = re.compile(r"^(?:LDS|STS)(?:\.U?(\d+))?")
_MATRICES = re.compile(r"^(?:LDSM|STSM)\S*\.M88(?:\.(\d))?")
# Which take two cycles for four warps, since there are 64 lanes for them: integers, comparisons, selections, bytes put
# in order, conversions (CUDA C++ Programming Guide, "Arithmetic Instructions", compute capability 8.0 to 10.0).
_HALF_RATE = re.compile(r"^(?:IADD|IMNMX|ISETP|LOP3|SHF|PRMT|SEL|FSEL|FMNMX|FSETP|LEA|I2F|F2I|F2F|F2FP|VIADD|VIMNMX)")
_LEAVES = re.compile(r"^WARPGROUP\.DEPBAR\.LE gsb0, 0x([1-9a-f])")
GROUP_WARPS = 4


@dataclass(frozen=True)
class LoopFacts:
    """One iteration of one warp. rate: the number format of its products, flops: theirs; instructions: issued;
    half_rate, exponentials: how many of them go to units with 64 lanes and to the special function units; shared_bytes:
    read from and written to shared memory, operands of products included; leaves_products: whether the next iteration
    begins while products are under way; is_grouped: whether products are of warpgroups; is_of_block: whether they, and
    the bytes of their operands, are of all warps together"""

    rate: str
    flops: float
    instructions: int
    half_rate: int
    exponentials: int
    shared_bytes: float
    leaves_products: bool
    is_grouped: bool
    is_of_block: bool = False


def loops_of(listing: str) -> tuple[LoopFacts, ...]:
    """The innermost loops of `listing`, nvdisasm's, that have products of a known shape; those with most first."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    spans: list[tuple[int, int]] = []
    constants: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.search(line):
            text = instruction[1]
            if constant := _CONSTANT.match(text):
                constants[constant[1]] = int(constant[2], 16)
            elif product := _BLOCK_PRODUCT.match(text):  # with the constant in place of its register
                text = text.replace(f"idesc[{product[2]}]", f"idesc[{constants.get(product[2], 0)}]")
            instructions.append(text)
            branch = _BRANCH.match(instruction[1])
            if branch and branch[1] in labels:
                spans.append((labels[branch[1]], len(instructions)))
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b for c, d in spans if (c, d) != (a, b))]
    loops = [loop for first, last in inner if (loop := _facts(instructions[first:last])) is not None]
    return tuple(sorted(loops, key=lambda loop: (-loop.flops, loop.instructions)))


def _facts(body: list[str]) -> LoopFacts | None:
    flops, shared, rate, is_grouped, is_of_block = 0.0, 0.0, "", False, False
    for text in body:
        if product := _BLOCK_SHAPE.match(text):
            rate, is_of_block = _BLOCK_FORMATS[product[1]], True
            rows, columns = (int(product[2]) >> 24 & 31) * 16, (int(product[2]) >> 17 & 63) * 8
            flops += 2.0 * rows * columns * _BLOCK_DEPTH_BYTES / ELEMENT_BYTES[rate]
            shared += (rows + columns) * _BLOCK_DEPTH_BYTES
        elif product := _GROUP_PRODUCT.match(text):
            columns, depth, is_grouped = int(product[1]), int(product[2]), True
            rate = _FORMATS[product[3]]
            flops += 2 * 64 * columns * depth / GROUP_WARPS
            shared += (columns + (0 if product[4] else 64)) * depth * ELEMENT_BYTES[rate] / GROUP_WARPS
        elif product := _WARP_PRODUCT.match(text):
            flops += 2.0 * int(product[1]) * int(product[2]) * int(product[3])
            formats = [name for name in _FORMATS if f".{name}" in text]
            rate = _FORMATS[formats[0]] if formats else "fp16"
        elif matrices := _MATRICES.match(text):
            shared += 128.0 * int(matrices[1] or 1)
        elif access := _SHARED.match(text):
            shared += 4.0 * int(access[1] or 32)
    if not flops:
        return None
    half_rate, exponentials = sum(map(bool, map(_HALF_RATE.match, body))), sum(text.startswith("MUFU") for text in body)
    leaves = any(map(_LEAVES.match, body))
    return LoopFacts(rate, flops, len(body), half_rate, exponentials, shared, leaves, is_grouped, is_of_block)

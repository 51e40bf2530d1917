"""What a compiled kernel takes of the hardware, read from its binary with the tools that come with Triton.

Registers, stack and shared memory are from `cuobjdump -res-usage`; spills and tensor-core instructions are counted in
the disassembly (`nvdisasm`): STL and LDL move registers to local memory and back, HMMA (Ampere), HGMMA (Hopper) and
UTC*MMA (Blackwell) are matrix products of tensor cores, LDGSTS and UTMALDG load global memory straight into SRAM.

Where Hopper's assembler cannot prove that nothing touches a product's registers meanwhile, it waits for each one and
says so (advice C7510 to C7519), and the binary does not. It proves nothing of left operands that lie in registers: a
kernel that leaves such a product under way while it writes the next operands gave other results each time on an H200.

    blocks at once = min( registers, shared memory, warps, blocks ) of a compute unit over those of a block

Registers are handed out to whole warps in units of 256; a block's shared memory has 1 KiB of the system's beside it.
Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; CUDA occupancy calculator.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.specs.hardware import HardwareSpec
from perfmodel_executors.compiled.loops import LoopFacts, loops_of

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)")
_TENSOR = re.compile(r"(HMMA|IMMA|QMMA|OMMA|DMMA|HGMMA|QGMMA|IGMMA|UTC\w*MMA)")
_SPILL = re.compile(r"(STL|LDL)\b")
_SERIALISED = re.compile(r"C75\d\d\b")
_FROM_REGISTERS = re.compile(r"wgmma\.mma_async[^{;]*\{[^}]*\},\s*\{")  # the sums, then the left operand
_LEAVES_SOME = re.compile(r"wgmma\.wait_group\.sync\.aligned\s+[1-9]")
_ASYNC = re.compile(r"(LDGSTS|UTMALDG|UBLKCP)")


@dataclass(frozen=True)
class BinaryFacts:
    """registers: per thread; shared_bytes: per block, static and dynamic; stack_bytes: per thread (0: no arrays or
    spills); spills: instructions that store or load a spilled register; tensor_instructions: matrix products on tensor
    cores; async_copies: loads from global memory into SRAM that bypass registers; tensor_memory: columns (Blackwell);
    serialised: pieces of advice that products wait for each other (Hopper); unsettled: waits that leave products under
    way, in a kernel whose left operands lie in registers (Hopper); loops: the innermost ones that have such products"""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spills: int
    tensor_instructions: int
    async_copies: int
    tensor_memory: int
    num_instructions: int
    serialised: int = 0
    unsettled: int = 0
    loops: tuple[LoopFacts, ...] = ()


def read_binary(cubin: bytes, ptx: str, shared_bytes: int, tensor_memory: int = 0) -> BinaryFacts:
    """The facts of a CUDA binary and its assembly; shared_bytes, tensor_memory: the compiler's own figures."""
    usage, listing = _USAGE.search(_tool("cuobjdump", "-res-usage", cubin)), _tool("nvdisasm", "-c", cubin)
    opcodes = _OPCODE.findall(listing)
    if usage is None or not opcodes:
        raise PerfmodelError("cuobjdump or nvdisasm could not read the compiled kernel; is Triton's wheel complete?")
    kinds = {"spills": _SPILL, "tensor_instructions": _TENSOR, "async_copies": _ASYNC}
    counts = {name: sum(map(bool, map(kind.match, opcodes))) for name, kind in kinds.items()}
    counts |= {"registers": int(usage[1]), "stack_bytes": int(usage[2]), "num_instructions": len(opcodes)}
    counts |= {"serialised": serialised_products(ptx), "unsettled": unsettled_products(ptx)}
    return BinaryFacts(**counts, shared_bytes=shared_bytes, tensor_memory=tensor_memory, loops=loops_of(listing))


def serialised_products(ptx: str) -> int:
    """How often the assembler says that it serialises Hopper's products in `ptx`; 0 without any."""
    return len(_SERIALISED.findall(_tool("ptxas", "--gpu-name=sm_90a", ptx.encode()))) if "wgmma" in ptx else 0


def unsettled_products(ptx: str) -> int:
    """How many waits of `ptx` leave products under way, where some product's left operand lies in registers."""
    return len(_LEAVES_SOME.findall(ptx)) if _FROM_REGISTERS.search(ptx) else 0


def _tool(name: str, option: str, kernel: bytes) -> str:
    """What a tool says of `kernel`, a file in a folder that takes what the tool writes, too."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel").write_bytes(kernel)
        command = [str(path), option, "kernel"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", check=False)
        except OSError as error:
            raise PerfmodelError(f"{path}: {error.strerror}; reinstall triton, whose wheel brings it.") from None
    return done.stdout + done.stderr


_WARP = 32
_REGISTER_BYTES = 4
_REGISTER_UNIT = 256  # registers, handed out per warp
_RESERVED_SHARED_BYTES = 1024  # per block, by the system
# (warps, blocks) that a compute unit runs at once.
_LIMITS = {
    "sm_75": (32, 16),
    "sm_80": (64, 32),
    **dict.fromkeys(("sm_86", "sm_87"), (48, 16)),
    "sm_89": (48, 24),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103"), (64, 32)),
    "sm_120": (48, 24),
}


@dataclass(frozen=True)
class Occupancy:
    """Blocks that run at once on one compute unit, what keeps it from more, and the share of its warps they fill."""

    blocks: int
    limited_by: str  # registers | shared memory | warps | blocks
    fraction: float


def shared_limit_bytes(hardware: HardwareSpec) -> int:
    """The most shared memory that one thread block can have, bytes: the unit's, without the system's part."""
    sram = hardware.level("sram")
    if sram is None:
        raise SpecError(f"{hardware.name} declares no memory level 'sram'; add its capacity per compute unit.")
    return int(sram.capacity_bytes) - _RESERVED_SHARED_BYTES


def occupancy(hardware: HardwareSpec, num_warps: int, registers_per_thread: int, shared_bytes: int) -> Occupancy:
    """Occupancy of a kernel with blocks of `num_warps` warps, each of `shared_bytes`, static and dynamic. Raises
    SpecError for a block that the device cannot hold at all, and for a device without known limits."""
    limits = _LIMITS.get(hardware.declared.compile_target or "")
    if limits is None:
        raise SpecError(
            f"{hardware.name}: occupancy is known for {', '.join(_LIMITS)}, not for compile_target "
            f"{hardware.declared.compile_target}."
        )
    (most_warps, most_blocks), limit = limits, shared_limit_bytes(hardware)
    if shared_bytes > limit:
        raise SpecError(
            f"a thread block with {shared_bytes} bytes of shared memory does not fit {hardware.name}, which has "
            f"{limit} bytes a block; take a smaller tile or fewer pipeline stages."
        )
    registers = hardware.level("registers")
    unit_registers = int(registers.capacity_bytes) // _REGISTER_BYTES if registers is not None else 65536
    per_warp = -(-max(1, registers_per_thread) * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    by = {
        "registers": unit_registers // per_warp // num_warps,
        "shared memory": (limit + _RESERVED_SHARED_BYTES) // (shared_bytes + _RESERVED_SHARED_BYTES),
        "warps": most_warps // num_warps,
        "blocks": most_blocks,
    }
    limited_by = min(by, key=lambda name: by[name])
    return Occupancy(by[limited_by], limited_by, by[limited_by] * num_warps / most_warps)

"""How many thread blocks of a compiled kernel run at once on one compute unit of a GPU.

    blocks = min( registers, shared memory, warps, blocks ) of the unit over those of a block

Registers are handed out to whole warps in units of 256, and a block's shared memory has 1 KiB of the system's beside
it. Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; CUDA occupancy calculator.
"""

__all__ = ["Occupancy", "occupancy", "shared_limit_bytes"]

from dataclasses import dataclass
from typing import NamedTuple

from perfmodel.errors import SpecError
from perfmodel.specs.hardware import HardwareSpec

_WARP = 32
_REGISTER_BYTES = 4
_REGISTER_UNIT = 256  # registers, handed out per warp
_RESERVED_SHARED_BYTES = 1024  # per block, by the system


class _UnitLimits(NamedTuple):
    warps: int
    blocks: int


_LIMITS = {
    "sm_75": _UnitLimits(warps=32, blocks=16),
    "sm_80": _UnitLimits(warps=64, blocks=32),
    "sm_86": _UnitLimits(warps=48, blocks=16),
    "sm_87": _UnitLimits(warps=48, blocks=16),
    "sm_89": _UnitLimits(warps=48, blocks=24),
    "sm_90": _UnitLimits(warps=64, blocks=32),
    "sm_100": _UnitLimits(warps=64, blocks=32),
    "sm_103": _UnitLimits(warps=64, blocks=32),
    "sm_120": _UnitLimits(warps=48, blocks=24),
}


@dataclass(frozen=True)
class Occupancy:
    """Blocks that run at once on one compute unit, what keeps it from more, and the share of its warps they fill."""

    blocks: int
    limited_by: str  # registers | shared memory | warps | blocks
    fraction: float

    def __str__(self) -> str:
        return f"{self.blocks} blocks a compute unit ({self.fraction:.0%} of its warps, limited by {self.limited_by})"


def shared_limit_bytes(hardware: HardwareSpec) -> int:
    """The most shared memory that one thread block can have, bytes: the unit's, without the system's part."""
    sram = hardware.level("sram")
    if sram is None:
        raise SpecError(f"{hardware.name} declares no memory level 'sram'; add its capacity per compute unit.")
    return int(sram.capacity_bytes) - _RESERVED_SHARED_BYTES


def occupancy(hardware: HardwareSpec, num_warps: int, registers_per_thread: int, shared_bytes: int) -> Occupancy:
    """Occupancy of a kernel with blocks of `num_warps` warps.

    registers_per_thread: as compiled
    shared_bytes:         static and dynamic, of one block

    hardware: with its compute units' registers and shared memory

    Raises SpecError for a block that the device cannot hold at all, and for a device without known limits.
    """
    limits = _LIMITS.get(hardware.declared.compile_target or "")
    if limits is None:
        raise SpecError(
            f"{hardware.name}: occupancy is known for {', '.join(_LIMITS)}, not for compile_target "
            f"{hardware.declared.compile_target}."
        )
    limit = shared_limit_bytes(hardware)
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
        "warps": limits.warps // num_warps,
        "blocks": limits.blocks,
    }
    limited_by = min(by, key=lambda name: by[name])
    return Occupancy(by[limited_by], limited_by, by[limited_by] * num_warps / limits.warps)

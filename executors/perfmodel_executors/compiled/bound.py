"""What a kernel's binary lets it reach at most on a device that need not be there: the share of the limit, and the unit
that binds. The limit is what the work takes at the peak of its number format, or from HBM at its bandwidth.

Of one iteration of the loop with the products, W warps being resident on a compute unit, in cycles of the unit:

    products W flops / (peak / clock / units)        issue slots W n / 4             special functions W e 32 / rate
    half-rate units W h / 2                          shared memory W bytes / 128
    chain of one warpgroup: its own products, then its other instructions; only the longer where products are left under
    way. With G warpgroups on a unit others fill the gaps: the chain binds where it is longer than G products.

A launch lasts waves times that: tiles that are left over idle the other units. All tiles come through the L2: of a
product BLOCK_M + BLOCK_N rows of K for each tile, 5,120 bytes a clock (of Blackwell no rate is known: none counts).
From HBM come the rows of the tiles that are under way together, which depends on their order: G tile rows by P / G
columns of P tiles at once. A kernel without products reads and writes its tensors once, those of an earlier launch from
the L2 where they fit it; its limit is each tensor once, from HBM. Nothing else is counted (epilogues, fences,
launches), so a device stays below. Source: CUDA C++ Programming Guide, "Arithmetic Instructions"; hardware_specs.

    python -m perfmodel_executors.compiled.bound linear_fp8 --hardware h100-sxm-80gb
"""

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.ops.work import Work
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario_file import load_hardware
from perfmodel_executors.compiled.build import CompiledKernel, compile_problem
from perfmodel_executors.compiled.loops import ELEMENT_BYTES, GROUP_WARPS, LoopFacts
from perfmodel_executors.kernels.problem import Problem, problems_of
from perfmodel_executors.kernels.triton.swapped_product import GROUP

_SCHEDULERS = 4
_HALF = 2  # cycles of four warps' instruction on 64 lanes
_LANES = 32
_SHOWS = 1.02  # idle units that are named as what binds
# Bytes that the L2 gives in a clock (NVIDIA A100 whitepaper, 2020, "L2 cache"; of Hopper none is published, and 16-bit
# products came to 98 % of it on an H100).
_L2_BYTES = {"sm_80": 5120.0, "sm_90": 5120.0}


class KernelBound(NamedTuple):
    """share: of the limit, at most; unit: what binds; seconds: at least, of the launch; kernel: with its binary"""

    kernel: CompiledKernel
    share: float
    unit: str
    seconds: float


def loop_cycles(kernel: CompiledKernel, loop: LoopFacts, hardware: HardwareSpec) -> dict[str, float]:
    """Cycles of a compute unit for one iteration of all its warps, by what takes them."""
    facts, device = kernel.facts, DeviceFacts.of(hardware)
    is_specialised = kernel.launch.kernel.is_gluon()  # each role's warps have a loop of their own
    warps = kernel.occupancy.blocks * (
        GROUP_WARPS * len(facts.loops) if is_specialised else kernel.launch.options.num_warps
    )
    per_cycle = device.peak(loop.rate) / device.compute_units / device.clock_hz
    products = loop.flops / per_cycle / (kernel.launch.options.num_warps if loop.is_of_block else 1)
    special = loop.exponentials * _LANES / (16 * device.exponentials)
    cycles = {
        "products": warps * products,
        "issue slots": warps * loop.instructions / _SCHEDULERS,
        "half-rate units": warps * loop.half_rate / _SCHEDULERS * _HALF,
        "special functions": warps * special,
        "shared memory": (kernel.occupancy.blocks if loop.is_of_block else warps) * loop.shared_bytes / 128,
    }
    if loop.is_grouped:
        own = GROUP_WARPS * products
        others = max(loop.instructions, GROUP_WARPS * special)
        cycles["chain"] = max(own, others) if loop.leaves_products else own + others
    return cycles


def bound_of(problem: Problem, hardware: HardwareSpec) -> list[KernelBound]:
    """The bound of each kernel that the operator launches for `problem` on `hardware`, by its first candidate of tiles;
    where some have products of theirs alone. Raises SpecError and KernelError as `compile_launch` does."""
    compiled, work = compile_problem(problem, hardware), problem.work
    if work is None:
        return []
    with_products = [kernel for kernel in compiled if kernel.facts.loops]
    if with_products or any(kernel.facts.tensor_instructions for kernel in compiled):
        return [_bound(kernel, problem, work, hardware) for kernel in with_products]
    return _moved(compiled, work, hardware)


def _moved(compiled: list[CompiledKernel], work: Work, hardware: HardwareSpec) -> list[KernelBound]:
    """Launches that only move bytes: shares are those of all together."""
    device, known, seconds, units = DeviceFacts.of(hardware), dict[int, float](), list[float](), list[str]()
    l2_rate = _L2_BYTES.get(hardware.declared.compile_target or "", math.inf) * device.clock_hz
    for kernel in compiled:
        # A program has `BLOCK` elements, however large a tensor is.
        most = math.prod(kernel.launch.grid) * kernel.launch.constants.get("BLOCK", math.inf)
        tensors = [part for part in kernel.launch.args if isinstance(part, torch.Tensor)]
        sizes = {id(tensor): min(tensor.nbytes, most * tensor.itemsize) for tensor in tensors}
        moved = sum(sizes.values())
        kept = sum(size for key, size in sizes.items() if key in known) if moved <= device.l2_bytes else 0.0
        by_unit = {"HBM": (moved - kept) / device.bandwidth, "L2": moved / l2_rate}
        units.append(max(by_unit, key=lambda unit: by_unit[unit]))
        seconds.append(by_unit[units[-1]])
        known |= sizes
    least_bytes = min(work.hbm_bytes, sum(known.values()))
    share = least_bytes / device.bandwidth / sum(seconds)
    return [KernelBound(*own) for own in zip(compiled, [share] * len(compiled), units, seconds, strict=True)]


def _bound(kernel: CompiledKernel, problem: Problem, work: Work, hardware: HardwareSpec) -> KernelBound:
    loop, device = kernel.facts.loops[0], DeviceFacts.of(hardware)
    cycles = loop_cycles(kernel, loop, hardware)
    slowest = max(cycles, key=lambda name: cycles[name])
    at_peak_s, hbm_s = work.flops / device.peak(loop.rate), work.hbm_bytes / device.bandwidth
    at_once, (tiles, l2_bytes) = device.compute_units * kernel.occupancy.blocks, _tiles(kernel, problem)
    if l2_bytes and work.hbm_bytes > device.l2_bytes:
        hbm_s = max(hbm_s, l2_bytes * tile_order_share(kernel, problem, at_once) / device.bandwidth)
    idle = math.ceil(tiles / at_once) * at_once / tiles
    computing = "tiles left over" if slowest == "products" and idle > _SHOWS else slowest
    seconds = {
        computing: at_peak_s * idle * cycles[slowest] / cycles["products"],
        "HBM": hbm_s,
        "L2": l2_bytes / (_L2_BYTES.get(hardware.declared.compile_target or "", math.inf) * device.clock_hz),
    }
    unit = max(seconds, key=lambda name: seconds[name])
    return KernelBound(kernel, max(at_peak_s, hbm_s) / seconds[unit], unit, seconds[unit])


def tile_order_share(kernel: CompiledKernel, problem: Problem, at_once: int) -> float:
    """The share that comes from HBM of the rows that tiles read from the L2: of `at_once` tiles, which lie in groups of
    `GROUP` tile rows, each row or column of tiles is fetched once."""
    sizes, (block_m, block_n) = problem.sizes, (kernel.launch.constants[name] for name in ("BLOCK_M", "BLOCK_N"))
    tiles_m, tiles_n = (math.ceil(int(sizes[name]) / block) for name, block in (("m", block_m), ("n", block_n)))
    rows = min(GROUP, tiles_m)
    columns = min(tiles_n, max(1.0, min(at_once, tiles_m * tiles_n) / rows))
    return float((rows * block_m + columns * block_n) / (rows * columns * (block_m + block_n)))


def _tiles(kernel: CompiledKernel, problem: Problem) -> tuple[int, float]:
    """Output tiles of a product, times slices of K, and bytes of the rows of both operands for all of them; of other
    kernels the launch's programs, and 0."""
    constants, sizes = kernel.launch.constants, problem.sizes
    if not ({"BLOCK_M", "BLOCK_N"} <= constants.keys() and {"m", "n", "k"} <= sizes.keys()):
        return math.prod(kernel.launch.grid), 0.0
    block_m, block_n, slices = constants["BLOCK_M"], constants["BLOCK_N"], constants.get("SPLIT_K", 1)
    tiles = int(math.ceil(int(sizes["m"]) / block_m) * math.ceil(int(sizes["n"]) / block_n) * slices)
    row_bytes = int(sizes["k"]) / slices * ELEMENT_BYTES[kernel.facts.loops[0].rate]
    return tiles, float(tiles * (block_m + block_n) * row_bytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each kernel of an operator's serving problems."""
    parser = argparse.ArgumentParser(description="What binaries let kernels reach at most.")
    parser.add_argument("operator", nargs="+")
    parser.add_argument("--hardware", default="h100-sxm-80gb")
    asked = parser.parse_args(arguments)
    hardware = load_hardware(asked.hardware)
    for operator in asked.operator:
        for problem in problems_of(operator, "serving", torch.bfloat16):
            for bound in bound_of(problem, hardware):
                facts, held = bound.kernel.facts, bound.kernel.occupancy
                print(
                    f"{bound.share:4.0%} of the limit, {1e6 * bound.seconds:9.1f} us, {bound.unit} bind; "
                    f"{facts.registers} registers, {facts.spills} spills, {held.blocks} blocks a unit; {problem}"
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

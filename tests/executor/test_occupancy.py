"""Occupancy against figures of the CUDA occupancy calculator, and the sentences for what does not fit."""

import pytest

from perfmodel.errors import SpecError
from perfmodel.specs import load_hardware
from perfmodel_executors.compiled.binary import occupancy, shared_limit_bytes

A100, H100 = load_hardware("a100-sxm-80gb"), load_hardware("h100-sxm-80gb")


@pytest.mark.parametrize(
    ("hardware", "warps", "registers", "shared", "blocks", "limited_by"),
    [
        # By hand: 255 registers take 8192 a warp; 65536 / 8192 / 4 warps.
        (A100, 4, 255, 0, 2, "registers"),
        (A100, 4, 32, 0, 16, "registers"),  # 1024 a warp: 64 warps fill registers and the unit alike
        (A100, 1, 16, 0, 32, "blocks"),
        (A100, 8, 32, 80_000, 2, "shared memory"),  # (164 - 2 x 1) KiB hold two of 78.1 KiB
        (H100, 8, 40, 100_000, 2, "shared memory"),
        (H100, 32, 32, 0, 2, "registers"),
    ],
)
def test_blocks_by_hand(hardware, warps, registers, shared, blocks, limited_by):
    found = occupancy(hardware, warps, registers, shared)
    assert (found.blocks, found.limited_by) == (blocks, limited_by)


@pytest.mark.parametrize(
    ("name", "kib"), [("a100-sxm-80gb", 163), ("h100-sxm-80gb", 227), ("b200-sxm", 227), ("l40s", 99)]
)
def test_the_most_shared_memory_of_a_block_is_the_vendors(name, kib):
    """CUDA C++ Programming Guide, technical specifications: maximum shared memory per thread block."""
    assert shared_limit_bytes(load_hardware(name)) == kib * 1024


def test_an_oversize_block_is_refused_with_the_limit():
    with pytest.raises(SpecError, match=r"200000 bytes.*a100-sxm-80gb.*166912"):
        occupancy(A100, 4, 32, 200_000)


def test_a_device_without_known_limits_is_a_sentence():
    with pytest.raises(SpecError, match="gfx942"):
        occupancy(load_hardware("mi300x"), 4, 32, 0)


def test_more_of_anything_never_lets_more_blocks_run():
    for registers in range(16, 256, 16):
        fewer = [occupancy(A100, 4, registers, shared).blocks for shared in range(0, 160_000, 8_000)]
        assert fewer == sorted(fewer, reverse=True)

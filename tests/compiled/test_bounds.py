"""What binaries let kernels reach at most: loops by hand counts, and times on devices that were lent."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel.specs import load_hardware  # noqa: E402
from perfmodel_executors.compiled.bound import bound_of  # noqa: E402
from perfmodel_executors.compiled.loops import loops_of  # noqa: E402
from perfmodel_executors.kernels.problem import problems_of  # noqa: E402

MEASURED = Path(__file__).parents[2] / "reports" / "measured"
LISTING = """
.L_x_0:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_1:
        /*0010*/                   LDS.128 R4, [R8] ;
        /*0020*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, !UPT ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR4], R24 ;
        /*0040*/                   MUFU.EX2 R3, R4 ;
        /*0050*/                   F2FP.BF16.F32.PACK_AB R4, R5, R6 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0070*/              @!P0 BRA `(.L_x_1) ;
        /*0080*/               @P1 BRA `(.L_x_0) ;
        /*0090*/                   HMMA.16816.F32 R4, R8, R9, R4 ;
"""


def test_a_loop_is_what_lies_between_its_label_and_its_branch():
    """Only the inner one has products; a warp does a quarter of a warpgroup's. Operands from shared memory: both of the
    first, 256 + 64 rows of 16 elements of two bytes, and 128 rows of the second; and 16 bytes of each lane."""
    (loop,) = loops_of(LISTING)
    assert loop.rate == "bf16"
    assert loop.flops == 2 * 64 * (256 + 128) * 16 / 4
    assert (loop.instructions, loop.half_rate, loop.exponentials) == (7, 1, 1)
    assert loop.shared_bytes == (256 + 64 + 128) * 16 * 2 / 4 + 32 * 16
    assert loop.leaves_products
    assert loop.is_grouped


def test_products_of_single_warps_and_of_eight_bits():
    text = LISTING.replace("HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, !UPT", "QMMA.16832.F32.E4M3.E4M3 R4, R8, R9")
    text = text.replace("HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR4], R24", "LDSM.16.M88.4 R8, [R9]")
    (loop,) = loops_of(text.replace("DEPBAR.LE gsb0, 0x1", "DEPBAR.LE gsb0, 0x0"))
    assert (loop.rate, loop.flops) == ("fp8", 2 * 16 * 8 * 32)
    assert loop.shared_bytes == 32 * 16 + 4 * 128
    assert not loop.leaves_products


# (operator, how its problem begins): whose first candidate was the fastest, so that what ran is what is bounded.
TIMED = [
    ("linear", "linear m=4096 n=14336 k=4096"),
    ("linear_fp8", "linear_fp8 m=4096 n=14336 k=4096"),
    ("linear_w8a8", "linear_w8a8 m=4096 n=14336 k=4096"),
    ("linear_fp8_block", "linear_fp8_block m=4096 n=14336 k=4096"),
    ("attention_prefill", "attention_prefill batch_size=1 isl=8192 step=0 num_heads=32"),
    ("attention_decode", "attention_decode batch_size=64 step=4095 num_heads=32"),
    ("attention_latent_decode", "attention_latent_decode batch_size=128 step=2047"),
]


@pytest.mark.parametrize(("operator", "begin"), TIMED)
def test_no_kernel_was_faster_than_its_bound(operator, begin):
    """On the H100 that was lent: within 2 %, by which the clock may exceed the one of the declared peak."""
    rows = json.loads((MEASURED / "h100-sxm-80gb" / "kernels.json").read_text(encoding="utf-8"))
    problem = next(each for each in problems_of(operator) if str(each).startswith(begin))
    bounds = bound_of(problem, load_hardware("h100-sxm-80gb"))
    least = sum(bound.seconds for bound in bounds)
    assert 0 < least <= 1.02 * rows[str(problem)]["seconds"]


# Shares of the limit that binaries allow on an H100: floors, below what they are today.
FLOORS = {
    "linear m=4096 n=14336 k=4096": 0.80,
    "linear_fp8 m=4096 n=14336 k=4096": 0.80,
    "linear_fp8_block m=4096 n=14336 k=4096": 0.70,
    "attention_latent_decode batch_size=128 step=2047": 0.95,
    "attention_prefill batch_size=1 isl=8192 step=0 num_heads=32": 0.90,
}


@pytest.mark.parametrize(("begin", "floor"), FLOORS.items())
def test_binaries_allow_as_much_as_they_did(begin, floor):
    operator = begin.partition(" ")[0]
    problem = next(each for each in problems_of(operator) if str(each).startswith(begin))
    bounds = bound_of(problem, load_hardware("h100-sxm-80gb"))
    assert min(bound.share for bound in bounds) >= floor
    assert all(bound.kernel.facts.spills == 0 for bound in bounds)

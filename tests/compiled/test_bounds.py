"""What binaries let kernels reach at most: loops by hand counts, and times on devices that were lent."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel.specs import load_hardware  # noqa: E402
from perfmodel_executors.compiled.bound import bound_of, loop_cycles, tile_order_share  # noqa: E402
from perfmodel_executors.compiled.loops import LoopFacts, loops_of  # noqa: E402
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


def test_products_of_tensor_memory_have_the_shape_of_their_descriptor():
    """128 rows (8 from bit 24 on) by 256 columns (32 from bit 17 on), 32 bytes deep: 16 elements of two bytes, 32 of
    one. The constant is known before the loop begins."""
    descriptor = 8 << 24 | 32 << 17 | 0x490
    product = "UTCHMMA gdesc[UR14], gdesc[UR12], tmem[UR7], tmem[UR38], idesc[UR39], !UPT"
    text = LISTING.replace("S2R R0, SR_TID.X", f"UMOV UR39, {descriptor:#x}")
    text = text.replace("HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, !UPT", product)
    text = text.replace("HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR4], R24", product)
    (loop,) = loops_of(text)
    assert (loop.rate, loop.flops) == ("bf16", 2 * 2 * 128 * 256 * 16)
    assert loop.shared_bytes == 2 * (128 + 256) * 32 + 32 * 16
    assert loop.is_of_block
    (loop,) = loops_of(text.replace("UTCHMMA", "UTCQMMA"))
    assert (loop.rate, loop.flops) == ("fp8", 2 * 2 * 128 * 256 * 32)


def bounds_on_an_h100(begin):
    return bounds_on("h100-sxm-80gb", begin)


def bounds_on(device, begin):
    problem = next(problem for problem in problems_of(begin.partition(" ")[0]) if str(problem).startswith(begin))
    return bound_of(problem, load_hardware(device))


@pytest.mark.parametrize(
    ("at_once", "share"),
    [
        (128, (8 * 128 + 16 * 256) / (8 * 16 * (128 + 256))),  # 8 rows by 16 columns
        (16, (8 * 128 + 2 * 256) / (8 * 2 * (128 + 256))),
        (1 << 20, (8 * 128 + 56 * 256) / (8 * 56 * (128 + 256))),  # no more columns than there are
    ],
)
def test_of_tiles_at_once_each_row_and_column_comes_from_hbm_once(at_once, share):
    launch = SimpleNamespace(constants={"BLOCK_M": 128, "BLOCK_N": 256})
    problem = SimpleNamespace(sizes={"m": 4096, "n": 56 * 256, "k": 4096})
    assert tile_order_share(SimpleNamespace(launch=launch), problem, at_once) == pytest.approx(share, rel=1e-12)


def test_the_order_of_tiles_fetches_no_more_than_a_third_beyond_the_best_one():
    """Of an H100's 132 tiles at once, by groups of 8 rows, beside groups of any number."""
    launch = SimpleNamespace(constants={"BLOCK_M": 128, "BLOCK_N": 128})
    problem = SimpleNamespace(sizes={"m": 8192, "n": 14336, "k": 4096})
    best = min((rows + 132 / rows) / (132 * 2) for rows in range(1, 65))
    assert tile_order_share(SimpleNamespace(launch=launch), problem, 132) <= 1.3 * best


def test_a_kernel_without_products_takes_what_its_tensors_take():
    """Greedy choice of 256 rows of 128,256 logits in fp32 reads them once, and little else; sampling by top-k and top-p
    reads them ten times: the largest, four digits for each of the two, and the kept ones. They are more than the L2."""
    row_bytes, bandwidth = 256 * 128256 * 4, 3.352e12
    greedy = bounds_on_an_h100("greedy samples=256 vocab=128256")
    assert sum(bound.seconds for bound in greedy) == pytest.approx(row_bytes / bandwidth, rel=0.01)
    assert greedy[0].share == pytest.approx(1, rel=0.01)
    drawn = bounds_on_an_h100("sample_top_k_top_p samples=256 vocab=128256")
    assert sum(bound.seconds for bound in drawn) == pytest.approx(10 * row_bytes / bandwidth, rel=0.02)
    assert all(bound.kernel.facts.spills == 0 for bound in drawn)


@pytest.mark.parametrize(
    ("begin", "unit", "seconds"),
    [
        # 32 x 56 tiles of 128 x 256: 384 rows of 4,096 elements of 2 bytes for a tile, 5,120 bytes a clock of 1.83 GHz
        ("linear m=4096 n=14336 k=4096", "L2", 32 * 56 * 384 * 4096 * 2 / (5120 * 1.83e9)),
        # 4 x 24 tiles on 132 SMs, at 989 TFLOP/s of all of them
        ("linear m=512 n=6144 k=4096", "tiles left over", 2 * 512 * 6144 * 4096 / 989e12 * 132 / 96),
    ],
)
def test_a_product_takes_as_long_as_by_hand(begin, unit, seconds):
    (bound,) = bounds_on_an_h100(begin)
    assert (bound.unit, bound.seconds) == (unit, pytest.approx(seconds, rel=1e-9))


@pytest.mark.parametrize(("leaves_products", "chain"), [(True, 512), (False, 512 + 256)])
def test_cycles_of_a_loop_are_those_by_hand(leaves_products, chain):
    """A block of eight warps on an H100. An SM has 4,096 FLOPs a clock, four schedulers, 64 lanes for conversions,
    16 for exponentials and 128 bytes of shared memory: a warp's share of 64 x 256 x 64 takes 128 of those clocks."""
    loop = LoopFacts("bf16", 2 * 64 * 256 * 64 / 4, 200, 40, 32, 8192, leaves_products, True)
    launch = SimpleNamespace(kernel=SimpleNamespace(is_gluon=lambda: False), options=SimpleNamespace(num_warps=8))
    kernel = SimpleNamespace(launch=launch, occupancy=SimpleNamespace(blocks=1), facts=SimpleNamespace(loops=(loop,)))
    wanted = {
        "products": 8 * 128,
        "issue slots": 8 * 200 / 4,
        "half-rate units": 8 * 40 / 4 * 2,
        "special functions": 8 * 32 * 32 / 16,
        "shared memory": 8 * 8192 / 128,
        "chain": chain,
    }
    assert loop_cycles(kernel, loop, load_hardware("h100-sxm-80gb")) == pytest.approx(wanted, rel=1e-3)


# (operator, how its problem begins), where the first candidate was the fastest: what ran is what is bounded.
TIMED = [
    ("linear", "linear m=4096 n=14336 k=4096"),
    ("linear_fp8", "linear_fp8 m=4096 n=14336 k=4096"),
    ("linear_w8a8", "linear_w8a8 m=4096 n=14336 k=4096"),
    ("linear_fp8_block", "linear_fp8_block m=4096 n=14336 k=4096"),
    ("attention_prefill", "attention_prefill batch_size=1 isl=8192 step=0 num_heads=32"),
    ("attention_decode", "attention_decode batch_size=64 step=4095 num_heads=32"),
    ("attention_latent_decode", "attention_latent_decode batch_size=128 step=2047"),
    ("linear_w8a16", "linear_w8a16 m=64 n=14336 k=4096"),
    ("sample_top_k_top_p", "sample_top_k_top_p samples=256 vocab=128256"),
    ("rms_norm", "rms_norm"),
]


@pytest.mark.parametrize(("operator", "begin"), TIMED)
def test_no_kernel_was_faster_than_its_bound(operator, begin):
    """On the H100 that was lent: within 2 %, by which the clock may exceed the one of the declared peak."""
    rows = json.loads((MEASURED / "h100-sxm-80gb" / "kernels.json").read_text(encoding="utf-8"))
    problem = next(problem for problem in problems_of(operator) if str(problem).startswith(begin))
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


# Of a B200, whose tensor cores multiply into a memory of their own; what its L2 gives is not known, and not counted.
FLOORS_OF_BLACKWELL = {
    "linear m=4096 n=14336 k=4096": 0.90,
    "linear_fp8 m=4096 n=14336 k=4096": 0.90,
    "linear_fp8_block m=4096 n=14336 k=4096": 0.90,
    "attention_prefill batch_size=1 isl=8192 step=0 num_heads=32": 0.90,
    "attention_decode batch_size=64 step=4095 num_heads=32": 0.95,
    "attention_latent_decode batch_size=128 step=2047": 0.25,
}


@pytest.mark.parametrize(("begin", "floor"), FLOORS_OF_BLACKWELL.items())
def test_binaries_of_blackwell_allow_as_much_as_they_did(begin, floor):
    bounds = bounds_on("b200-sxm", begin)
    assert min(bound.share for bound in bounds) >= floor
    assert all(bound.kernel.facts.spills == 0 for bound in bounds)


@pytest.mark.parametrize(("begin", "floor"), FLOORS.items())
def test_binaries_allow_as_much_as_they_did(begin, floor):
    bounds = bounds_on_an_h100(begin)
    assert min(bound.share for bound in bounds) >= floor
    assert all(bound.kernel.facts.spills == 0 for bound in bounds)

"""What a tiled multiplication does with one tile: how finely k is split, what partial sums cost, what it loads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.gemm import _TILES, TiledGemmFit, TileStep, time_gemm
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm
from perfmodel.specs import load_hardware

BF16, INT4 = LinearFormat("bf16", 2.0, 2.0, 2.0), LinearFormat("bf16", 0.5, 2.0, 2.0, name="int4_wo")
# A thousandth of an A100's tensor rate: multiplying takes so long that every split that is offered is worth its pass.
SLOW = DeviceFacts.of(load_hardware("a100-sxm-80gb", ["hardware.peak_flops_per_s.bf16=312e9"]))
# No tile to fill, loads that hide behind products: what is left is the main loop, the partial sums and their pass.
SHARP = TiledGemmFit(compute_fraction=1, launch_s=3e-7, split_s=3e-7, tile_s=1e-8, knee=20, feed_edge=5)


def main_loop_s(k: float) -> float:
    """Seconds of a thread block that multiplies a tile of 16 x 64 over k, at the rate of one compute unit."""
    return 2 * 16 * 64 * k / (312e9 / 108)


@pytest.mark.parametrize(("k", "longest"), [(255, 256), (256, 128), (384, 128), (4096, 128), (8192, 256)])
def test_no_part_of_a_split_is_shorter_than_128(k: int, longest: int) -> None:
    """cuBLAS and CUTLASS split k for problems of a single tile, down to 128 of it and into 32 parts at most; the main
    loop takes steps of 32, and the longest part is what the product waits for."""
    time = time_gemm(gemm("x", 16, 64, k, BF16), SHARP, SLOW)
    assert time.compute_s == pytest.approx(main_loop_s(longest), rel=1e-2)


def test_tiles_are_made_of_whole_fragments_of_tensor_cores() -> None:
    """mma.sync multiplies 16 x 8 at a time (PTX ISA, m16n8k16); libraries double sides, so areas are powers of two."""
    for rows, columns in _TILES:
        assert (rows % 16, columns % 8) == (0, 0)
        assert rows * columns & (rows * columns - 1) == 0


@given(st.sampled_from([2, 4, 8, 16, 32]))
def test_partial_sums_are_fp32_whatever_is_multiplied(splits: int) -> None:
    """Each of s parts writes or reads M N sums of 4 bytes; accumulators of tensor cores are fp32."""
    time = time_gemm(gemm("x", 16, 64, 128 * splits, BF16), SHARP, SLOW)
    sums_s = time.duration_s - time.compute_s - SHARP.launch_s - SHARP.split_s
    assert sums_s == pytest.approx(splits * 16 * 64 * 4 / (SHARP.memory_fraction * SLOW.bandwidth), rel=1e-3)


@pytest.mark.parametrize("form", [BF16, INT4])
def test_a_tile_loads_its_rows_of_inputs_and_its_columns_of_weights(form: LinearFormat) -> None:
    """One tile of 256 x 16 and one of 16 x 256 multiply as much. Bound by its loads each takes as long as its bytes:
    2 a row, 2 or, of 4-bit weights, 1/2 a column."""

    def seconds(rows: int, columns: int) -> float:
        fit = TiledGemmFit(tile_rule=(TileStep(0, rows, columns),), tile_s=1e-8, feed_edge=300)
        return time_gemm(gemm("x", rows, columns, 4096, form), fit, SLOW).compute_s

    tall, wide = 256 * 2 + 16 * form.weight_bytes, 16 * 2 + 256 * form.weight_bytes
    assert seconds(256, 16) / seconds(16, 256) == pytest.approx(tall / wide, rel=1e-2)


@pytest.mark.parametrize(("n", "tiles"), [(64, 1), (65, 2), (128, 2), (129, 3)])
def test_a_partial_tile_takes_as_long_as_a_whole_one(n: int, tiles: int) -> None:
    """Tiles of 16 x 64, computed one after another by each unit."""
    fit = SHARP.model_copy(update={"tile_rule": (TileStep(0, 16, 64),), "wave_quantization": 1e-3})
    rows = 16 * 108 * 50  # so many that the last, partial wave is negligible
    time = time_gemm(gemm("x", rows, n, 4096, BF16), fit, SLOW)
    assert time.compute_s == pytest.approx(50 * tiles * main_loop_s(4096), rel=1e-2)

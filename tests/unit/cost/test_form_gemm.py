"""Laws of the tiled GEMM form: never faster than the declared peaks, monotone, scalar as arrays, quick."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.gemm import (
    GemmSizes,
    TiledGemmFit,
    TileStep,
    gemm_seconds,
    knee_of,
    tile_allowed,
    time_gemm,
    waves,
)
from perfmodel.cost.kernel_models.registry import time_work
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm
from perfmodel.ops.problem_sizes import GemmSize
from perfmodel.specs import load_hardware

DEVICES = [
    DeviceFacts.of(load_hardware(name)) for name in ("a100-sxm-80gb", "h100-sxm-80gb", "l40s", "b200-sxm", "mi300x")
]
SLOW = DeviceFacts.of(load_hardware("h100-sxm-80gb"))
FAST = DeviceFacts.of(load_hardware("h100-sxm-80gb", ["hardware.hbm.bandwidth=6.7e12"]))
FORMATS = [
    LinearFormat("bf16", 2.0, 2.0, 2.0),
    LinearFormat("fp8", 1.0, 1.0, 2.0, True),
    LinearFormat("bf16", 0.515625, 2.0, 2.0, name="int4_wo"),
    LinearFormat("int8", 1.0, 1.0, 2.0, True),
]
FITS = [
    TiledGemmFit(),
    TiledGemmFit(compute_fraction=1, memory_fraction=1, launch_s=3e-7, tile_s=1e-8, knee=20, feed_edge=5),
    TiledGemmFit(tile_rule=(TileStep(64, 64, 64), TileStep(128, 64, 128), TileStep(0, 128, 128)), wave_quantization=1),
]
SIZES = st.integers(1, 40000)


def seconds(m, n, k, form, fit, device):
    return time_gemm(gemm("x", m, n, k, form), fit, device).duration_s


@settings(max_examples=200, deadline=None)
@given(SIZES, SIZES, SIZES, st.sampled_from(FORMATS), st.sampled_from(FITS), st.sampled_from(DEVICES))
def test_no_prediction_beats_the_declared_peaks(m, n, k, form, fit, device):
    work = gemm("x", m, n, k, form)
    time = time_gemm(work, fit, device)
    assert time.duration_s >= work.flops / device.peak(work.rate) * (1 - 1e-9)
    assert time.duration_s >= work.hbm_bytes / device.bandwidth * (1 - 1e-9)
    assert 0 < time.compute_s <= time.duration_s
    assert 0 < time.memory_s <= time.duration_s


@settings(max_examples=100, deadline=None)
@given(SIZES, SIZES, st.integers(1, 16), st.integers(0, 2), st.sampled_from(FITS[:2]), st.sampled_from(DEVICES))
def test_more_of_any_size_is_never_faster(n, k, factor, axis, fit, device):
    """Where the library chooses: up to multiples of the largest tile, which split and tile differently."""
    small = [512, 256 * -(-n // 256), 128 * -(-k // 128)]
    large = [size * factor if i == axis else size for i, size in enumerate(small)]
    assert seconds(*large, FORMATS[0], fit, device) >= seconds(*small, FORMATS[0], fit, device) * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(SIZES, SIZES, SIZES, st.sampled_from(FORMATS), st.sampled_from(FITS), st.sampled_from(DEVICES))
def test_rows_within_a_tile_cost_only_their_bytes(m, n, k, form, fit, device):
    """One more row is never faster, unless a rule changes the tile."""
    if not fit.tile_rule:
        assert seconds(m + 1, n, k, form, fit, device) >= seconds(m, n, k, form, fit, device) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, SIZES, st.sampled_from(FORMATS), st.sampled_from(FITS))
def test_twice_the_bandwidth_is_never_slower(m, n, k, form, fit):
    before, after = (seconds(m, n, k, form, fit, each) for each in (SLOW, FAST))
    assert before / 2 < after <= before


def test_one_at_a_time_is_as_many_at_once():
    rng = np.random.default_rng(0)
    m, n, k = rng.integers(1, 20000, (3, 300)).astype(float)
    form, device = FORMATS[1], DEVICES[1]
    works = [gemm("x", *each, form) for each in zip(m, n, k, strict=True)]
    quantized = m * k * 3
    moved = np.array([work.hbm_bytes for work in works]) - quantized
    sizes = GemmSizes(GemmSize(m, n, k, 1.0, 1.0, quantized), moved, "fp8")
    for fit in FITS:
        parts = gemm_seconds(sizes, fit, device)
        single = [time_work(work, fit, device) for work in works]
        np.testing.assert_allclose(parts.duration, [time.duration_s for time in single], rtol=1e-12)
        np.testing.assert_allclose(parts.compute, [time.compute_s for time in single], rtol=1e-12)


@pytest.mark.parametrize("rows", [1, 300])
def test_a_kernel_that_quantizes_its_input_pays_for_the_bytes_and_for_each_row(rows):
    """3 M K bytes at half the bandwidth, and 66 ns of each row on one of the compute units."""
    fit, device = TiledGemmFit(quantize_fraction=0.5, quantize_row_s=66e-9), DEVICES[1]
    m, n, k, moved = (np.array([float(size)]) for size in (rows, 4096, 2048, 4096 * 2048))
    plain, quantizing = (
        gemm_seconds(GemmSizes(GemmSize(m, n, k, 1.0, 1.0, times * m * k), moved, "fp8"), fit, device).duration[0]
        for times in (0, 3)
    )
    added_s = 3 * rows * 2048 / (0.5 * device.bandwidth) + rows * 66e-9 / device.compute_units
    assert quantizing - plain == pytest.approx(added_s)


def test_the_eager_floor_is_for_eager_calls_only():
    fit = TiledGemmFit(eager_launch_s=2e-5, eager_floor_s=9e-5)
    work = gemm("x", 1, 4096, 4096, FORMATS[0])
    m, n, k, moved, quantized = (np.array([float(x)]) for x in (1, 4096, 4096, work.hbm_bytes, 0))
    sizes = GemmSizes(GemmSize(m, n, k, 2.0, 2.0, quantized), moved, "bf16")
    replayed = gemm_seconds(sizes, fit, DEVICES[1]).duration[0]
    assert gemm_seconds(sizes, fit, DEVICES[1], as_timed=True).duration[0] == 9e-5
    assert time_gemm(work, fit, DEVICES[1]).duration_s == replayed < 3e-5


@pytest.mark.parametrize(("share", "hit"), [(0.5, 1.0), (1.0, 1.0), (1.5, 0.5), (2.0, 0.0), (3.0, 0.0)])
def test_a_benchmark_finds_weights_in_l2_that_six_times_over_fit_it(share, hit):
    """Six copies take `share` of 70 % of L2; the row of input and that of output always fit. Serving finds none."""
    device, speedup = DEVICES[1], 3.0
    n = (share * 0.7 * device.l2_bytes / 6 / 2) ** 0.5
    weights, others = 2 * n * n, 2 * 2 * n
    m, k, moved, none = (np.array([x]) for x in (1.0, n, weights + others, 0.0))
    sizes = GemmSizes(GemmSize(m, k, k, 2.0, 2.0, none), moved, "bf16")
    cold, warm = TiledGemmFit(memory_fraction=0.5), TiledGemmFit(memory_fraction=0.5, cache_speedup=speedup)
    served, timed = gemm_seconds(sizes, warm, device), gemm_seconds(sizes, warm, device, as_timed=True)
    for part, other in zip(served, gemm_seconds(sizes, cold, device, as_timed=True), strict=True):
        assert part[0] == other[0]
    read = (1 - hit * (1 - 1 / speedup)) * weights + others / speedup
    assert timed.memory[0] == pytest.approx(read / (0.5 * device.bandwidth))
    assert served.duration[0] / speedup < timed.duration[0] < served.duration[0]


def test_operands_that_l2_cannot_hold_gain_nothing_from_it():
    """8192 rows of 8192: inputs and outputs are 268 MB, weights 134 MB, L2 is 52 MB."""
    m, moved, none = (np.array([x]) for x in (8192.0, 3 * 2 * 8192.0**2, 0.0))
    sizes = GemmSizes(GemmSize(m, m, m, 2.0, 2.0, none), moved, "bf16")
    timed = gemm_seconds(sizes, TiledGemmFit(cache_speedup=8.0), DEVICES[1], as_timed=True)
    assert timed.duration[0] == gemm_seconds(sizes, TiledGemmFit(), DEVICES[1]).duration[0]


def test_nothing_to_do_takes_no_time():
    assert time_work(gemm("x", 0, 4096, 4096, FORMATS[0]), FITS[0], DEVICES[0]).duration_s == 0


def test_a_decode_projection_by_hand():
    """1 x 4096 x 4096 in bf16 on an H100 reads 33.6 MB: 10.0 us at 3.35 TB/s, 12.2 us at 82 % of it."""
    time = time_gemm(gemm("x", 1, 4096, 4096, FORMATS[0]), TiledGemmFit(), DEVICES[1])
    assert time.bound == "memory"
    assert time.memory_s == pytest.approx((4096 * 4096 * 2 + 2 * 4096 * 2) / (0.82 * 3.35e12))
    assert time.memory_s + 2e-6 < time.duration_s < 2 * time.memory_s


def test_waves_lie_between_balance_and_whole_waves():
    blocks = np.array([0.2, 1.0, 1.2, 3.7])
    np.testing.assert_allclose(waves(blocks, 0.0), [1, 1, 1.2, 3.7])
    np.testing.assert_allclose(waves(blocks, 1.0), [1, 1, 2, 4])


def test_knee_and_rule():
    np.testing.assert_allclose(knee_of(np.array([3.0, 1.0]), np.array([4.0, 0.0]), 2.0), [5.0, 1.0])
    rule = (TileStep(64, 64, 64), TileStep(0, 128, 128))
    assert tile_allowed(rule, np.array([1.0, 64.0, 65.0])).tolist() == [[True, False], [True, False], [False, True]]


def test_a_small_tile_takes_the_latency_of_its_steps():
    """One block of 64 x 64 on an idle device: each of 8,192 elements of k waits for its loads, however small the tile;
    as long as products take longer, the latency hides behind them."""
    device, rule = DEVICES[0], (TileStep(0, 64, 64),)
    waiting, free = (TiledGemmFit(tile_rule=rule, step_latency_s=s, launch_s=3e-7, knee=20) for s in (5e-9, 1e-11))

    def alone(k, fit):
        return seconds(64, 64, k, FORMATS[0], fit, device)

    assert alone(16384, waiting) - alone(8192, waiting) == pytest.approx(8192 * 5e-9, rel=0.01)
    assert alone(8192, free) < 0.9 * alone(8192, waiting)
    wide, fast = (TiledGemmFit(tile_rule=(TileStep(0, 256, 128),), step_latency_s=s) for s in (1e-10, 1e-11))
    assert seconds(4096, 4096, 4096, FORMATS[0], wide, device) == seconds(4096, 4096, 4096, FORMATS[0], fast, device)

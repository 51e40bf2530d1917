"""Products with weights in block formats against closed forms, and layers that lie with the host."""

from itertools import pairwise

import pytest

from perfmodel.cost.kernel_models.blocks import (
    BlockMatmulFit,
    BlockStreamFit,
    OnHostFit,
    block_matmul_time,
    block_stream_time,
    on_host_time,
    pieces,
)
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.ops.attention.decode import attention_decode
from perfmodel.ops.attention.prefill import Heads
from perfmodel.ops.elementwise import rms_norm
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm
from perfmodel.specs import load_hardware

DEVICE = DeviceFacts.of(load_hardware("rtx-4090"))
CPU = load_hardware("epyc-9654")
Q4_K = LinearFormat("fp16", 144 / 256, 2.0, 2.0, name="q4_k_wo")
SHARP = 60.0  # a knee that is nearly the maximum


def fit(**changed):
    base = {
        "rate": "int8",
        "launch_s": 5e-6,
        "memory_fraction": 0.8,
        "weight_cycles": 0.1,
        "vector_knee": SHARP,
        "compute_fraction": 0.5,
        "tile": 1e-9,
        "half_rows": 1e-9,
        "knee": SHARP,
    }
    return BlockMatmulFit(**(base | changed))


def seconds(tokens, of, device=DEVICE, n=4096, k=4096):
    return block_matmul_time(gemm("proj", tokens, n, k, Q4_K), of, device).duration_s


def test_one_token_reads_the_weights_at_the_share_of_the_bandwidth():
    """4096^2 weights of 4.5 bits, 8,192 bytes in and out each, over 0.8 of 1,008 GB/s, and the launch."""
    num_bytes = 4096 * 4096 * 144 / 256 + 2 * 4096 * 2
    expected = 5e-6 + num_bytes / (0.8 * 1.008e12)
    assert seconds(1, fit(weight_cycles=1e-6, compute_fraction=1e-9)) == pytest.approx(expected, rel=1e-6)


def test_units_bound_where_the_memory_is_fast():
    """4096^2 weights of half a clock each on 128 units of 2.52 GHz."""
    expected = 5e-6 + 4096 * 4096 * 0.5 / (128 * 2.52e9)
    assert seconds(1, fit(weight_cycles=0.5, compute_fraction=1e-9)) == pytest.approx(expected, rel=1e-6)


def test_a_row_more_costs_its_share():
    once, twice = (seconds(rows, fit(weight_cycles=5.0, row_share=0.3, compute_fraction=1e-5)) for rows in (1, 2))
    assert (twice - 5e-6) / (once - 5e-6) == pytest.approx(1.3, rel=1e-6)


def test_many_rows_run_at_the_share_of_the_peak():
    """2 x 512 x 4096^2 operations at half of 660.6e12 a second."""
    expected = 5e-6 + 2 * 512 * 4096**2 / (0.5 * 660.6e12)
    assert seconds(512, fit(weight_cycles=100.0)) == pytest.approx(expected, rel=1e-4)


def test_half_filled_tiles_take_twice():
    full, half = (seconds(512, fit(weight_cycles=100.0, half_rows=rows)) for rows in (1e-9, 512.0))
    assert (half - 5e-6) / (full - 5e-6) == pytest.approx(2.0, rel=1e-4)


def test_pieces_add_up():
    """A step of 1,280 tokens is two pieces of 512 and one of 256, each with the weights and a launch of its own."""
    assert pieces(1280.0, 512) == [(2, 512.0), (1, 256.0)]
    whole = fit(micro_batch=512)
    assert seconds(1280, whole) == pytest.approx(2 * seconds(512, fit()) + seconds(256, fit()), rel=1e-9)


def test_more_tokens_never_take_less():
    of = fit(tile=2000.0, half_rows=12.0, micro_batch=512, knee=1.5, vector_knee=3.0)
    times = [seconds(tokens, of) for tokens in range(1, 1500, 7)]
    assert all(later >= sooner * (1 - 1e-12) for sooner, later in pairwise(times))


def test_what_passes_once_costs_its_bytes():
    of = BlockStreamFit(launch_s=4e-6, memory_fraction=0.5)
    work = rms_norm("norm", 1, 4096, 2.0)
    expected = 4e-6 + (work.weight_bytes + work.activation_bytes) / (0.5 * 1.008e12) + work.flops / 82.6e12
    assert block_stream_time(work, of, DEVICE).duration_s == pytest.approx(expected, rel=1e-9)


def test_cached_tokens_have_a_bandwidth_of_their_own():
    heads = Heads(32, 8, 128, 128, "fp16", 2.0, 2.0)
    near, far = (
        block_stream_time(
            attention_decode(1, context, heads),
            BlockStreamFit(launch_s=0.0, memory_fraction=1.0, kv_fraction=0.25),
            DEVICE,
        ).memory_s
        for context in (1000, 3000)
    )
    assert far - near == pytest.approx(2000 * 8 * 256 * 2 / (0.25 * 1.008e12), rel=1e-6)


ON_HOST = OnHostFit(
    host=CPU,
    on_cpu=fit(rate="fp32"),
    on_device=fit(micro_batch=512),
    link_bytes_per_s=25e9,
    from_tokens=32,
)


def test_the_host_computes_small_steps():
    work = gemm("proj", 31, 4096, 4096, Q4_K)
    alone = block_matmul_time(work, ON_HOST.on_cpu, DeviceFacts.of(CPU))
    assert on_host_time(work, ON_HOST, DEVICE) == alone


def test_large_steps_bring_the_weights_to_the_device_once_a_piece():
    """1,024 tokens are two pieces of 512: 2 x 4096^2 x 4.5 / 8 bytes over 25 GB/s beside the device's own time."""
    work = gemm("proj", 1024, 4096, 4096, Q4_K)
    there = block_matmul_time(work, ON_HOST.on_device, DEVICE)
    copied = 2 * 4096 * 4096 * 144 / 256 / 25e9
    assert on_host_time(work, ON_HOST, DEVICE).duration_s == pytest.approx(there.duration_s + copied, rel=1e-9)

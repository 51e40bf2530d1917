"""Attention forms: no prediction beats the declared peaks, more work never takes less time, floats equal arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import Calibration, OperatorTimer
from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.attention.decode import (
    DecodeKernel,
    DecodeSizes,
    FlashDecodeFit,
    decode_seconds,
    decode_time,
)
from perfmodel.cost.kernel_models.attention.mixed import MixedAttentionFit, MixedSizes, mixed_seconds
from perfmodel.cost.kernel_models.attention.prefill import (
    FlashPrefillFit,
    PrefillKernel,
    PrefillSizes,
    prefill_seconds,
    prefill_time,
)
from perfmodel.cost.kernel_models.fits import Domain
from perfmodel.ops.attention.decode import attention_decode
from perfmodel.ops.attention.prefill import Heads, flash_prefill
from perfmodel.ops.problem_sizes import DecodeSize, HeadShape
from perfmodel.specs.scenario_file import load_hardware

DEVICES = [DeviceFacts.of(load_hardware(name)) for name in ("a100-sxm-80gb", "h200-sxm", "rtx-4090", "l4", "b200-sxm")]
# Everything as good as it may be: what is fastest here is fastest under any fit.
BEST_PREFILL = FlashPrefillFit(
    launch_s=1e-6, tensor_fraction=1.0, memory_fraction=1.0, block_tokens=0.01, tail=0.01, kv_weight=0.05
)
BEST_DECODE = FlashDecodeFit(
    launch_s=1e-6,
    memory_fraction=1.0,
    tensor_fraction=1.0,
    block_s=1e-8,
    block_bandwidth=10.0,
    knee=20.0,
    doubling_s=1e-9,
    group_traffic=1e-5,
)


@st.composite
def heads_of(draw):
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8, 32]))
    group = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 64, 128]))
    size = draw(st.sampled_from([64, 80, 128, 192, 256]))
    window = draw(st.sampled_from([None, None, 128, 1024]))
    kv_bytes = draw(st.sampled_from([1, 2]))
    return Heads(group * kv_heads, kv_heads, size, size, "bf16", 2, kv_bytes, window)


prompts = st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 20000)), min_size=1, max_size=5)
prefill_kernels = st.builds(
    PrefillKernel,
    rows=st.sampled_from([64, 128, 192]),
    keys=st.sampled_from([32, 64, 128, 256]),
    packs=st.sampled_from(["never", "single", "worthwhile"]),
)
decode_kernels = st.builds(
    DecodeKernel,
    heads_per_block=st.sampled_from([1, 16, 64]),
    whole_splits=st.booleans(),
    splits_mha=st.booleans(),
    splits_window=st.booleans(),
    pays_splits=st.booleans(),
)
devices = st.sampled_from(DEVICES)


@given(prompts, heads_of(), prefill_kernels, devices)
def test_prompts_never_beat_the_declared_peaks(prefills, heads, kernel, device):
    work = flash_prefill(prefills, heads)
    fit = BEST_PREFILL.model_copy(update={"kernel": kernel})
    least = max(work.flops / device.peak("bf16"), work.hbm_bytes / device.bandwidth)
    assert prefill_time(work, fit, device).duration_s >= 0.999 * least


@given(st.integers(1, 2048), st.integers(1, 100_000), heads_of(), decode_kernels, devices)
def test_decodes_never_beat_the_declared_peaks(seqs, length, heads, kernel, device):
    context = seqs * min(length, heads.window or length)
    work = attention_decode(seqs, context, heads)
    fit = BEST_DECODE.model_copy(update={"kernel": kernel})
    least = max(work.flops / device.peak("bf16"), work.hbm_bytes / device.bandwidth)
    assert decode_time(work, fit, device).duration_s >= 0.999 * least


@given(st.integers(1, 8000), st.integers(0, 20000), st.integers(1, 5000), heads_of(), prefill_kernels, devices)
def test_more_cached_tokens_never_make_a_prompt_faster(tokens, cached, more, heads, kernel, device):
    """Up to a key tile: the last tile's overhang is counted in full."""
    fit = FlashPrefillFit(kernel=kernel)
    short = prefill_time(flash_prefill([(tokens, cached)], heads), fit, device).duration_s
    long = prefill_time(flash_prefill([(tokens, cached + more + kernel.keys)], heads), fit, device).duration_s
    assert long >= 0.95 * short


@given(st.integers(1, 512), st.integers(1, 50_000), st.integers(1, 20_000), heads_of(), devices)
def test_longer_contexts_never_decode_faster(seqs, length, more, heads, device):
    """Persistent kernels, which balance their splits; whole splits may lose a little where one more is made."""
    span = heads.window or 10**9
    times = [
        decode_time(attention_decode(seqs, seqs * min(n, span), heads), FlashDecodeFit(), device).duration_s
        for n in (length, length + more)
    ]
    assert times[1] >= times[0] * (1 - 1e-9)


@given(st.integers(100, 4000), st.integers(2, 6), prefill_kernels, devices)
def test_chunks_cost_more_than_the_whole_prompt_but_not_much_more_work(chunk, count, kernel, device):
    """Each chunk pays its launch and reads the cache again; the products are those of the whole, but for tiles."""
    heads = Heads(32, 8, 128, 128, "bf16", 2, 2)
    fit = FlashPrefillFit(kernel=kernel)
    whole = prefill_time(flash_prefill([(count * chunk, 0)], heads), fit, device)
    parts = [prefill_time(flash_prefill([(chunk, i * chunk)], heads), fit, device) for i in range(count)]
    assert sum(part.duration_s for part in parts) > 0.98 * whole.duration_s
    assert sum(part.compute_s for part in parts) < 3 * whole.compute_s + 2e-4 * count


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=6), prefill_kernels, devices)
def test_prompts_in_one_kernel_share_its_launch(lengths, kernel, device):
    heads = Heads(16, 4, 128, 128, "bf16", 2, 2)
    fit = FlashPrefillFit(kernel=kernel)
    together = prefill_time(flash_prefill([(n, 0) for n in lengths], heads), fit, device).duration_s
    apart = [prefill_time(flash_prefill([(n, 0)], heads), fit, device).duration_s for n in lengths]
    assert together <= sum(apart) * (1 + 1e-9)
    assert together >= max(apart) * 0.9  # a batch may be packed where its longest prompt alone is not


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 64), heads_of(), prefill_kernels, devices)
def test_prompts_on_floats_equal_arrays(tokens, cached, count, heads, kernel, device):
    fit = FlashPrefillFit(kernel=kernel)
    work = flash_prefill([(tokens, cached)] * count, heads)
    problem = work.problem
    sizes = PrefillSizes(
        HeadShape(*(np.full(2, float(number)) for number in problem.heads)),
        tokens=np.array([tokens, tokens], dtype=float),
        cached=np.array([cached, cached], dtype=float),
        count=np.array([count, count], dtype=float),
        io_bytes=np.full(2, work.activation_bytes / problem.tokens),
        kv_bytes=np.full(2, work.kv_bytes / problem.kv_tokens),
    )
    many = prefill_seconds(sizes, fit, device).duration
    assert many == pytest.approx([prefill_time(work, fit, device).duration_s] * 2)


@given(st.integers(1, 1024), st.integers(1, 50_000), decode_kernels, devices)
def test_decodes_on_floats_equal_arrays(seqs, length, kernel, device):
    heads = Heads(32, 8, 128, 128, "bf16", 2, 2)
    fit = FlashDecodeFit(kernel=kernel, swap_s=3e-6)
    work = attention_decode(seqs, seqs * length, heads)
    sizes = DecodeSizes(
        DecodeSize(
            HeadShape(np.full(2, 32.0), np.full(2, 8.0), np.full(2, 128.0), np.full(2, 128.0), 2.0, np.zeros(2)),
            num_seqs=np.array([seqs, seqs], dtype=float),
            kv_tokens=np.full(2, float(seqs * length)),
        ),
        length=np.full(2, float(length)),
        kv_token_bytes=np.full(2, 8 * 256 * 2.0),
        io_bytes=np.full(2, work.activation_bytes + 2 * seqs * 8 * 256 * 2.0),
        flops_per_token=np.full(2, 4 * 128.0),
    )
    many = decode_seconds(sizes, fit, device).duration
    assert many == pytest.approx([decode_time(work, fit, device).duration_s] * 2)


def _prompt(length, heads=32.0, is_causal=True):
    one = np.ones(1)
    shape = HeadShape(heads * one, 8.0 * one, 128.0 * one, 128.0 * one, 2.0, 0.0 * one)
    return PrefillSizes(shape, length * one, 0 * one, one, 2 * 2 * 128 * heads * one, 4096.0 * one, is_causal)


def test_twice_the_exponentials_per_clock_halve_the_softmax_and_nothing_else():
    """A device with 32 of them takes as long as one with 16 where a score needs half as many."""
    single = DEVICES[4]
    double = DeviceFacts.of(load_hardware("b200-sxm", ["hardware.exponentials_per_clock=32"]))
    assert (single.exponentials, double.exponentials) == (1.0, 2.0)
    for length in (200.0, 9000.0):
        whole, half = (FlashPrefillFit(softmax_ops=ops) for ops in (20.0, 10.0))
        assert prefill_seconds(_prompt(length), whole, double) == prefill_seconds(_prompt(length), half, single)
        slower = prefill_seconds(_prompt(length), whole, single)
        assert prefill_seconds(_prompt(length), whole, double).duration[0] < slower.duration[0]


def test_without_a_causal_mask_each_token_sees_all_keys():
    """16,384 tokens make 16384**2 pairs, and with a mask half of them; tiles of 64 by 64 overhang by half a per cent.
    One tile is visited whole either way."""
    fit = BEST_PREFILL.model_copy(update={"kernel": PrefillKernel(rows=64, keys=64, packs="never")})
    device = DEVICES[1]
    for length, times in ((64.0, 1.0), (16384.0, 2.0)):
        masked, full = (
            float(prefill_seconds(_prompt(length, is_causal=way), fit, device).compute[0]) for way in (True, False)
        )
        assert full == pytest.approx(times * masked, rel=0.01)
    flops = 4 * 128 * 32 * 16384.0**2
    assert full == pytest.approx(flops / device.peak("bf16"), rel=0.01)


def test_flashattention_2_reads_a_window_once_for_each_query_head():
    """It swaps the query heads of a group into rows of a tile, but not under a sliding window (flash_api.cpp,
    seqlenq_ngroups_swapped): 32 query heads of 8 KV heads read four times the bytes, with as many blocks."""
    one = np.ones(1)

    def memory(window, unpacks):
        heads = HeadShape(32 * one, 8 * one, 128 * one, 128 * one, 2.0, window * one)
        sizes = DecodeSizes(DecodeSize(heads, 256 * one, 256 * 4096 * one), 4096 * one, 4096 * one, 0 * one, 512 * one)
        fit = BEST_DECODE.model_copy(update={"kernel": DecodeKernel(splits_mha=False, window_unpacks=unpacks)})
        return float(decode_seconds(sizes, fit, DEVICES[0]).memory[0])

    assert memory(1024, unpacks=True) == pytest.approx(4 * memory(1024, unpacks=False), rel=1e-4)
    assert memory(1024, unpacks=True) == pytest.approx(4 * 256 * 1024 * 4096 / DEVICES[0].bandwidth)
    assert memory(0, unpacks=True) == memory(0, unpacks=False)


def test_few_thread_blocks_do_not_fill_the_memory_system():
    """One sequence and one KV head, too short to be split, on 108 units: one block pulls 1/108 of the bandwidth."""
    device, heads = DEVICES[0], Heads(1, 1, 128, 128, "bf16", 2, 2)
    fit = FlashDecodeFit(kernel=DecodeKernel(split_tokens=1e9), memory_fraction=1.0, block_bandwidth=1.0, block_s=1e-8)
    work = attention_decode(1, 10_000, heads)
    assert decode_time(work, fit, device).memory_s == pytest.approx(108 * work.kv_bytes / device.bandwidth, rel=0.01)


def test_a_kernel_of_few_splits_gains_nothing_from_an_idle_device():
    """SGLang's Triton kernel splits a context eight ways at most: one head of one sequence fills 8 of 108 units, from
    8 x 256 tokens on as many for any length; without the limit it fills them all."""
    device, heads = DEVICES[0], Heads(1, 1, 128, 128, "bf16", 2, 2)
    work = attention_decode(1, 131_072, heads)

    def memory(most):
        kernel = DecodeKernel(most_splits=most)
        fit = FlashDecodeFit(kernel=kernel, memory_fraction=1.0, block_bandwidth=1.0)
        return decode_time(work, fit, device).memory_s * device.bandwidth / work.kv_bytes

    assert memory(8) == pytest.approx(108 / 8, rel=0.01)
    assert memory(None) == pytest.approx(1.0, rel=0.01)


def test_a_kernel_that_skips_no_tiles_takes_as_long_with_a_window_as_without():
    """It masks keys outside the window; one that skips them visits 128 + 128 keys of 16,384 for a tile of 128 rows."""
    device, one = DEVICES[0], np.ones(1)

    def compute(window, overlap):
        heads = HeadShape(64 * one, 8 * one, 192 * one, 192 * one, 2.0, window * one)
        sizes = PrefillSizes(heads, 16384 * one, 0 * one, one, 64 * 192 * 4 * one, 8 * 192 * 4 * one)
        fit = FlashPrefillFit(kernel=PrefillKernel(packs="never", window_overlap=overlap))
        return float(prefill_seconds(sizes, fit, device).compute[0])

    assert compute(128, 1e9) == pytest.approx(compute(0, 0), rel=1e-6)
    assert compute(0, 0) > 20 * compute(128, 0)


def _unsplit(seqs, length, heads, fit=BEST_DECODE, device=DEVICES[0]):
    return decode_time(attention_decode(seqs, seqs * length, heads, splits_kv=False), fit, device).duration_s


@given(st.integers(1, 300), st.integers(1, 9000), st.integers(0, 3000), heads_of(), st.sampled_from(DEVICES))
def test_decodes_without_splits_obey_the_peaks_and_grow_with_the_context(seqs, length, more, heads, device):
    work = attention_decode(seqs, seqs * length, heads, splits_kv=False)
    duration = _unsplit(seqs, length, heads, device=device)
    assert duration >= (work.kv_bytes + work.activation_bytes) / device.bandwidth
    assert duration >= work.flops / device.peak("bf16")
    assert _unsplit(seqs, length + more, heads, device=device) >= duration * (1 - 1e-9)


def test_without_splits_a_block_takes_its_whole_context_whatever_else_is_idle():
    """108 compute units, 16 query heads: up to 6 sequences 96 blocks run at once, each as long as it would alone, and
    a seventh makes some unit take two. Twice the context, twice the time.
    """
    heads = Heads(16, 2, 128, 128, "bf16", 2, 2)
    one = _unsplit(1, 65536, heads)
    assert _unsplit(6, 65536, heads) == pytest.approx(one, rel=0.05)
    assert _unsplit(7, 65536, heads) == pytest.approx(2 * one, rel=0.05)
    assert _unsplit(1, 131072, heads) == pytest.approx(2 * one, rel=0.05)


def test_without_splits_the_heads_of_a_group_share_no_tile():
    """FlashAttention-2.0 takes as long for 2 KV heads of 16 query heads as for 16, where memory does not bind."""
    grouped, plain = Heads(16, 2, 128, 128, "bf16", 2, 2), Heads(16, 16, 128, 128, "bf16", 2, 2)
    assert _unsplit(1, 65536, grouped) == pytest.approx(_unsplit(1, 65536, plain), rel=0.05)


def test_a_repeated_benchmark_finds_small_kv_in_cache():
    device = DEVICES[0]
    sizes = DecodeSizes(DecodeSize(HeadShape(32.0, 8.0, 128.0, 128.0, 2.0), 8.0, 8000.0), 1000.0, 4096.0, 1e5, 512.0)
    fit = FlashDecodeFit(cache_speedup=2.0, knee=1.0)
    cold = float(decode_seconds(sizes, fit, device).duration)
    assert float(decode_seconds(sizes, fit, device, is_warm=True).duration) < cold


@given(st.integers(2, 2000), st.integers(0, 5000), st.integers(0, 128), st.integers(1, 8000), devices)
def test_a_mixed_batch_takes_no_less_than_its_prompt(tokens, cached, decodes, length, device):
    fit, heads = MixedAttentionFit(), HeadShape(32.0, 8.0, 128.0, 128.0, 2.0)

    def seconds(num):
        sizes = MixedSizes(heads, float(tokens), float(cached), float(num), float(length), 4096.0, 1.0)
        return float(mixed_seconds(sizes, fit, device).duration)

    assert seconds(decodes) >= seconds(0) * (1 - 1e-12)
    assert seconds(decodes + 1) >= seconds(decodes) * (1 - 1e-12)


def test_the_fit_of_the_nearest_kernel_is_chosen():
    """By group and KV format first, by head size then; other formats fall back to wider ones."""
    keys = {
        "attention_decode/bf16/kv_bf16/hd128/xqa": FlashDecodeFit(
            launch_s=1e-6, domain=Domain(head_dim=128, kv_element_bytes=2, groups=((2, 32),))
        ),
        "attention_decode/bf16/kv_bf16/hd128/mmha": FlashDecodeFit(
            launch_s=2e-6, domain=Domain(head_dim=128, kv_element_bytes=2, groups=((1, 1), (33, 4096)))
        ),
        "attention_decode/bf16/kv_bf16/hd64/xqa": FlashDecodeFit(
            launch_s=3e-6, domain=Domain(head_dim=64, kv_element_bytes=2, groups=((2, 32),))
        ),
        "attention_decode/bf16/kv_fp8/hd128/xqa": FlashDecodeFit(
            launch_s=4e-6, domain=Domain(head_dim=128, kv_element_bytes=1, groups=((2, 32),))
        ),
    }
    calibration = Calibration(device="any", engine="any", families=keys)

    def launch(num_heads, kv_heads, size, kv_bytes, rate="bf16"):
        work = attention_decode(4, 4000, Heads(num_heads, kv_heads, size, size, rate, 2, kv_bytes))
        return calibration.fit(work.family, work.rate, work.problem.traits).launch_s

    assert launch(32, 8, 128, 2) == 1e-6
    assert launch(32, 32, 128, 2) == 2e-6
    assert launch(64, 1, 128, 2) == 2e-6
    assert launch(32, 8, 80, 2) == 3e-6
    assert launch(32, 8, 256, 2) == 1e-6
    assert launch(32, 8, 128, 1) == 4e-6
    assert launch(32, 8, 128, 2, rate="fp16") == 1e-6


def test_the_timer_runs_the_forms():
    """A pipeline's microbatch has half the work of its prompts: half the products and bytes, the whole launch."""
    from dataclasses import replace

    families = {"attention_prefill/bf16": FlashPrefillFit(), "attention_decode/bf16": FlashDecodeFit()}
    timer = OperatorTimer(DEVICES[0].hardware, Calibration(device="a100", engine="test", families=families))
    heads = Heads(32, 8, 128, 128, "bf16", 2, 2)
    work = flash_prefill([(2048, 0), (100, 5000)], heads)
    whole = timer.time(work)
    assert whole.bound == "compute"
    half = timer.time(
        replace(work, flops=work.flops / 2, activation_bytes=work.activation_bytes / 2, kv_bytes=work.kv_bytes / 2)
    )
    assert half.compute_s == pytest.approx(whole.compute_s / 2)
    assert whole.duration_s / 2 < half.duration_s < whole.duration_s
    assert timer.time(attention_decode(64, 64 * 4000, heads)).bound == "memory"
    assert timer.time(flash_prefill([], heads)).duration_s == 0
    assert timer.time(attention_decode(0, 0, heads)).duration_s == 0

"""Attention kernels by hand: tile padding, sliding windows, and the tail of unequal parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.attention.decode import (
    DecodeKernel,
    DecodeSizes,
    FlashDecodeFit,
    _overshoot,
    _tokens_of_slowest,
    decode_seconds,
    decode_time,
)
from perfmodel.cost.kernel_models.attention.mixed import MixedAttentionFit, mixed_time
from perfmodel.cost.kernel_models.attention.prefill import FlashPrefillFit, PrefillKernel, prefill_time
from perfmodel.cost.kernel_models.blocks import BlockStreamFit, block_stream_time
from perfmodel.ops.attention.decode import attention_decode, mixed_attention
from perfmodel.ops.attention.prefill import Heads, flash_prefill
from perfmodel.ops.problem_sizes import DecodeSize, HeadShape
from perfmodel.specs.scenario_file import load_hardware

A100 = DeviceFacts.of(load_hardware("a100-sxm-80gb"))
PEAK, UNITS = 312e12, 108


def heads(num_heads: int, kv_heads: int = 8, window: int | None = None) -> Heads:
    return Heads(num_heads, kv_heads, 128, 128, "bf16", 2, 2, window)


def decode(group: float, length: float, kernel: DecodeKernel, window: float = 0.0, seqs: float = 256.0):
    """Of 256 sequences and 8 KV heads: enough blocks to fill the device."""
    problem = DecodeSize(HeadShape(8 * group, 8.0, 128.0, 128.0, 2.0, window), seqs, seqs * length)
    sizes = DecodeSizes(problem, length, 8 * 256 * 2.0, 0.0, 2 * 256.0)
    fit = FlashDecodeFit(kernel=kernel, tensor_fraction=1.0, memory_fraction=1.0, group_traffic=1e-5)
    return decode_seconds(sizes, fit, A100)


@pytest.mark.parametrize(("group", "rows"), [(1, 16), (5, 16), (16, 16), (17, 32), (33, 48)])
def test_the_query_heads_of_a_group_are_padded_to_whole_tile_rows(group: int, rows: int) -> None:
    """2 (128 + 128) FLOPs per row and key, 4,000 keys."""
    time = decode(group, 4000.0, DecodeKernel(rows=16))
    assert float(time.compute) == pytest.approx(256 * 4000 * rows * 8 * 512 / PEAK)


@pytest.mark.parametrize("length", [500.0, 1000.0, 1024.0, 9000.0])
def test_a_decode_reads_its_window_and_the_overlap_of_the_first_tile(length: float) -> None:
    kernel = DecodeKernel(rows=16, window_overlap=24.0)
    time = decode(4, length, kernel, window=1000.0)
    read = min(length, 1024.0)
    assert float(time.memory) == pytest.approx(256 * read * 8 * 512 / A100.bandwidth, rel=1e-4)
    assert float(time.compute) == pytest.approx(256 * read * 16 * 8 * 512 / PEAK)


def test_a_decode_writes_and_reads_its_new_keys_and_values() -> None:
    """100 sequences of 1,000 tokens: queries and outputs once, 4,096 bytes of new keys and values twice."""
    work = attention_decode(100, 100_000, heads(32))
    fit = FlashDecodeFit(kernel=DecodeKernel(rows=16), memory_fraction=1.0, group_traffic=1e-5)
    num_bytes = 100_000 * 4096 + 100 * (2 * 32 * 128 * 2 + 2 * 4096)
    assert decode_time(work, fit, A100).memory_s == pytest.approx(num_bytes / A100.bandwidth, rel=1e-4)


@given(st.floats(0.01, 3.0), st.floats(0.1, 2.0), st.floats(0.05, 1.0))
def test_mean_overshoot_of_a_block_with_a_random_start(alone: float, together: float, waiting: float) -> None:
    """The mean of max(0, begin + alone - together) for begins between 0 and waiting x together."""
    begins = (np.arange(20_000) + 0.5) / 20_000 * waiting * together
    mean = np.maximum(begins + alone - together, 0.0).mean()
    assert _overshoot(alone, together, waiting) == pytest.approx(mean, rel=1e-3, abs=1e-5)


def test_the_slowest_unit_has_its_longest_part_less_the_progress_of_the_others() -> None:
    """With many parts per unit, a unit is on average half through an equal part. With parts of 100 and 300 tokens,
    met in proportion to their length, (100^2 + 300^2) / 2 / 400 = 125 tokens are left. With one part per unit, the
    longest decides."""
    assert _tokens_of_slowest([100.0] * 4, 1e9, 1000, 1e4, UNITS) == 1e4 + 100 - 50
    assert _tokens_of_slowest([100.0, 300.0], 1e9, 1000, 1e4, UNITS) == 1e4 + 300 - 125
    assert _tokens_of_slowest([100.0, 300.0], 150.0, 1000, 1e4, UNITS) == 1e4 + 150 - (100**2 + 2 * 150**2) / 800
    assert _tokens_of_slowest([100.0, 300.0], 1e9, UNITS, 1e4, UNITS) == 300


@pytest.mark.parametrize("packs", ["single", "worthwhile"])
def test_heads_packed_into_a_tile_take_as_long_as_one(packs: str) -> None:
    """One token with 16 heads per group: one tile of 128 rows holds all 16; without packing they take 16 tiles."""
    fit = FlashPrefillFit(kernel=PrefillKernel(rows=128, keys=128, packs=packs), tail=0.01, block_tokens=0.01)  # type: ignore[arg-type]
    prompts = [(1, 8191)] * 50

    alone, packed = (prefill_time(flash_prefill(prompts, heads(n)), fit, A100).compute_s for n in (8, 128))
    never = fit.model_copy(update={"kernel": PrefillKernel(rows=128, keys=128, packs="never")})
    unpacked = prefill_time(flash_prefill(prompts, heads(128)), never, A100).compute_s
    assert packed == pytest.approx(alone, rel=1e-3)
    assert unpacked == pytest.approx(16 * alone, rel=0.05)


def test_prompts_of_a_mixed_step_read_their_cached_keys_too() -> None:
    """100 new tokens after 900 cached ones read the keys and values of 1,000 tokens, as 1,000 new ones do."""
    fit = MixedAttentionFit(memory_fraction=1.0)
    times = [mixed_time(mixed_attention([prompt], 2, 100, heads(32)), fit, A100) for prompt in ((100, 900), (1000, 0))]
    expected = (1000 + 100) * 8 * 256 * 2 / A100.bandwidth
    assert [time.memory_s for time in times] == pytest.approx([expected, expected])


@pytest.mark.parametrize(("tokens", "pieces"), [(1, 1), (512, 1), (513, 2), (1025, 3)])
def test_each_piece_of_a_prompt_launches_its_own_kernels(tokens: int, pieces: int) -> None:
    fit = BlockStreamFit(launch_s=5e-6, memory_fraction=0.5, micro_batch=512)
    work = flash_prefill([(tokens, 0)], heads(32))
    assert block_stream_time(work, fit, A100).overhead_s == pytest.approx(pieces * work.num_kernels * 5e-6)

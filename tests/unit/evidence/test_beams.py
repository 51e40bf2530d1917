"""Beams of a request read their common prompt once from HBM."""

import pytest

from perfmodel.cost import load_calibration
from perfmodel.cost.kernel_models.attention.decode import FlashDecodeFit, with_cache_of
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.evidence.predict.results import cached_read_speedup, tokens_read
from perfmodel.ops.attention.decode import attention_decode
from perfmodel.ops.attention.prefill import Heads
from perfmodel.specs import load_hardware


def test_tokens_read_by_hand():
    """Four beams, 900 tokens of prompt, 60 behind it. Without a faster cache each beam reads 960; a cache that costs
    nothing leaves a quarter of the prompt."""
    assert tokens_read(900, 60, 4, 1.0) == pytest.approx(960)
    assert tokens_read(900, 60, 4, 1e12) == pytest.approx(285)
    assert tokens_read(900, 60, 1, 2.0) == pytest.approx(960)


def test_a_chip_has_its_cache_whatever_memory_is_beside_it():
    """H100 and H200 are one chip: the H200's faster memory leaves its L2 that much less ahead."""
    own, other = (DeviceFacts.of(load_hardware(name)) for name in ("h100", "h200"))
    fit = FlashDecodeFit(cache_speedup=2.0)
    passed = with_cache_of(fit, own, other)
    ratio = own.bandwidth / other.bandwidth * other.clock_hz / own.clock_hz
    assert passed.cache_speedup == pytest.approx(2.0 * ratio)
    assert passed.cache_speedup * other.bandwidth / other.clock_hz == pytest.approx(2 * own.bandwidth / own.clock_hz)
    assert with_cache_of(fit, own, own) == fit


def test_kernels_without_a_measured_cache_have_the_usual_one():
    heads = Heads(16, 16, 256, 256, "fp16", 2.0, 2.0)
    work = attention_decode(64, 64 * 900, heads)
    for name in ("h100", "mi300x", "xeon-8480"):
        device = load_hardware(name)
        assert 1.0 < cached_read_speedup(work, device, load_calibration(device, "trtllm")) < 3.0

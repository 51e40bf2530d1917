"""Transfer of fits: fractions stay, seconds follow the clock, nothing leaves its plausible range."""

import pytest

from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.attention.decode import FlashDecodeFit
from perfmodel.cost.kernel_models.attention.prefill import FlashPrefillFit
from perfmodel.cost.kernel_models.fits import transferred
from perfmodel.cost.kernel_models.messages.collective import CollectiveFit, CustomAllReduceFit
from perfmodel.specs.scenario_file import load_hardware

A100, H100, H200 = (DeviceFacts.of(load_hardware(n)) for n in ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm"))


def test_devices_that_differ_in_memory_only_share_their_fits():
    for fit in (FlashDecodeFit(), FlashPrefillFit(), CustomAllReduceFit()):
        assert transferred(fit, H100, H200) == fit


def test_seconds_follow_the_clock_and_fractions_stay():
    fit = FlashDecodeFit(launch_s=8e-6, memory_fraction=0.8)
    found = transferred(fit, A100, H100)
    assert found.launch_s == pytest.approx(8e-6 * 1.41 / 1.83)
    assert found.memory_fraction == 0.8
    assert found.block_bandwidth == fit.block_bandwidth
    assert found.kernel == fit.kernel


def test_a_blocks_cost_in_key_tokens_is_a_time():
    """312 TFLOP/s on 108 units and 989 on 132: a key token costs 2.59 times less, the block's time 1.41 / 1.83."""
    found = transferred(FlashPrefillFit(block_tokens=50.0), A100, H100)
    assert found.block_tokens == pytest.approx(50 * (989 / 132) / (312 / 108) * 1.41 / 1.83)


def test_a_ratio_may_be_given_and_ranges_hold():
    fit = CustomAllReduceFit(launch_s=4e-6, beyond=CollectiveFit(hop_s=1e-6, link_latency_s=6e-7), eager_floor_s=4e-5)
    found = transferred(fit, A100, H100, 0.62)
    assert (found.launch_s, found.beyond.hop_s) == pytest.approx((2.48e-6, 0.62e-6))
    assert (found.beyond.link_latency_s, found.eager_floor_s) == (6e-7, 4e-5)
    assert transferred(fit, A100, H100, 1e-6).launch_s == 5e-7

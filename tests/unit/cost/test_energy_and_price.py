"""Energy between idle and TDP; price by the hour and by the token."""

from dataclasses import dataclass

import pytest
from devices import ONE_OF_EACH
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import energy_j, energy_split_j, usd_per_hour, usd_per_million_tokens
from perfmodel.cost.power import PowerFit, device_power_w
from perfmodel.specs.hardware import PriceOverride
from perfmodel.specs.scenario_file import load_hardware

H100 = load_hardware("h100-sxm-80gb")


LINEAR = PowerFit(active_share=0.2, compute=1.0, exponent=1.0)


@dataclass
class Usage:
    peak_compute_s: float
    hbm_bytes: float
    busy_s: float
    unspent_compute_s: float = 0.0


def test_idle_streaming_and_computing_by_hand():
    """H100: 70 W idle, 700 W TDP, 140 W as soon as kernels run; of the 560 W above a stream of half the bandwidth takes
    a quarter; half of the time idle draws the mean of both."""
    assert device_power_w(H100, 0, 0, busy=0, fit=LINEAR) == 70
    assert device_power_w(H100, 0, 0.5, fit=LINEAR) == pytest.approx(140 + 560 / 4)
    assert device_power_w(H100, 1, 0, fit=LINEAR) == device_power_w(H100, 1, 1, fit=LINEAR) == 700
    assert device_power_w(H100, 0, 0.5, busy=0.5, fit=LINEAR) == pytest.approx((70 + 280) / 2)


def test_decoding_draws_about_what_was_measured():
    """LLM-Inference-Bench (Argonne, 2024): 7B and 8B models in batches of 1 to 64 on one A100 of 400 W draw 227 to
    379 W under vLLM, TensorRT-LLM and DeepSpeed; here at a little and at most of the bandwidth."""
    a100 = load_hardware("a100-sxm-80gb")
    assert 200 < device_power_w(a100, 0.005, 0.3) < device_power_w(a100, 0.1, 0.8) < 380


def test_energy_is_power_over_time():
    """Ten seconds, of which five compute at the peak: 5 s of 70 W and 5 s of 700 W."""
    assert energy_j(H100, Usage(5.0, 0.0, 5.0), 10.0, LINEAR) == pytest.approx(3850)
    assert energy_j(H100, Usage(0.0, 0.0, 0.0), 0.0) == 0


def test_energy_by_what_takes_it_adds_up():
    """Where both together ask for more than the device has, each gets as much less."""
    for hbm_s, compute_s in ((3.0, 2.0), (9.0, 9.0), (0.0, 0.0)):
        usage = Usage(compute_s, hbm_s * H100.memory_bandwidth, 9.5)
        split = energy_split_j(H100, usage, 10.0)
        assert sum(split.values()) == pytest.approx(energy_j(H100, usage, 10.0))
        assert split["idle"] >= 700


def test_what_lower_clocks_save_of_arithmetic_is_not_paid_for():
    """As if half a second of the two had never been."""
    saved, without = (Usage(2.0, 0.0, 4.0, unspent_compute_s=0.5), Usage(1.5, 0.0, 4.0))
    assert energy_j(H100, saved, 10.0) == energy_j(H100, without, 10.0) < energy_j(H100, Usage(2.0, 0.0, 4.0), 10.0)


@given(st.sampled_from(ONE_OF_EACH), st.floats(0, 1), st.floats(0, 1))
def test_power_is_between_idle_and_tdp_on_every_device(name, compute, memory):
    hardware = load_hardware(name)
    power = device_power_w(hardware, compute, memory)
    assert 0 < device_power_w(hardware, 0, 0, busy=0) <= device_power_w(hardware, 0, 0) <= power
    assert hardware.declared.tdp_w is None or power <= hardware.declared.tdp_w


def test_the_scenario_s_price_comes_first():
    assert usd_per_hour(H100) == H100.price.usd_per_hour
    assert usd_per_hour(H100, PriceOverride(usd_per_gpu_hour=1.5)) == 1.5
    assert usd_per_hour(H100.model_copy(update={"price": None})) is None


def test_a_million_tokens_by_hand():
    """Eight devices at 2 USD an hour and 1000 tokens a second: 16 / 3.6e6 a token."""
    assert usd_per_million_tokens(2.0, 8, 1000.0) == pytest.approx(16 / 3.6)
    assert usd_per_million_tokens(2.0, 8, 0.0) == float("inf")

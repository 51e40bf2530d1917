"""Energy between idle and TDP; price by the hour and by the token."""

from dataclasses import dataclass

import pytest
from devices import ONE_OF_EACH
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import energy_j, energy_split_j, usd_per_hour, usd_per_million_tokens
from perfmodel.cost.power import device_power_w
from perfmodel.specs.hardware import PriceOverride
from perfmodel.specs.scenario_file import load_hardware

H100 = load_hardware("h100-sxm-80gb")


@dataclass
class Usage:
    peak_compute_s: float
    hbm_bytes: float
    unspent_compute_s: float = 0.0


def test_idle_streaming_and_computing_by_hand():
    """H100: 70 W idle, 700 W TDP; streaming memory alone draws half of what is between."""
    assert device_power_w(H100, 0, 0) == 70
    assert device_power_w(H100, 0, 1) == 70 + 630 / 2
    assert device_power_w(H100, 1, 0) == device_power_w(H100, 1, 1) == 700


def test_decoding_draws_about_what_was_measured():
    """Splitwise's traces: decode at 0.43-0.46 of TDP on A100; here at 60 % of bandwidth and little compute."""
    a100 = load_hardware("a100-sxm-80gb")
    assert device_power_w(a100, 0.03, 0.6) / 400 == pytest.approx(0.445, abs=0.05)


def test_energy_is_power_over_time():
    """Ten seconds, half of them computing at the peak: 70 + 630/2 W."""
    assert energy_j(H100, Usage(5.0, 0.0), 10.0) == pytest.approx(3850)
    assert energy_j(H100, Usage(0.0, 0.0), 0.0) == 0


def test_energy_by_what_takes_it():
    """Ten seconds on an H100: 700 J for being there, 2 s of arithmetic at the peak 1260 J, 3 s of streaming 945 J.
    Where both together ask for more than TDP, each gets as much less."""
    busy = Usage(2.0, 3.0 * H100.memory_bandwidth)
    assert energy_split_j(H100, busy, 10.0) == pytest.approx({"idle": 700, "compute": 1260, "memory": 945})
    assert energy_split_j(H100, busy, 2.0) == pytest.approx({"idle": 140, "compute": 720, "memory": 540})


def test_what_lower_clocks_save_of_arithmetic_is_not_paid_for():
    """As above, but 0.5 s of the 2 s of arithmetic saved: 945 J instead of 1260; streaming and being there cost what
    they did."""
    busy = Usage(2.0, 3.0 * H100.memory_bandwidth, unspent_compute_s=0.5)
    assert energy_split_j(H100, busy, 10.0) == pytest.approx({"idle": 700, "compute": 945, "memory": 945})
    assert energy_j(H100, busy, 10.0) == pytest.approx(700 + 945 + 945)


@given(st.sampled_from(ONE_OF_EACH), st.floats(0, 1), st.floats(0, 1))
def test_power_is_between_idle_and_tdp_on_every_device(name, compute, memory):
    hardware = load_hardware(name)
    power = device_power_w(hardware, compute, memory)
    assert 0 < device_power_w(hardware, 0, 0) <= power
    assert hardware.declared.tdp_w is None or power <= hardware.declared.tdp_w


def test_the_scenario_s_price_comes_first():
    assert usd_per_hour(H100) == H100.price.usd_per_hour
    assert usd_per_hour(H100, PriceOverride(usd_per_gpu_hour=1.5)) == 1.5
    assert usd_per_hour(H100.model_copy(update={"price": None})) is None


def test_a_million_tokens_by_hand():
    """Eight devices at 2 USD an hour and 1000 tokens a second: 16 / 3.6e6 a token."""
    assert usd_per_million_tokens(2.0, 8, 1000.0) == pytest.approx(16 / 3.6)
    assert usd_per_million_tokens(2.0, 8, 0.0) == float("inf")

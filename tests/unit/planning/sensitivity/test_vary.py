"""What `--vary` reads: ranges even in their ratios, lists, multiples, whole numbers; mistakes are sentences."""

import pytest

from perfmodel.errors import SpecError
from perfmodel.planning.axes import axis_of, present_value, suspects
from perfmodel.planning.typical_step import StepSpec
from perfmodel.specs import load_scenario

SCENARIO = load_scenario("llama-3.1-8b-a100")
DISAGGREGATED = load_scenario("llama-3.1-70b-h100-disaggregated")


def test_a_range_is_even_in_its_ratios():
    axis = axis_of("traffic.arrivals.rate=1..16:5", SCENARIO)
    assert axis.xs == (1, 2, 4, 8, 16)
    assert axis.overrides[-1] == "traffic.arrivals.rate=16"
    assert (axis.present, axis.is_whole) == (4.0, False)


def test_whole_numbers_stay_whole_and_multiples_of_them_become_absolute():
    assert axis_of("engine.max_num_seqs=3..300:3", SCENARIO).texts == ("3", "30", "300")
    assert axis_of("engine.max_num_seqs=0.3x,1x", SCENARIO).texts == (str(round(256 * 0.3)), "256")


def test_multiples_units_and_words():
    assert axis_of("hardware.hbm.bandwidth=0.5x..2x:3", SCENARIO).texts == ("0.5x", "1x", "2x")
    axis = axis_of("hardware.hbm.bandwidth=1 TB/s..4 TB/s:3", SCENARIO)
    assert (axis.texts, axis.unit) == (("1 TB/s", "2 TB/s", "4 TB/s"), "TB/s")
    words = axis_of("engine.quantization=fp8,awq", SCENARIO)
    assert (words.texts, words.xs) == (("fp8", "awq"), ())


def test_present_values_are_found_in_scenario_hardware_pools_and_step():
    assert present_value("hardware.hbm.bandwidth", SCENARIO) == 2039e9
    assert present_value("hardware.links.nvlink.bandwidth", SCENARIO) == 300e9
    assert present_value("overheads.host", SCENARIO) == 1.0
    assert present_value("step.batch", SCENARIO, StepSpec(batch=7, context=9)) == 7
    assert present_value("hardware.peak_flops", SCENARIO) is None
    assert present_value("engine.quantization", SCENARIO) is None
    bandwidth = present_value("cluster.pools.decode.hardware.hbm.bandwidth", DISAGGREGATED)
    assert bandwidth == (DISAGGREGATED.pools[1].hardware or DISAGGREGATED.hardware).memory_bandwidth


def test_the_suspects_are_there_and_links_only_where_devices_talk():
    alone, together = suspects(SCENARIO), suspects(DISAGGREGATED)
    for text in (*alone, *together):
        axis_of(text, SCENARIO if text in alone else DISAGGREGATED)
    assert not any("nvlink" in text for text in alone)
    assert any("nvlink" in text for text in together)
    assert not any("network" in text for text in together)
    assert any("cluster.network" in text for text in suspects(load_scenario("deepseek-v3-2x8-h100")))


def test_there_is_no_half_of_one_request_at_a_time():
    alone = load_scenario("qwen3-30b-a3b-rtx-4090")
    varied = [axis_of(text, alone) for text in suspects(alone)]
    (concurrency,) = [axis for axis in varied if axis.path == "traffic.arrivals.concurrency"]
    assert concurrency.xs == (1, 2, 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("engine.max_num_seqs", "write PATH=LOW..HIGH"),
        ("engine.max_num_seqs=", "write PATH=LOW..HIGH"),
        ("traffic.arrivals.rate=8..1", "upwards"),
        ("traffic.arrivals.rate=1..8:1", "expected 2 to 200"),
        ("traffic.arrivals.rate=1..many", "both ends must be numbers"),
        ("traffic.arrivals.rate=1..", "expected both ends of a range"),
        ("traffic.arrivals.rate=1..1e999", "got inf; expected numbers up to 1e+30"),
        ("engine.max_num_seqs=2,1e400", "got inf; expected numbers up to 1e+30"),
        (f"engine.max_num_seqs={'1,' * 300}2", "got 301 values; expected at most 200"),
        ("hardware.hbm.bandwidth=0.5x..4e12", "the same unit"),
        ("hardware.hbm.bandwidth=1e12..2x", "the same unit"),
        ("hardware.hbm.bandwidth=900 GB/s..2 TB/s", "the same unit"),
        ("hardware.hbn.bandwidth=1..2", "Did you mean 'hbm'"),
    ],
)
def test_a_wrong_range_says_so(text, says):
    with pytest.raises(SpecError) as caught:
        axis_of(text, SCENARIO)
    assert says in str(caught.value)

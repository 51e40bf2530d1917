"""Counts, rates and times as people write them: in files, in `--set`, in `--vary`."""

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.errors import SpecError
from perfmodel.files.units import parse_count
from perfmodel.planning.axes import axis_of
from perfmodel.specs import load_scenario

NAME = "llama-3.1-8b-a100"


@pytest.mark.parametrize(
    ("written", "count"),
    [("8k", 8000), ("8K", 8192), ("25.6k", 25_600), ("2M", 2_097_152), ("1.5m", 1_500_000), ("8 k", 8000)],
)
def test_suffixes_are_those_of_vllms_flags(written, count):
    """The first three are the examples in the docstring of vLLM's human_readable_int."""
    assert parse_count(written) == count


def test_what_is_no_count_is_left_to_the_field():
    assert [parse_count(value) for value in ("8", "8kB", "k", 8, None)] == ["8", "8kB", "k", 8, None]


@pytest.mark.parametrize("written", ["1.5K", "1.2345k"])
def test_a_count_is_whole(written):
    with pytest.raises(ValueError, match="whole number"):
        parse_count(written)
    with pytest.raises(SpecError, match=f"engine.max_model_len: got '{written}'; expected a whole number"):
        load_scenario(NAME, [f"engine.max_model_len={written}"])
    with pytest.raises(SpecError, match="whole number"):
        axis_of(f"engine.max_num_seqs={written},64", load_scenario(NAME))


def test_overrides_take_counts_rates_and_times():
    written = (
        "engine.max_model_len=8K",
        "traffic.num_requests=2k",
        "traffic.arrivals.rate=240 req/min",
        "slo.ttft_ms=1s",
    )
    scenario = load_scenario(NAME, [*written, "slo.tpot_ms=40 ms", "plan.rate=3/s"])
    assert (scenario.engine.max_model_len, scenario.traffic.num_requests) == (8192, 2000)
    assert scenario.traffic.arrivals.rate == pytest.approx(4)
    assert (scenario.slo.ttft_ms, scenario.slo.tpot_ms) == (1000, 40)


def test_varied_values_take_them_too():
    scenario = load_scenario(NAME)
    assert axis_of("engine.max_num_batched_tokens=512,2K,8k", scenario).xs == (512, 2048, 8000)
    assert axis_of("engine.max_num_batched_tokens=2K..8K:3", scenario).texts == ("2048", "4096", "8192")
    assert axis_of("traffic.arrivals.rate=4 req/s..16 req/s:3", scenario).texts == ("4 req/s", "8 req/s", "16 req/s")
    assert axis_of("slo.ttft_ms=1s,2s", scenario).texts == ("1 s", "2 s")


def test_flags_take_them_too():
    flags = ("explain", NAME, "--batch", "0.1k", "--context", "2K", "--json")
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0, done.stderr
    same = CliRunner().invoke(app, ["explain", NAME, "--batch", "100", "--context", "2048", "--json"])
    assert done.stdout == same.stdout
    for wrong in ("0", "1.5K", "many"):
        refused = CliRunner().invoke(app, ["explain", NAME, "--batch", wrong])
        assert refused.exit_code == 2
        assert "expected" in refused.stderr


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("traffic.arrivals.rate=4 kg", "'4 kg' is not a quantity in requests/s"),
        ("traffic.num_requests=4 kg", "got '4 kg'; expected a whole number"),
        ("traffic.num_requests=9g", "got '9g'; expected a number of at most 1000000000"),
    ],
)
def test_other_units_are_refused(override, found):
    with pytest.raises(SpecError, match=found):
        load_scenario(NAME, [override])

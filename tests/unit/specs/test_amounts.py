"""Amounts beyond all reason are refused where they are read: with the value, the limit, its reason and a way out."""

from typing import Any

import pytest
from pydantic import ValidationError

from perfmodel.errors import SpecError
from perfmodel.planning.spec import PlanSpec
from perfmodel.specs import load_hardware, load_scenario
from perfmodel.specs.engine.speculation import SpeculativeConfig
from perfmodel.specs.hardware import MemoryLevel
from perfmodel.specs.scenario import Overheads
from perfmodel.specs.slo import SLO
from perfmodel.specs.traffic import Arrivals, Prefix, Traffic

LENGTHS = {"distribution": "fixed", "value": 10}
BASE = {"input_tokens": LENGTHS, "output_tokens": LENGTHS}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ("seed=-1", "seed: got -1; expected a number of at least 0"),
        ("traffic.arrivals.rate=1e-300", "got 1e-300; expected a number of at least 1e-12"),
        ("overheads.kernels=1e308", "expected a number of at most 1e.15"),
        ("cluster.replicas=1000000000", "got 1,000,000,000 engines .* expected at most 10,000, .* simulate a slice"),
        ("cluster.replicas=100000", "got 100,000 engines .* expected at most 10,000, .* simulate a slice"),
        (
            "traffic.num_requests=1000000000",
            "got 1,000,000,000 requests; expected at most 100,000,000, .* lower num_requests",
        ),
        ("plan.finalists=100000", "got 100,000 finalists with 3 seeds; expected at most 1,000"),
        ("name=../evil", "got '../evil'; expected a name that a file can have"),
    ],
)
def test_named_amounts_are_refused_in_one_sentence(change: str, wanted: str) -> None:
    with pytest.raises(SpecError, match=wanted) as refused:
        load_scenario("llama-3.1-8b-a100", [change])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "data", "wanted"),
    [
        (Traffic, BASE | {"arrivals": {"rate": 1e6}, "duration_s": 1e9}, "got 1,000,000,000,000,000 requests"),
        (
            Traffic,
            BASE | {"arrivals": {"stages": [{"rate": 1e6, "duration_s": 1e9}]}},
            "requests; expected at most 100,000,000",
        ),
        (Traffic, BASE | {"arrivals": {"process": "closed_loop", "concurrency": 2}, "duration_s": 9}, "num_requests"),
        (Prefix, {"shared_tokens": 1, "num_groups": 10_000, "num_prompts_per_group": 1000}, "10,000,000 prompts"),
        (PlanSpec, {"space": {"max_num_seqs": list(range(1, 30_000))}}, "got a space of .* candidates"),
        (MemoryLevel, {"level": "hbm", "capacity_bytes": "1e30 GB"}, "got '1e30 GB'; expected 0.001 to 1e.18 bytes"),
        (Arrivals, {"rate": 1e300}, "rate"),
        (Overheads, {"kernels": 1e-300}, "at least 1e-12"),
        (SLO, {"reading_tokens_per_s": 1e14}, "1000000"),
        (SLO, {"reading_words_per_minute": 1e14}, "1000000"),
        (
            SpeculativeConfig,
            {"method": "ngram", "num_speculative_tokens": 100_000},
            "100000 tokens; expected at most 128",
        ),
        (
            SpeculativeConfig,
            {"method": "ngram", "num_speculative_tokens": 10**9},
            "1000000000 tokens; expected at most 128",
        ),
    ],
)
def test_amounts_that_are_beyond_what_can_be_worked_out(spec: Any, data: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValidationError, match=wanted):
        spec.model_validate(data)


@pytest.mark.parametrize("peaks", ["{}", "{bf16: 0}", "{bf16: -1}"])
def test_a_device_has_a_peak(peaks: str) -> None:
    with pytest.raises(SpecError, match="peak_flops_per_s"):
        load_hardware("h100-sxm-80gb", [f"hardware.declared.peak_flops_per_s={peaks}"])
    with pytest.raises(SpecError, match="vector_flops_per_s"):
        load_hardware("h100-sxm-80gb", ["hardware.declared.vector_flops_per_s=0"])


def test_the_limits_leave_room_for_what_is_large() -> None:
    traffic = Traffic.model_validate(BASE | {"arrivals": {"rate": 1000}, "duration_s": 86400})
    assert traffic.expected_requests == 86_400_000
    assert Traffic.model_validate(BASE | {"arrivals": {"rate": 9}, "num_requests": 7}).expected_requests == 7
    assert PlanSpec(finalists=100, seeds=10).finalists == 100


@pytest.mark.parametrize(
    ("traffic", "count"),
    [
        ({"arrivals": {"stages": [{"rate": 2, "duration_s": 60}, {"rate": 5, "duration_s": 10}]}}, 170),
        ({"arrivals": {"rate": 3}, "duration_s": 20}, 60),
        ({"arrivals": {"rate": 3}, "duration_s": 20, "num_requests": 50}, 50),
        ({"arrivals": {"rate": 3}, "duration_s": 20, "num_requests": 90}, 60),
        ({"arrivals": {"rate": 3}, "num_requests": 90}, 90),
    ],
)
def test_expected_requests_are_rate_times_duration_up_to_num_requests(traffic: dict[str, Any], count: float) -> None:
    assert Traffic.model_validate(BASE | traffic).expected_requests == count


def test_the_mean_of_length_distributions_before_clipping() -> None:
    lengths = [
        {"distribution": "fixed", "value": 12},
        {"distribution": "uniform", "low": 4, "high": 20},
        {"distribution": "exponential", "mean": 12},
        {"distribution": "lognormal", "mean": 12, "p99": 100},
        {"distribution": "empirical", "values": [6, 10, 20]},
    ]
    inputs = [
        Traffic.model_validate(BASE | {"num_requests": 9, "input_tokens": entry}).input_tokens for entry in lengths
    ]
    assert [parsed.mean_tokens for parsed in inputs if parsed is not None] == [12] * 5


@pytest.mark.parametrize(("p99", "is_possible"), [(12.5, True), (170.0, True), (12.0, False), (180.0, False)])
def test_the_99th_percentile_of_a_lognormal_is_at_most_15_times_its_mean(p99: float, is_possible: bool) -> None:
    """exp(2.326^2 / 2) = 14.96."""
    lengths = {"distribution": "lognormal", "mean": 12, "p99": p99}
    given = BASE | {"num_requests": 9, "input_tokens": lengths}
    if is_possible:
        assert Traffic.model_validate(given).input_tokens is not None
    else:
        with pytest.raises(ValidationError, match=r"1 to 14.9 times the mean"):
            Traffic.model_validate(given)

"""One registry of metrics: each key has one label, one unit and one direction, whoever shows it."""

import pytest

from perfmodel import sim
from perfmodel.planning.metrics import (
    LATENCIES,
    STATISTICS,
    basis_by_name,
    metric_named,
    metric_of,
    study_metric,
)
from perfmodel.specs import load_scenario


def test_a_metric_is_the_same_object_whoever_asks():
    for key in ("mean_tpot_ms", "output_throughput", "slo_attainment", "usd_total"):
        assert metric_of(key) is study_metric(key) is metric_named(key, "run")
    assert metric_named("mfu", "step") is metric_named("mfu", "run")


def test_validation_puts_the_statistic_last_and_means_the_same():
    for name in LATENCIES:
        for statistic in STATISTICS:
            assert metric_of(f"{name}_{statistic}") is metric_of(f"{statistic}_{name}_ms")


def test_every_number_of_a_summary_has_a_label_of_its_own():
    """A key of a run that the registry does not know would be shown under its bare name. Energy is one thing in two
    units."""
    result = sim.simulate(load_scenario("llama-3.1-8b-a100", ["traffic.num_requests=20"]))
    keys = [key for key, value in result.summary.items() if isinstance(value, int | float)]
    unknown = [key for key in keys if metric_of(key).dimension == ""]
    assert not unknown
    titles = [metric_of(key).title for key in keys]
    assert len(titles) == len(set(titles))


def test_units_follow_from_dimensions():
    assert metric_of("request_goodput").title == "Request goodput, req/s"
    assert (metric_of("mbu").unit, metric_of("mbu").scale) == ("%", 100.0)
    assert (metric_of("preemptions").unit, metric_of("preemptions").title) == ("", "Preemptions")


def test_a_name_that_is_none_of_ours_stands_for_itself():
    found = metric_of("perplexity_of_text")
    assert (found.label, found.unit, found.is_neutral) == ("perplexity of text", "", True)


@pytest.mark.parametrize("slower", ["step_ms", "mean_ttft_ms", "kv_bytes_per_token", "tail_s"])
def test_less_of_time_and_memory_is_better_and_more_of_rates(slower):
    assert study_metric(slower).is_better_low
    for faster in ("output_throughput", "tokens_per_s", "max_batch", "acceptance_rate"):
        assert not study_metric(faster).is_better_low


def test_an_unknown_metric_names_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'mean_tpot_ms'"):
        basis_by_name("mean_tpott_ms")
    with pytest.raises(ValueError, match="is of a step, this figure is of a whole run"):
        metric_named("step_ms", "run")

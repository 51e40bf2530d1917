"""SLOs on means and percentiles, evaluated separately and alike by runs, screens and plans."""

from pathlib import Path

import numpy as np
import pytest

from perfmodel.errors import SpecError
from perfmodel.planning.finalist import Screened, meets, tightness
from perfmodel.planning.points import Record
from perfmodel.planning.result import PlanResult
from perfmodel.planning.screen import Screen
from perfmodel.planning.search import make_plan
from perfmodel.planning.space import Base, enumerate_space
from perfmodel.planning.spec import PlanSpace, PlanSpec
from perfmodel.report.views.run import latency_table, run_view
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario
from perfmodel.specs.slo import SLO

NAME = "llama-3.1-8b-a100"
SPACE = PlanSpace(tensor_parallel_size=(1, 2), max_num_seqs=(16, 64), max_num_batched_tokens=(2048,))


def screened(slo: str, attainment: float = 0.9) -> tuple[Screen, list[Screened]]:
    base = Base(NAME, (f"slo={slo}",))
    candidates = enumerate_space(base, PlanSpec(space=SPACE)).candidates
    screen = Screen(candidates, base.load(), attainment)
    return screen, screen.all()


def test_words_and_metrics() -> None:
    slo = load_scenario(NAME, ["slo={ttft_p99_ms: 1s, tpot_p95_ms: 40, e2e_p50_ms: 9000}"]).slo
    assert slo.limits_in_words == ("p99 TTFT <= 1000 ms", "p95 TPOT <= 40 ms", "p50 E2E latency <= 9000 ms")
    assert [limit.metric for limit in slo.statistics] == ["p99_ttft_ms", "p95_tpot_ms", "median_e2el_ms"]
    assert slo.is_given
    assert not slo.is_of_requests
    assert SLO(ttft_ms=5, ttft_p99_ms=9).is_of_requests


def test_a_mean_is_missed_with_any_failed_request() -> None:
    """A percentile ignores the requests above it, a mean ignores none. A mean may lie above the median."""
    mean, median = SLO(ttft_p50_ms=300, ttft_mean_ms=400).statistics
    assert (mean.metric, median.metric) == ("mean_ttft_ms", "median_ttft_ms")
    assert [mean.is_met(400, lost) for lost in (0, 0.001)] == [True, False]
    assert [median.is_met(300, lost) for lost in (0, 0.5, 0.51)] == [True, True, False]
    assert not mean.is_met(400.1)
    assert not mean.is_met(None)
    assert SLO(ttft_p50_ms=300, ttft_mean_ms=200).is_given


def test_a_mean_limit_is_screened_as_the_mean_over_requests() -> None:
    """The mean of a skewed latency lies between its median and its 99th percentile, and so do the rates."""
    rates = {name: screened(f"{{e2e_{name}_ms: 6000}}")[1] for name in ("p50", "mean", "p99")}
    totals = {name: sum(candidate.rate for candidate in screen) for name, screen in rates.items()}
    assert 0 < totals["p99"] < totals["mean"] < totals["p50"]
    screen, by_mean = screened("{e2e_mean_ms: 6000}")
    used = screen.tightness(by_mean, [max(candidate.rate, 1e-3) for candidate in by_mean])
    assert max(used) <= 1 + 1e-9


def test_speeds_become_tpot_limits_and_ttft_limits_grow_with_the_prompt() -> None:
    """25 tokens/s are 40 ms per token; 240 words/min at 3/4 words per token are 5.33 tokens/s."""
    assert (SLO(tpot_ms=30).tpot_limit_ms, SLO(min_tokens_per_s=25).tpot_limit_ms) == (30, 40)
    assert SLO(ttft_ms=9).tpot_limit_ms is None
    reader = SLO(reading_words_per_minute=240)
    assert reader.reading_speed == pytest.approx(240 / 60 / 0.75)
    limits = SLO(ttft_ms=500, ttft_ms_per_input_token=0.5)
    assert limits.ttft_limit_ms(1000) == 1000
    assert SLO(ttft_ms_per_input_token=0.5).ttft_limit_ms(1000) == 500


def test_a_percentile_tolerates_as_many_failures_as_it_ignores() -> None:
    """Failed requests count as the slowest."""
    limit = SLO(ttft_p99_ms=500).statistics[0]
    assert limit.is_met(500.0, 0.01)
    assert not limit.is_met(500.1)
    assert not limit.is_met(100.0, 0.011)
    assert not limit.is_met(None)


def test_plans_use_the_tighter_of_reading_speed_and_tpot_limit() -> None:
    for tpot_ms, planned in ((None, 50.0), (30, 30), (80, 50.0)):
        assert SLO(reading_tokens_per_s=20, tpot_ms=tpot_ms).planned_ms("tpot") == planned
    assert SLO(reading_tokens_per_s=20).limit_ms("tpot") is None
    assert SLO(ttft_ms=9).planned_ms("ttft") == 9


def test_a_higher_percentile_with_a_lower_limit_is_refused() -> None:
    with pytest.raises(SpecError, match=r"got ttft_p99_ms 400 below ttft_p90_ms 500"):
        load_scenario(NAME, ["slo={ttft_p99_ms: 400, ttft_p90_ms: 500}"])
    with pytest.raises(SpecError, match=r"slo.ttft_p98_ms: unknown key"):
        load_scenario(NAME, ["slo={ttft_p98_ms: 400}"])


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_run_meets_a_percentile_as_its_requests_do(factor: float) -> None:
    """The percentile of the requests' own latencies, a little below and a little above the limit."""
    few = ["traffic.num_requests=200"]
    plain = simulate(load_scenario(NAME, few)).requests
    assert plain is not None
    limit = float(np.quantile(plain.ttft_s, 0.95)) * 1e3 * factor
    run = simulate(load_scenario(NAME, [*few, f"slo={{ttft_p95_ms: {limit}, tpot_ms: 1000}}"]))
    assert run.summary["slo_percentiles_met"] == {"ttft_p95_ms": factor > 1}
    assert run.summary["slo_attainment"] == 1  # all meet the only limit on single requests
    assert f"p95 {'ok' if factor > 1 else 'over'}" in str(run_view(run))


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_run_meets_a_mean_as_its_requests_do(factor: float) -> None:
    few = ["traffic.num_requests=200"]
    plain = simulate(load_scenario(NAME, few)).requests
    assert plain is not None
    limit = float(plain.ttft_s.mean()) * 1e3 * factor
    run = simulate(load_scenario(NAME, [*few, f"slo={{ttft_mean_ms: {limit}}}"]))
    assert run.summary["slo_percentiles_met"] == {"ttft_mean_ms": factor > 1}
    assert run.slo is not None
    assert run.slo["is_met"] == (factor > 1)


def test_only_percentiles_leave_a_goodput() -> None:
    run = simulate(load_scenario(NAME, ["traffic.num_requests=200", "slo={ttft_p50_ms: 120, tpot_p90_ms: 25}"]))
    assert run.requests is not None
    good = (run.requests.ttft_s <= 0.12) & (run.requests.tpot_s <= 0.025)
    assert run.summary["slo_attainment"] == pytest.approx(good.mean())


def test_one_percentile_is_one_limit_at_that_attainment() -> None:
    """A share of 0.95 of the requests within a limit, or the 95th percentile within it: the same rates, the same
    headroom; two percentiles are each looser than both together."""
    for name, percentile in (("ttft_ms: 400", "ttft_p95_ms: 400"), ("tpot_ms: 20", "tpot_p95_ms: 20")):
        one, by_share = screened(f"{{{name}}}", 0.95)
        other, by_percentile = screened(f"{{{percentile}}}", 0.5)
        assert [each.rate for each in by_share] == [each.rate for each in by_percentile]
        assert any(each.rate > 0 for each in by_share)
        rates = [max(each.rate, 1e-3) for each in by_share]
        assert one.tightness(by_share, rates) == other.tightness(by_percentile, rates)
        assert [each.binds for each in by_share] == [each.binds for each in by_percentile]
    _, together = screened("{ttft_ms: 400, tpot_ms: 20}", 0.95)
    _, apart = screened("{ttft_p95_ms: 400, tpot_p95_ms: 20}")
    assert all(one.rate <= other.rate for one, other in zip(together, apart, strict=True))


def test_limits_on_requests_and_on_statistics_are_shown_together() -> None:
    run = simulate(load_scenario(NAME, ["traffic.num_requests=200", "slo={ttft_ms: 1s, ttft_p99_ms: 1ms}"]))
    cells = [str(row[-1]) for row in latency_table(run).rows if "TTFT" in str(row[0])]
    assert "1000: " in cells[0]
    assert "1 p99 over" in cells[0]


def test_records_are_judged_by_share_and_by_percentile() -> None:
    def record(good: float, p99: float) -> Record:
        return Record({"slo_attainment": good / 10, "p99_ttft_ms": p99})

    both, only = SLO(ttft_ms=500, ttft_p99_ms=1000), SLO(ttft_p99_ms=1000)
    assert meets([record(9.5, 900)], both, 0.9)
    assert not meets([record(8.5, 900)], both, 0.9)
    assert not meets([record(9.5, 1100)], both, 0.9)
    assert meets([record(8.5, 900)], only, 0.9)
    assert meets([record(9, 900), record(9, 1050)], only, 0.9)  # the mean over seeds
    assert not meets([Record(problem="does not fit")], only, 0.9)
    assert tightness([record(9, 900)], only, "p90") == pytest.approx(0.9)


def test_a_plan_serves_within_its_percentiles(tmp_path: Path) -> None:
    short = (
        "traffic.input_tokens={distribution: fixed, value: 300}",
        "traffic.output_tokens={distribution: fixed, value: 40}",
        "traffic.arrivals.rate=60",
        "slo={ttft_p99_ms: 1000, tpot_p95_ms: 40}",
        "plan={finalists: 2, seeds: 1, num_requests: 200, max_gpus: 4, space: {tensor_parallel_size: [1], "
        "max_num_seqs: [16, 64], max_num_batched_tokens: [2048]}}",
    )
    found = make_plan(NAME, short, tmp_path / "points.sqlite", workers=1)
    assert isinstance(found, PlanResult)
    assert found.winner is not None
    for each in found.ranked:
        assert (each.mean("p99_ttft_ms") or 0) <= 1000
        assert (each.mean("p95_tpot_ms") or 0) <= 40
        assert found.tightness(each) <= 1
    text = str(found)
    assert "with p99 TTFT <= 1000 ms and p95 TPOT <= 40 ms" in text
    assert "their statistics within the SLO" in text

"""`simulate`: the metrics are what the records say, Little's law, routers, disciplines, streams, interrupts."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from perfmodel.cost import EngineProfile
from perfmodel.errors import WorkloadError
from perfmodel.sim import RunResult, simulate
from perfmodel.sim.records.collector import GapHistogram
from perfmodel.specs import load_scenario


def run(*overrides: str, **options: object) -> RunResult:
    common = ["traffic.num_requests=200", *overrides]
    return simulate(load_scenario("llama-3.1-8b-a100", common), **options)  # type: ignore[arg-type]


def same_rows(one: RunResult, other: RunResult) -> bool:
    assert one.requests is not None
    return all(
        np.array_equal(getattr(one.requests, f.name), getattr(other.requests, f.name)) for f in fields(one.requests)
    )


def test_the_summary_is_what_the_records_say() -> None:
    result = run()
    requests, steps, summary = result.requests, result.steps, result.summary
    assert requests is not None
    assert steps is not None
    assert summary["completed"] == 200
    assert summary["total_output_tokens"] == requests.num_output_tokens.sum()
    assert summary["mean_ttft_ms"] == pytest.approx(1e3 * requests.ttft_s.mean())
    assert summary["p99_e2el_ms"] == pytest.approx(1e3 * np.quantile(requests.e2el_s, 0.99))
    assert summary["duration"] == pytest.approx(steps.end_s.max())
    assert summary["request_throughput"] == pytest.approx(200 / summary["duration"])
    assert sum(summary["bound_share"].values()) == pytest.approx(1.0)
    good = (requests.ttft_s <= 0.5) & ~(requests.tpot_s > 0.05)
    assert summary["request_goodput"] == pytest.approx(good.sum() / summary["duration"])


def test_the_mean_gap_is_the_token_weighted_tpot() -> None:
    """Every token but a request's first ends one gap: sum of gaps = sum of (E2E - TTFT), whatever was preempted."""
    for overrides in ((), ("engine.num_gpu_blocks_override=600", "traffic.arrivals.rate=50")):
        result = run(*overrides, profile=EngineProfile(engine="none"))  # tokens leave as they are sampled
        requests = result.requests
        assert requests is not None
        decode_s = (requests.finished_s - requests.first_token_s).sum()
        gaps = (requests.num_output_tokens - 1).sum()
        assert result.summary["mean_itl_ms"] == pytest.approx(1e3 * decode_s / gaps, rel=1e-9)
    assert result.summary["preemptions"] > 0


@pytest.mark.parametrize("rate", [2.0, 40.0])
def test_littles_law(rate: float) -> None:
    """Mean number in the system, integrated over time, equals arrival rate times mean time in it."""
    result = run(f"traffic.arrivals.rate={rate}")
    requests = result.requests
    assert requests is not None
    times = np.concatenate([requests.arrival_s, requests.finished_s])
    change = np.concatenate([np.ones(200), -np.ones(200)])
    order = np.argsort(times, kind="stable")
    level = np.cumsum(change[order])[:-1]
    assert (level * np.diff(times[order])).sum() == pytest.approx(requests.e2el_s.sum(), rel=1e-9)


def test_leaping_and_stepping_give_bit_equal_records() -> None:
    for model in ((), ("model=gpt-oss-20b",), ("model=qwen3-30b-a3b", "hardware=h200-sxm")):
        assert same_rows(run(*model), run(*model, can_leap=False))


@pytest.mark.parametrize("batching", ["none", "static", "dynamic", "iteration", "continuous"])
def test_every_discipline_serves_everything(batching: str) -> None:
    result = run(f"engine.batching={batching}", "engine.max_num_seqs=8")
    assert result.summary["completed"] == 200
    assert result.summary["kv_cache_usage_peak"] <= 1.0


def test_continuous_batching_beats_static_beats_none_under_load() -> None:
    rates = [
        run(f"engine.batching={b}", "traffic.arrivals.rate=100").summary["output_throughput"]
        for b in ("none", "static", "continuous")
    ]
    assert rates[0] < rates[1] < rates[2]


def test_least_outstanding_waits_less_than_round_robin_and_two_replicas_less_than_one() -> None:
    busy = ("traffic.arrivals.rate=3", "engine.max_num_seqs=8", "traffic.num_requests=600")
    ttft = [
        run(*busy, f"cluster={{replicas: {n}, router: {router}}}").summary["mean_ttft_ms"]
        for n, router in ((1, "round_robin"), (2, "round_robin"), (2, "least_outstanding"))
    ]
    assert ttft[0] > ttft[1] > ttft[2]


def test_prefix_affinity_finds_more_in_the_cache_than_round_robin() -> None:
    shared = ("traffic.prefix={num_groups: 8, shared_tokens: 512}", "traffic.arrivals.rate=20")
    hits = [
        run(*shared, f"cluster={{replicas: 4, router: {router}}}").summary["prefix_cache_hit_rate"]
        for router in ("round_robin", "prefix_affinity")
    ]
    assert 0 < hits[0] < hits[1] < 1


def test_a_closed_loop_keeps_its_concurrency() -> None:
    result = run("traffic.arrivals={process: closed_loop, concurrency: 5}")
    requests = result.requests
    assert requests is not None
    times = np.sort(requests.finished_s)
    for t in times[:-5]:
        in_flight = ((requests.arrival_s <= t) & (requests.finished_s > t)).sum()
        assert in_flight == 5


def test_records_are_streamed_as_they_come(tmp_path: Path) -> None:
    result = run(out=tmp_path)
    lines = (tmp_path / "requests.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 201
    assert lines[0].startswith("request_id,arrival_s")
    assert result.steps is not None
    assert len((tmp_path / "steps.csv").read_text(encoding="utf-8").splitlines()) == len(result.steps) + 1


def test_an_interrupted_run_leaves_its_finished_records_readable(tmp_path: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        if done >= 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path, progress=interrupt)
    lines = (tmp_path / "requests.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 51
    assert {line.count(",") for line in lines} == {lines[0].count(",")}


def test_traffic_without_requests_is_refused() -> None:
    with pytest.raises(WorkloadError, match="has no requests"):
        run("traffic.arrivals={process: poisson, rate: 0.001}", "traffic.duration_s=1")


def test_gap_quantiles_are_within_a_bin_of_the_exact_ones() -> None:
    histogram, drawn = GapHistogram(), np.random.default_rng(0).lognormal(-4, 0.5, 20_000)
    for gap in drawn:
        histogram.add(float(gap))
    for q in (0.5, 0.9, 0.99):
        assert histogram.quantile(q) == pytest.approx(np.quantile(drawn, q), rel=2e-3)
    assert histogram.mean == pytest.approx(drawn.mean())
    assert histogram.std == pytest.approx(drawn.std())


def test_a_run_of_growing_gaps_is_entered_as_its_steps_are() -> None:
    run_, single = GapHistogram(), GapHistogram()
    steps = [0.01 + 0.0001 * i for i in range(100)]
    run_.add_run(steps[0], sum(steps), 100, 3)
    for gap in steps:
        single.add(gap, 3)
    assert run_.count == single.count
    assert run_.mean == pytest.approx(single.mean)
    assert run_.quantile(0.9) == pytest.approx(single.quantile(0.9), rel=0.05)


def test_traffic_of_stages_knows_about_how_many_requests_there_will_be() -> None:
    """20 s at 4 and 10 s at 12 requests/s are 200 on average; where more arrive, the total grows with them."""
    shown: list[tuple[int, int | None]] = []
    stages = "traffic.arrivals={process: poisson, stages: [{rate: 4, duration_s: 20}, {rate: 12, duration_s: 10}]}"
    overrides = [stages, "traffic.num_requests=null"]
    scenario = load_scenario("llama-3.1-8b-a100", overrides)
    simulate(scenario, progress=lambda done, total: shown.append((done, total)))
    assert shown
    assert all(total is not None and total == max(200, done) for done, total in shown)

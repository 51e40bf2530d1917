"""Long jobs extrapolated from short runs: exact for a linear job, close to the simulator for a full run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfmodel.planning.finalist import Job
from perfmodel.planning.jobs import METRICS, extrapolate, run_lengths
from perfmodel.planning.points import Point, Record, evaluate
from perfmodel.planning.result import JobPlan
from perfmodel.planning.search import make_plan
from perfmodel.specs import load_scenario

SCENARIO = "summaries-8b-offline"
START_S, PACE, DRAIN_S = 7.0, 20.0, 3.0  # seconds, requests per second, seconds
TOKENS, USD_PER_S, FLOPS_SHARE = 50.0, 0.01, 0.4  # per request, of the deployment, in steady state


def linear_job(num_requests: int) -> Record:
    """By hand: a start and a drain with an idle device, and a steady state between."""
    seconds, tokens = START_S + num_requests / PACE + DRAIN_S, TOKENS * num_requests
    return Record(
        {
            "duration": seconds,
            "usd_total": USD_PER_S * seconds,
            "usd_per_million_output_tokens": 1e6 * USD_PER_S * seconds / tokens,
            "output_throughput_per_gpu": tokens / seconds,
            "tail_share": DRAIN_S / seconds,
            "mfu": FLOPS_SHARE * num_requests / PACE / seconds,
            "kv_cache_usage_peak": 0.9,
            "preemptions": 0.0,
        }
    )


def test_a_linear_job_is_extrapolated_exactly() -> None:
    job = extrapolate(linear_job(1000), linear_job(2000), (1000, 2000), 10_000_000)
    assert job.values == pytest.approx(linear_job(10_000_000).values)


def test_a_failed_short_run_is_the_result() -> None:
    failed = Record(problem="does not fit")
    assert extrapolate(failed, linear_job(2000), (1000, 2000), 10_000).problem == "does not fit"
    assert extrapolate(linear_job(1000), failed, (1000, 2000), 10_000).problem == "does not fit"


@pytest.mark.release
@pytest.mark.parametrize(
    ("engine", "bound"),
    [
        (("engine.max_num_seqs=64", "cluster.replicas=1"), 0.03),
        (("engine.max_num_seqs=64", "cluster.replicas=2"), 0.05),
        (("engine.max_num_seqs=128", "traffic.output_tokens={distribution: fixed, value: 60}"), 0.05),
    ],
    ids=["one replica", "two replicas", "equal answers"],
)
def test_extrapolation_agrees_with_a_full_simulation(engine: tuple[str, ...], bound: float) -> None:
    """6,000 requests from the first 1,500 and 3,000. The slope scatters by 0.5 x 1500^(-1/2) = 1.3 %, and by more with
    two replicas, since the one with more tokens finishes last."""

    def record(num_requests: int) -> Record:
        return evaluate(Point(SCENARIO, METRICS, (*engine, f"traffic.num_requests={num_requests}")))

    extrapolated = extrapolate(record(1500), record(3000), (1500, 3000), 6000)
    whole = record(6000)
    for name in METRICS:
        if name in ("preemptions", "tail_share", "kv_cache_usage_peak"):
            continue
        assert extrapolated.values[name] == pytest.approx(whole.values[name], rel=bound), name
    drains = [(job.values["tail_share"] or 0.0) * (job.values["duration"] or 0.0) for job in (extrapolated, whole)]
    assert drains[0] == pytest.approx(drains[1], abs=0.02 * (whole.values["duration"] or 0.0))


def test_only_long_jobs_are_extrapolated() -> None:
    """Only jobs with more requests than both short runs together; a job without a steady state is simulated in full."""
    candidate: Any = SimpleNamespace(max_num_seqs=512, num_engines=1)
    job = Job(candidate, 2, 1.0)

    def lengths(*overrides: str) -> tuple[int, ...]:
        return run_lengths(job, load_scenario(SCENARIO, overrides))

    assert lengths() == (4000,)
    assert lengths("traffic.num_requests=40000") == (40_000,)
    assert lengths("traffic.num_requests=10000000") == (10_000, 20_000)
    wide = run_lengths(replace(job, replicas=32), load_scenario(SCENARIO, ["traffic.num_requests=10000000"]))
    assert wide == (4 * 512 * 32, 8 * 512 * 32)  # four and eight full batches of every engine


def test_ten_million_documents_are_planned_from_short_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is for all requests, and a note names the runs that it is extrapolated from."""
    monkeypatch.setattr("perfmodel.planning.jobs._FEWEST_REQUESTS", 1000)
    small = ("plan.space.hardware=[h100-sxm-80gb]", "plan.space.max_num_seqs=[64]", "plan.finalists=1", "plan.seeds=1")
    asked = ("traffic.num_requests=10000000", "plan.deadline_s=null", "plan.objective=cheapest_job", "plan.max_gpus=1")
    space = "plan.space.max_num_batched_tokens=[2048]"
    plan = make_plan(SCENARIO, (*small, *asked, space), tmp_path / "points.sqlite", workers=1)
    assert isinstance(plan, JobPlan)
    assert plan.winner is not None
    assert plan.winner.seconds == pytest.approx(plan.winner.screened_s, rel=0.25)
    text = "The figures of 10,000,000 requests are extrapolated from simulations of 500 and 1,000"
    assert any(note.startswith(text) for note in plan.notes)

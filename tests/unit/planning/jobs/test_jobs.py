"""Plans of offline jobs: the closed form beside the simulator, deadlines, bills, what is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_points import StoredPoints

from perfmodel.errors import SpecError
from perfmodel.planning.jobs import JobScreen, _rests, _whole
from perfmodel.planning.result import JobPlan
from perfmodel.planning.search import make_plan
from perfmodel.planning.space import Base, enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.report.views.plan import job_view, preliminary_sentence
from perfmodel.sim import simulate

SMALL = (
    "traffic.num_requests=600",
    "plan.space.tensor_parallel_size=[1]",
    "plan.space.max_num_seqs=[32, 256]",
    "plan.space.max_num_batched_tokens=[2048, 8192]",
    "plan.space.hardware=[h100-sxm-80gb, l40s]",
    "plan.finalists=2",
    "plan.max_gpus=16",
    "plan.deadline_s=null",
    "plan.seeds=2",
)


def plan(store: Path, *overrides: str) -> JobPlan:
    found = make_plan("summaries-8b-offline", (*SMALL, *overrides), store / "points.sqlite", workers=1)
    assert isinstance(found, JobPlan)
    return found


def test_what_is_left_of_answers_under_way() -> None:
    """Of equal answers anything up to all of it, uniformly; of exponential ones as much as of new ones."""
    shares, lengths = _rests(np.full(100, 40.0))
    assert np.interp([0.25, 0.5, 1.0], shares, lengths) == pytest.approx([10, 20, 40])
    some = np.random.default_rng(0).exponential(100.0, 200_000)
    at = np.array([0.1, 0.5, 0.9, 0.99])
    assert np.interp(at, *_rests(some)) == pytest.approx(np.interp(at, *_whole(some)), rel=0.03)


@pytest.mark.release
@pytest.mark.parametrize(
    "job",
    [
        (),
        ("traffic.output_tokens={distribution: lognormal, mean: 300, std: 300, max: 3000}",),
        ("traffic.input_tokens={distribution: fixed, value: 100}", "traffic.num_requests=100"),
        ("traffic.input_tokens={distribution: fixed, value: 3000}", "traffic.num_requests=300"),
    ],
    ids=["summaries", "long tails", "few", "long prompts"],
)
def test_the_closed_form_is_near_the_simulator(job: tuple[str, ...]) -> None:
    """Over scheduling choices on two devices, one and three replicas: median error below 10 %, none above 25 %; 35
    where hardly more requests than slots are there, and most prompts have a step of their own."""
    base = Base("summaries-8b-offline", (*SMALL, *job))
    scenario = base.load()
    spec = scenario.plan or PlanSpec()
    candidates = enumerate_space(base, spec).candidates
    jobs = [each for each in JobScreen(candidates, scenario, spec).jobs() if each.replicas in (1, 3)]
    found = np.array(
        [
            each.screened_s
            / float(simulate(base.load(each.candidate.overrides(each.replicas)), keep_steps=False).summary["duration"])
            for each in jobs
        ]
    )
    assert len(found) >= 12
    assert np.median(np.abs(found - 1)) < 0.10
    assert np.abs(found - 1).max() < (0.35 if scenario.traffic.num_requests == 100 else 0.25)


@pytest.mark.release
def test_a_nearer_deadline_costs_more_devices_and_more_money(tmp_path: Path) -> None:
    """Tails and rounding up make a job dearer the faster it is to be done."""
    plans = [plan(tmp_path, "plan.objective=cheapest_job", *more) for more in ((), ("plan.deadline_s=8",))]
    winners = []
    for each in plans:
        assert each.winner is not None
        winners.append(each.winner)
        sure = [job for job in each.ranked if each.in_time(job) >= each.spec.confidence]
        assert each.ranked[: len(sure)] == sorted(sure, key=lambda job: job.bill)
        bill = each.winner.mean("usd_total")
        assert bill == pytest.approx(each.winner.bill, rel=0.02)  # an arithmetic and a geometric mean over seeds
    slow, fast = winners
    assert slow.replicas == 1
    assert fast.seconds <= 8 < slow.seconds
    assert fast.num_devices > slow.num_devices
    assert fast.bill > slow.bill
    low, high = fast.seconds_interval
    assert low <= fast.seconds <= high
    assert 0 < plans[1].in_time(fast) <= 1
    assert "deadline of 8 s" in str(plans[1])
    store = StoredPoints(tmp_path / "points.sqlite")
    count = len(store)
    assert store.most_evaluations() == 1
    store.close()
    again = plan(tmp_path, "plan.objective=cheapest_job", "plan.deadline_s=8")
    assert again.to_json() == plans[1].to_json()
    store = StoredPoints(tmp_path / "points.sqlite")
    assert len(store) == count
    store.close()


def test_the_closed_form_answers_before_the_job_is_simulated(tmp_path: Path) -> None:
    """Then one bar counts all that is simulated, with its total before the first run is done."""
    happened: list[tuple[Any, ...]] = []
    preliminaries: list[Any] = []

    def on_preliminary(preliminary: Any) -> None:
        preliminaries.append(preliminary)
        happened.append(("preliminary",))

    @contextmanager
    def shown(stage: str) -> Iterator[Any]:
        happened.append((stage,))
        yield lambda done, total: happened.append((stage, done, total))

    overrides = (*SMALL, "plan.objective=cheapest_job", "plan.deadline_s=8")
    make_plan(
        "summaries-8b-offline", overrides, tmp_path / "points.sqlite", 1, stages=shown, on_preliminary=on_preliminary
    )
    assert happened[:3] == [("screening",), ("preliminary",), ("simulating the job's requests",)]
    counts = [each[1:] for each in happened if len(each) == 3]
    assert counts[0][0] == 0
    assert counts[0][1] >= 600  # requests of a run
    assert [done for done, _ in counts] == sorted(done for done, _ in counts)  # it never starts again
    assert counts[-1][0] == counts[-1][1] >= 2 * 2 * 600  # finalists under two seeds
    assert all(total >= done for done, total in counts)
    (first,) = preliminaries
    sentence = preliminary_sentence(first)
    assert sentence.startswith(f"Simulating {len(first.finalists)} of {first.num_candidates} candidates")
    assert first.finalists[0].candidate.layout.label in sentence
    assert len(sentence) <= 150
    nothing = replace(first, finalists=())
    assert "nothing within 16 GPUs does 600 requests" in preliminary_sentence(nothing)


def test_being_sure_takes_more_replicas_than_exact_predictions(tmp_path: Path) -> None:
    """A deadline that the cheapest just keeps is missed in many draws: the choice keeps it in as many as were wanted,
    or is the surest there is."""
    asked = ("plan.objective=cheapest_job", "plan.deadline_s=8")
    exact, sure = (plan(tmp_path, *asked, f"plan.confidence={wanted}") for wanted in (0, 0.95))
    for each in (exact, sure):
        assert each.winner is not None
        assert each.plain is not None
    assert exact.winner.label == exact.plain.label == sure.plain.label
    assert sure.in_time(sure.winner) >= sure.in_time(sure.plain)
    assert sure.in_time(sure.winner) >= 0.95 or sure.in_time(sure.winner) == max(map(sure.in_time, sure.ranked))
    assert sure.winner.num_devices >= exact.winner.num_devices
    assert "95% were asked for" in str(sure) or "short of the 95%" in str(sure)
    assert sure.to_json()["confidence"] == 0.95


def test_what_is_done_first_takes_all_that_is_allowed(tmp_path: Path) -> None:
    found = plan(tmp_path, "plan.objective=shortest_job", "plan.max_gpus=4")
    assert found.winner is not None
    assert found.winner.num_devices == 4
    question = job_view(found).subtitle
    assert question.startswith("Which deployment completes ")
    assert question.endswith(" first, on at most 4 GPUs?")
    assert found.winner.seconds == min(job.seconds for job in found.ranked)
    too_soon = plan(tmp_path, "plan.objective=cheapest_job", "plan.max_gpus=1", "plan.deadline_s=1")
    assert too_soon.winner is None
    assert "Nothing within 1 GPU does" in str(too_soon)


def test_what_has_no_meaning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="process: burst"):
        make_plan("llama-3.1-8b-a100", ["plan.objective=cheapest_job"], tmp_path / "points.sqlite")
    at_a_rate = ["plan.objective=cheapest", "plan.deadline_s=null"]
    with pytest.raises(SpecError, match="it is a job"):
        make_plan("summaries-8b-offline", at_a_rate, tmp_path / "points.sqlite")
    with pytest.raises(SpecError, match="jobs have deadlines"):
        make_plan("llama-3.1-8b-a100", ["plan.deadline_s=60"], tmp_path / "points.sqlite")

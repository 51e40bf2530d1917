"""A plan's choice through the scenario's own course of load: fixed replicas, and ones that follow it by thresholds."""

import json

import pytest

from perfmodel.files.yaml_loader import load_yaml_text
from perfmodel.planning.export import plan_files
from perfmodel.planning.result import PlanResult
from perfmodel.planning.search import make_plan
from perfmodel.report.terminal import as_text, render_text
from perfmodel.report.views.plan import brief_view, plan_json

DAY = "llama-3.1-8b-h100-day"
FEW = ("plan.finalists=1", "plan.seeds=1", "plan.num_requests=300", "plan.confidence=0")
STAGES = "[{rate: 3, duration_s: 60}, {rate: 20, duration_s: 80}, {rate: 3, duration_s: 80}]"
SCALING = (
    "{target: 20, min_replicas: 2, max_replicas: 6, cold_start_s: 5, interval_s: 5, scrape_interval_s: 5, "
    "keda: {pollingInterval: 20, activationThreshold: 3}"
)
WINDOW = "hpa: {behavior: {scaleDown: {stabilizationWindowSeconds: 15}}}}"


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> PlanResult:
    settings = (*FEW, f"traffic.arrivals.stages={STAGES}", f"cluster.autoscaling={SCALING}, {WINDOW}")
    found = make_plan(DAY, settings, tmp_path_factory.mktemp("plan") / "store.sqlite", workers=1)
    assert isinstance(found, PlanResult)
    return found


def test_fixed_replicas_are_paid_for_all_the_time(result):
    known, winner = result.elasticity, result.winner
    fixed = known.fixed
    assert fixed.target is None
    assert fixed.device_hours * 3600 == pytest.approx(winner.replicas * fixed.duration_s)
    assert fixed.usd == pytest.approx(2.5 * fixed.device_hours)


def test_thresholds_are_the_scenarios_own_and_shares_of_a_full_replica(result):
    """The higher the threshold, the fewer device hours; replicas in use add up to them."""
    known = result.elasticity
    assert known.scaled[0].target == 20
    runs = sorted(known.scaled, key=lambda run: run.target)
    hours = [run.device_hours for run in runs]
    assert len(runs) == 4
    assert hours[0] > hours[-1]
    for run in runs:
        ends = [row[0] for row in run.replicas_over_time[1:]] + [run.duration_s]
        spans = zip(run.replicas_over_time, ends, strict=True)
        area = sum((end - at) * in_use for (at, _, in_use), end in spans)
        assert area / 3600 == pytest.approx(run.device_hours, rel=1e-3)
        assert max(row[2] for row in run.replicas_over_time) == run.replicas_peak


def test_the_best_is_the_cheapest_that_meets_the_slo(result):
    known = result.elasticity
    good = [run for run in known.scaled if run.is_met]
    assert all(run.attained >= 0.9 for run in good)
    assert known.best is (min(good, key=lambda run: run.device_hours) if good else None)
    stated = json.loads(json.dumps(plan_json(result)))["over_the_load"]
    assert [run["target"] for run in stated["scaled"]] == [run.target for run in known.scaled]
    assert "Through the scenario's own load" in as_text(result)
    assert "Through the scenario's load, " in render_text(brief_view(result, "?"))  # on one screen, too


def test_the_exported_scaled_object_has_the_threshold_and_the_windows(result):
    files = plan_files(result)
    documents = [load_yaml_text(part, "operations").data for part in files["operations.yaml"].split("---\n")[1:]]
    spec = next(one["spec"] for one in documents if one["kind"] == "ScaledObject")
    best = result.elasticity.best
    assert best is not None
    assert float(spec["triggers"][0]["metadata"]["threshold"]) == pytest.approx(best.target, rel=1e-2)
    assert (spec["pollingInterval"], spec["minReplicaCount"], spec["maxReplicaCount"]) == (20, 2, 6)
    assert spec["triggers"][0]["metadata"]["activationThreshold"] == "3"
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == {"scaleDown": {"stabilizationWindowSeconds": 15}}

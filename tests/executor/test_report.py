"""The validation report by hand; needs no torch."""

import math

import numpy as np
import pytest

from perfmodel.cost.calibrations.calibration import Residuals
from perfmodel.engine import Outcome, Request, StepPlan
from perfmodel.errors import MissingExtraError
from perfmodel.evidence import Rows
from perfmodel.evidence.executed import bridge
from perfmodel.evidence.executed.compare import ExecutorComparison, ShadowedBackend, StepPair, report_executor
from perfmodel.ops.work import BatchShape
from perfmodel.sim.records.columns import RequestColumns, StepColumns
from perfmodel.sim.records.result import RunResult
from perfmodel.specs import load_scenario


def test_error_statistics_by_hand():
    rows = Rows([1.1, 1.8, 3.0], [1.0, 2.0, 3.0], ["a", "b", "c"], interval=(0.95, 1.05))
    stats = rows.stats()
    assert stats.mean_ape == pytest.approx(0.2 / 3)
    assert stats.median_ape == pytest.approx(0.1)
    assert stats.bias == pytest.approx(5.9 / 6 - 1)
    assert stats.interval_coverage == pytest.approx(1 / 3)
    assert [row["row"] for row in rows.worst("x", 2)] == ["a", "b"] or rows.worst("x", 1)[0]["row"] in "ab"


def test_what_has_no_measurement_is_left_out():
    rows = Rows([1.0, math.nan, 1.0], [1.0, 1.0, 0.0], ["kept", "nan", "zero"])
    assert rows.labels == ["kept"]


def requests(ids, finished):
    n = len(ids)
    return RequestColumns(
        request_id=np.array(ids),
        arrival_s=np.zeros(n),
        first_scheduled_s=np.zeros(n),
        first_token_s=np.full(n, 0.5),
        finished_s=np.array(finished),
        num_prompt_tokens=np.full(n, 10),
        num_output_tokens=np.full(n, 3),
        num_cached_tokens=np.zeros(n, dtype=int),
        num_preemptions=np.zeros(n, dtype=int),
        replica=np.zeros(n, dtype=int),
    )


def steps(*rows):
    """(index, number of equal steps, decodes, context of the first) of decode steps."""
    columns = {name: np.zeros(len(rows), dtype=int) for name in StepColumns.__dataclass_fields__}
    names = ("index", "num_steps", "num_decodes", "decode_context")
    columns |= dict(zip(names, np.array(rows).T, strict=True))
    columns["num_tokens"] = columns["num_decodes"]
    return StepColumns(**columns)


def comparison():
    scenario = load_scenario("tiny-llama-cpu")
    simulated = RunResult(scenario, "simulated", {}, requests([1, 0], [2.0, 1.0]), steps((0, 3, 2, 20)))
    executed = RunResult(
        scenario, "executed", {}, requests([0, 1], [1.25, 2.0]), steps((0, 1, 2, 20), (1, 1, 2, 22), (2, 1, 1, 13))
    )
    pairs = [StepPair(0, 2, 2, 20, 0, 1.0, 1.0), StepPair(1, 9, 1, 11, 1, 1.0, 2.0), StepPair(2, 8, 0, 0, 1, 3.0, 2.0)]
    return ExecutorComparison(simulated, executed, pairs)


def test_runs_are_joined_by_request_and_steps_grouped_by_kind():
    report = report_executor([comparison()], Residuals(num_rows=9, p10=-0.1, p90=0.1))
    document = report.to_json()
    assert document["kind"] == "executor"
    assert document["rows"] == document["covered"] == 5
    assert document["metrics"]["step"]["mean_ape"] == pytest.approx(1 / 3)
    assert document["metrics"]["e2el"]["mean_ape"] == pytest.approx(0.1)  # 1.0 for 1.25, 2.0 for 2.0
    assert document["metrics"]["e2el"]["interval_coverage"] == 0.5
    assert document["by"]["decode"]["step"]["mean_ape"] == 0
    assert document["by"]["mixed"]["step"]["bias"] == -0.5
    assert document["by"]["chunk"]["step"]["bias"] == 0.5
    assert document["by"]["decode batch 2-4"]["step"]["rows"] == 1
    assert document["worst"][0]["error"] == pytest.approx(-0.5)
    assert "2 of 3 executed steps had the same plan in the simulation." in document["notes"]
    assert "-50.0%" in str(report)


def test_several_runs_are_also_groups_of_their_own():
    report = report_executor([comparison(), comparison()], Residuals())
    assert report.metrics["e2el"].rows == 4
    assert report.by["run 2"]["e2el"].rows == 2
    assert report.metrics["e2el"].interval_coverage is None


def test_the_shadow_notes_predictions_and_returns_the_real_outcome():
    class Fixed:
        def __init__(self, duration):
            self.duration = duration

        def execute(self, plan):
            return Outcome(self.duration, [7])

    plan = StepPlan(4)
    plan.decodes, plan.decode_context = [Request(0, 0, 5, 2)], 6
    pairs = []
    shadowed = ShadowedBackend(Fixed(2 * 10**12), Fixed(10**12), pairs)
    assert shadowed.execute(plan) == Outcome(2 * 10**12, [7])
    assert pairs == [StepPair(4, 1, 1, 6, 0, 1.0, 2.0, BatchShape(1, 1, (), 1, 6, num_adapters=0, num_masks=0))]


@pytest.mark.parametrize("missing", ["torch", "perfmodel_executors"])
def test_a_missing_executor_is_one_sentence(monkeypatch, missing):
    monkeypatch.setattr(bridge, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(MissingExtraError, match=rf"executing needs {missing}.*\.\[executor\]"):
        bridge.load_executor()

"""Served scenarios of the measuring programme: with a technique and without, with drafts; and what is made of them."""

import shutil

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from perfmodel.evidence.executed.measured import served_steps, validate_measured  # noqa: E402
from perfmodel.evidence.fit.device import fit_measured  # noqa: E402
from perfmodel.evidence.sources.measured import (  # noqa: E402
    SIDES,
    ServingRecord,
    read_measurements,
)
from perfmodel.files.catalog import data_dir  # noqa: E402
from perfmodel.specs import load_hardware, load_scenario  # noqa: E402
from perfmodel_executors.gpu_suite.runner import Results  # noqa: E402
from perfmodel_executors.gpu_suite.serving import PAIRS, SCENARIOS, pair_tasks, serve, serving_tasks, sides_of  # noqa: E402  # noqa: E402
from perfmodel_executors.gpu_suite.task import Bench  # noqa: E402
from perfmodel_executors.models.support import check_capturable, check_engine, check_executable  # noqa: E402
from perfmodel_executors.run import as_executed  # noqa: E402
from perfmodel_executors.speculation.build import check_speculation  # noqa: E402

CPU = Bench(torch.device("cpu"), load_hardware("cpu"), "torch")
HERE = data_dir("reports") / "measured" / "cpu"
NAMES = [*(f"executor/{name}" for name in SCENARIOS), *(f"executor/pairs/{name}" for name in PAIRS)]


@pytest.mark.parametrize("name", NAMES)
def test_the_device_refuses_nothing_that_it_is_asked_to_serve(name):
    """What would be refused there would be half a minute lost; decodes are captured unless a file says otherwise."""
    for overrides in sides_of(name) if "pairs" in name else [()]:
        scenario = as_executed(load_scenario(name, ["hardware=h200-sxm", *overrides]))
        check_engine(scenario.engine)
        check_executable(scenario.model, scenario.engine.attention)
        check_speculation(scenario.model, scenario.engine)
        if not scenario.engine.enforce_eager:
            check_capturable(scenario.model, scenario.engine.attention)


def test_both_sides_of_a_pair_come_together_and_every_scenario_has_a_small_one():
    keys = [task.key for task in pair_tasks(CPU)]
    assert keys[::2] == [key.replace("without", "with") for key in keys[1::2]]
    assert [task.key for task in serving_tasks(CPU)] == list(SCENARIOS)


@pytest.mark.release
def test_a_pair_is_judged_without_the_device(tmp_path):
    """What was executed is its quotient of two runs; what is simulated comes from the steps alone."""
    for name in ("suite.json", "steps.json"):
        shutil.copy(HERE / name, tmp_path)
    name, results = "techniques/int8-weights", Results(tmp_path)
    for side, overrides in zip(SIDES, sides_of(name), strict=True):
        few = ["hardware=cpu", "traffic.num_requests=2", *overrides]
        results.put("pairs", f"int8-weights {side}", serve(name, few, CPU))
    results.put("pairs", "half with", results.part("pairs")["int8-weights with"])
    report = validate_measured(tmp_path)
    tpots = [results.part("pairs")[f"int8-weights {side}"]["summary"]["mean_tpot_ms"] for side in SIDES]
    (row,) = report.techniques
    assert row["executed"] == pytest.approx(tpots[1] / tpots[0])
    assert row["simulated"] > 1.0
    assert row["verdict"] in ("right", "missed", "proves nothing")
    assert "speedup" in report.metrics


@pytest.mark.release
def test_drafts_are_part_of_the_steps_and_their_worth_of_the_overrides():
    overrides = next(task for task in serving_tasks(CPU) if task.key == "speculation").run.args[1]
    record = ServingRecord(**serve("executor/speculation", [*overrides, "traffic.num_requests=2"], CPU))
    scenario = load_scenario(record.scenario, record.overrides)
    assert scenario.engine.speculative_config.acceptance.per_position
    steps = served_steps(record, scenario, fit_measured(read_measurements(HERE)))
    drafting = [step for step in steps if "drafted" in step.row.name]
    assert drafting
    assert all(step.metrics["serving_step"] > 0.0 for step in steps)

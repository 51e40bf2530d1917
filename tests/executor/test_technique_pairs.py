"""A technique's speedup on both clocks, on models that step in a millisecond."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402

from perfmodel.cost import plan_memory, step_costs  # noqa: E402
from perfmodel.files.catalog import data_dir  # noqa: E402
from perfmodel.ops.work import BatchShape  # noqa: E402
from perfmodel.specs import load_scenario  # noqa: E402
from perfmodel_executors.measure.protocol import PairedCases, measure_together  # noqa: E402
from perfmodel_executors.techniques import measure_technique  # noqa: E402

FOLDER = data_dir("scenarios") / "techniques"


def test_a_pair_is_calibrated_simulated_and_executed_for_each_seed():
    scenario = load_scenario(FOLDER / "static-batching.yaml", ["traffic.num_requests=3"])
    scenario = scenario.model_copy(update={"model": MODELS["gqa"]})
    alone = scenario.model_copy(update={"engine": scenario.engine.model_copy(update={"batching": "none"})})
    runs = measure_technique(scenario, alone, "output_throughput", repeats=2, min_rounds=2)
    assert len(runs) == 2
    assert all(value > 0 for run in runs for value in (*run.simulated, *run.executed))
    assert runs[0].simulated != runs[1].simulated  # another seed, another workload


def test_times_of_models_timed_together_compare_whatever_the_machine_does():
    """A machine whose speed drifts threefold: the ratio of two models' steps is that of their work."""

    class Machine:
        now = 0.0

        def work(self, amount):
            def run():
                self.now += amount * (1 + 2 * min(1.0, self.now / 1e6))

            return run

    machine = Machine()
    groups = [
        PairedCases({"step": machine.work(100)}, machine.work(50)),
        PairedCases({"step": machine.work(200)}, machine.work(80)),
    ]
    small, large = measure_together(groups, min_rounds=300, budget_s=0, clock_ns=lambda: machine.now)
    assert large.seconds["step"] / small.seconds["step"] == pytest.approx(2, rel=0.02)


def test_a_cpu_gains_nothing_by_2_4():
    """It multiplies the expanded weights: the time and the memory are those of dense ones."""
    base = ["hardware=cpu", "engine.dtype=bfloat16", "engine.max_model_len=512"]
    sparse, dense = (
        load_scenario("tiny-llama-cpu", [*base, *more]) for more in (["model_changes.prune={kind: '2:4'}"], [])
    )
    shape = BatchShape(4, 4, num_decodes=4, decode_context=400)
    times = [step_costs(each).estimate(shape).duration_s for each in (sparse, dense)]
    assert times[0] == times[1]
    plans = [plan_memory(each.model, each.hardware, each.engine).weight_bytes for each in (sparse, dense)]
    assert plans[0] == plans[1]

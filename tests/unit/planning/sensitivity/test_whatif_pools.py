"""What-ifs of pools: steps are those of the replicas that take them, and what the KV link does is among what counts."""

import pytest

from perfmodel.cost import plan_memory, step_costs
from perfmodel.planning.axes import suspects
from perfmodel.planning.points import Point, batch_shape, evaluate
from perfmodel.planning.typical_step import StepSpec, engine_of_step, typical_step
from perfmodel.planning.whatif import ask_whatif
from perfmodel.report.views.whatif import whatif_sentences
from perfmodel.specs import load_scenario

NAME = "llama-3.1-70b-h100-disaggregated"  # prompts on two replicas of TP4, decodes on one of TP8


@pytest.mark.parametrize(("step", "devices"), [(StepSpec(batch=16, context=4096), 8), (StepSpec(prefill=8192), 4)])
def test_a_step_is_of_the_pool_that_takes_it(step: StepSpec, devices: int) -> None:
    alone = ("cluster={replicas: 1}", f"engine.tensor_parallel_size={devices}")
    here, there = (evaluate(Point(NAME, ("step_ms",), more, (), step)).values["step_ms"] for more in ((), alone))
    assert here == there


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (2, 2), (4, 2)])
def test_the_typical_step_is_of_the_replicas_that_decode(prefill: int, decode: int) -> None:
    """Little's law for each of them: batch = rate / decode replicas x 200 tokens x time of a step of that batch."""
    pools = f"cluster={{pools: [{{role: prefill, replicas: {prefill}}}, {{role: decode, replicas: {decode}}}]}}"
    scenario = load_scenario(NAME, [pools, "traffic.arrivals.rate=16"])
    costs = step_costs(engine_of_step(scenario))
    shape = typical_step(scenario, lambda shape: costs.estimate(shape).duration_s).shape
    assert shape.num_decodes == pytest.approx(16 / decode * 200 * costs.estimate(shape).duration_s, abs=1)


def test_the_link_of_kv_is_varied() -> None:
    assert "cluster.kv_transfer.bandwidth_bytes_per_s=0.5x..2x:3" in suspects(load_scenario(NAME))
    assert not [path for path in suspects(load_scenario("llama-3.1-8b-a100")) if "kv_transfer" in path]


def test_batches_that_cannot_be_are_told() -> None:
    """An 8B model's KV cache of 131,072 bytes a token: what 80 GB hold besides its weights ends the batch."""
    overrides = ("engine.max_num_seqs=2048", "step.batch=8", "step.context=8000", "traffic.num_requests=20")
    found = ask_whatif("llama-3.1-8b-a100", ["step.batch=1..4096:7"], overrides, ("step_ms",), workers=1)
    scenario = load_scenario("llama-3.1-8b-a100", overrides[:1])
    plan = plan_memory(scenario.model, scenario.hardware, scenario.engine)
    assert found.largest_batch == plan.num_kv_blocks // 500  # of 16 tokens
    words = " ".join(whatif_sentences(found))
    assert f"Batches of such sequences end at {found.largest_batch} here, by the KV cache." in words
    assert "No batch makes the step as a whole compute-bound" in words
    costs = step_costs(scenario)
    assert costs.estimate(batch_shape(StepSpec(batch=4096, context=8000), scenario)).bound == "memory"

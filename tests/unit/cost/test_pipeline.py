"""Pipeline stages without a clock: how a step is shared out, how long a round takes, and what is lost in bubbles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import (
    GraphCostModel,
    OperatorTimer,
    StagedCostModel,
    StepTables,
    estimate_step,
    load_calibration,
    load_engine_profile,
)
from perfmodel.cost.steps.stages import StageTimes, plans_of_round, round_time, step_cost_model
from perfmodel.ops import BatchShape, build_graph, decode_shape
from perfmodel.specs import EngineSpec, load_hardware, load_model

H100 = load_hardware("h100-sxm-80gb")
MODEL = load_model("llama-3.1-70b")
PROFILE = load_engine_profile("vllm")
TIMER = OperatorTimer(H100, PROFILE.applied_to(load_calibration(H100, "vllm"), is_eager=False))


def graph_of(pp: int, tp: int = 1, **engine: object):
    return build_graph(MODEL, EngineSpec(tensor_parallel_size=tp, pipeline_parallel_size=pp, **engine))


def circulated(plans: list[StageTimes], rounds: int = 60) -> float:
    """The definition of a round: plans go through the flow line again and again; the mean of the last rounds."""
    ends, host, backs = [0.0] * len(plans[0].stages), 0.0, [0.0] * len(plans)
    at = []
    for _ in range(rounds):
        for number, plan in enumerate(plans):
            start = max(backs[number], host)
            end, host = start + plan.serial, start + plan.serial + plan.hidden
            for stage, duration in enumerate(plan.stages):
                end = ends[stage] = max(end, ends[stage]) + duration
            backs[number] = max(end, host)
        at.append(backs[-1])
    half = rounds // 2
    return (at[-1] - at[half - 1]) / (rounds - half)


@st.composite
def plans(draw: st.DrawFn, num_stages: int) -> StageTimes:
    stages = draw(st.lists(st.integers(1, 100), min_size=num_stages, max_size=num_stages))
    return StageTimes(draw(st.integers(0, 50)), draw(st.integers(0, 200)), tuple(stages))


@given(st.integers(1, 5).flatmap(plans), st.integers(1, 5))
def test_a_round_is_what_equal_plans_that_circulate_take(plan: StageTimes, count: int) -> None:
    assert circulated([plan] * count) == pytest.approx(round_time({plan: count}), rel=1e-9)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(plans(n), min_size=1, max_size=4, unique=True)))
def test_unequal_plans_take_a_round_at_least_and_little_more(found: list[StageTimes]) -> None:
    """Circuits over several plans have as many turns as plans: at most the mean of the two kinds that are counted."""
    expected = round_time(dict.fromkeys(found, 1))
    assert expected * (1 - 1e-9) <= circulated(found) <= 1.5 * expected


@given(st.integers(1, 300), st.integers(1, 5000), st.lists(st.integers(2, 3000), max_size=5), st.integers(1, 8))
def test_plans_share_a_step_out(batch: int, context: int, chunks: list[int], num_stages: int) -> None:
    prefills = tuple((chunk, 100) for chunk in chunks)
    tokens = batch + sum(chunks)
    shape = BatchShape(tokens, batch + len(chunks), prefills, batch, batch * context)
    found = plans_of_round(shape, num_stages)
    count = sum(found.values())
    assert count == min(num_stages, batch + len(chunks))
    dealt = sorted(each for plan, times in found.items() for each in plan.prefills * times)
    assert dealt == sorted(prefills)
    for name in ("num_tokens", "num_samples", "num_decodes", "decode_context"):
        total = sum(times * getattr(plan, name) for plan, times in found.items())
        assert getattr(shape, name) <= total < getattr(shape, name) + count
    most, fewest = (pick(len(plan.prefills) for plan in found) for pick in (max, min))
    assert most - fewest <= 1


def test_equal_stages_and_as_many_plans_lose_nothing_but_the_head() -> None:
    """80 layers over 4 stages. The last has the LM head, too, which the others wait for."""
    found = estimate_step(graph_of(4), TIMER, decode_shape(256, 1000))
    assert found.pipeline is not None
    assert found.pipeline.num_plans == 4
    *others, last = found.pipeline.stage_s
    assert found.duration_s == pytest.approx(4 * last)
    assert found.pipeline.bubble_share == pytest.approx(1 - (sum(others) + last) / (4 * last))
    assert found.pipeline.bubble_share < 0.1


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_fewer_sequences_than_stages_leave_stages_idle(batch: int) -> None:
    found = estimate_step(graph_of(4), TIMER, decode_shape(batch, 1000))
    assert found.pipeline is not None
    assert found.pipeline.num_plans == batch
    assert found.duration_s == found.pipeline.latency_s  # nobody waits for anybody
    assert found.pipeline.bubble_share == pytest.approx(1 - batch / 4, abs=0.03)  # and a little for the host


def test_a_sequence_alone_is_as_slow_as_on_one_device_and_slower_by_the_messages() -> None:
    shape = decode_shape(1, 1000)
    one, four = (estimate_step(graph_of(pp, 2), TIMER, shape) for pp in (1, 4))
    hops = sum(row.duration_s for row in four.rows if row.name in ("send_recv", "stage_all_gather"))
    assert hops > 0
    assert four.duration_s == pytest.approx(one.duration_s + 4 * hops, rel=1e-9)  # rows are a device's mean


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [decode_shape(7, 900), BatchShape(2100, 9, ((2000, 0), (92, 500)), 8, 9000)])
def test_prices_and_estimates_agree_about_steps_in_stages(pp: int, shape: BatchShape) -> None:
    cost_model = step_cost_model(StepTables(graph_of(pp), TIMER))
    assert cost_model.duration_ps(shape) * 1e-12 == pytest.approx(cost_model.explain(shape).duration_s, rel=2e-3)


def test_the_rows_of_a_device_are_what_its_stages_are_busy_with() -> None:
    """Two of four plans have a prompt."""
    graph, shape = graph_of(4), BatchShape(2100, 10, ((2000, 0), (92, 500)), 8, 8000)
    found = estimate_step(graph, TIMER, shape)
    assert found.pipeline is not None
    assert found.pipeline.num_plans == 4
    assert sum(found.bound_share.values()) == pytest.approx(1.0)
    busy = (1 - found.pipeline.bubble_share) * found.duration_s
    assert found.device_s == pytest.approx(busy, rel=1e-9)  # which launches of the prompt hide behind


def test_a_prompt_in_one_of_several_plans_holds_all_of_them_up() -> None:
    """They follow each other, so a round lasts until the longest is through all stages."""
    graph = graph_of(4)
    alone = estimate_step(graph, TIMER, BatchShape(4096 + 16, 17, ((4096, 0),), 16, 16_000))
    beside = estimate_step(graph, TIMER, BatchShape(4096 + 64, 65, ((4096, 0),), 64, 64_000))
    assert beside.pipeline is not None
    assert beside.pipeline.num_plans == 4
    assert beside.duration_s == beside.pipeline.latency_s == pytest.approx(alone.duration_s, rel=0.02)
    assert beside.pipeline.bubble_share > 0.5


def test_usage_is_that_of_a_device_on_the_average_of_the_stages() -> None:
    shape = decode_shape(256, 1000)
    one, four = GraphCostModel(StepTables(graph_of(1), TIMER)), StagedCostModel(StepTables(graph_of(4), TIMER))
    one.duration_ps(shape)
    times = four.pass_through(shape)
    assert four.usage().flops == pytest.approx(one.usage().flops / 4)
    assert four.usage().busy_s == pytest.approx(sum(times.stages) / 4e12, rel=1e-6)


def test_the_host_plans_a_batch_once_and_launches_the_layers_where_they_are() -> None:
    """All that the host adds to a step with prompts on one device is still there, summed over the way of a plan."""
    shape = BatchShape(2100, 9, ((2000, 0), (92, 500)), 8, 9000)
    one, four = estimate_step(graph_of(1), TIMER, shape), estimate_step(graph_of(4), TIMER, decode_shape(1, 1))
    assert four.serial_host_s == TIMER.calibration.host.serial_s(1)
    shown = one.duration_s - one.device_s
    times = StagedCostModel(StepTables(graph_of(4), TIMER)).pass_through(shape)
    device = sum(estimate_step(stage, TIMER, shape).device_s for stage in graph_of(4).stages)
    assert (times.serial + sum(times.stages)) * 1e-12 - device == pytest.approx(shown, rel=1e-3)


def test_stages_differ_where_their_messages_leave_the_node() -> None:
    """16 devices on nodes of 8, two to a stage: only the fourth of eight sends leaves its node, and is slower."""
    graph = graph_of(8, 2)
    tables = StepTables(graph, TIMER)
    times = StagedCostModel(tables).pass_through(decode_shape(64, 1000))
    middle = times.stages[1:7]
    assert len({id(stage) for stage in tables.stages[1:7]}) == 2
    assert [time > min(middle) for time in middle] == [False, False, True, False, False, False]

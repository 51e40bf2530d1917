"""Pricers say what the step estimate says, only faster."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost import (
    Calibration,
    FamilyFit,
    GraphCostModel,
    HostFit,
    OperatorTimer,
    StepTables,
    estimate_step,
    peak_flops_per_s,
)
from perfmodel.cost.steps.tables import Usage
from perfmodel.models.changes import CHANGES
from perfmodel.models.model_changes import ModelChanges
from perfmodel.ops import BatchShape, StepGraph, build_graph, decode_shape
from perfmodel.specs import EngineSpec, load_hardware, load_model

MODELS = ("llama-3.1-8b", "gpt-oss-20b", "deepseek-v3", "nemotron-h-56b", "qwen3.5-35b-a3b")
HARDWARE = load_hardware("h100-sxm-80gb")
GRAPHS = {name: build_graph(load_model(name), EngineSpec(tensor_parallel_size=2)) for name in MODELS}
LEAVING = ModelChanges.model_validate({"early_exit": {"expected_share": 0.5}})
GRAPHS["llama-3.1-8b, tokens leave"] = build_graph(
    CHANGES["early_exit"](load_model("llama-3.1-8b"), LEAVING), EngineSpec(tensor_parallel_size=2)
)
FITTED = Calibration(
    device="h100-sxm-80gb",
    engine="test",
    default=FamilyFit(compute_fraction=0.7, memory_fraction=0.8, overhead_s=3e-6, knee=2.0),
    host=HostFit(serial_step_s=2e-4, serial_per_sequence_s=5e-6, hidden_step_s=4e-3, hidden_per_sequence_s=2e-5),
)
CALIBRATIONS = {"datasheet": None, "fitted": FITTED}


def graph_and_timer(model: str, calibration: str) -> tuple[StepGraph, OperatorTimer]:
    return GRAPHS[model], OperatorTimer(HARDWARE, CALIBRATIONS[calibration])


shapes = st.builds(
    lambda decodes, context, chunks: (decodes, decodes * context, tuple(chunks)),
    st.integers(0, 300),
    st.integers(1, 20_000),
    st.lists(st.tuples(st.integers(2, 2048), st.integers(0, 8000)), max_size=3),
)


@pytest.mark.parametrize("calibration", sorted(CALIBRATIONS))
@pytest.mark.parametrize("model", GRAPHS)
@given(shapes)
@settings(max_examples=40, deadline=None)
def test_a_step_takes_what_the_estimate_says(
    model: str, calibration: str, drawn: tuple[int, int, tuple[tuple[int, int], ...]]
) -> None:
    decodes, context, chunks = drawn
    if not decodes and not chunks:
        return
    graph, timer = graph_and_timer(model, calibration)
    tokens = decodes + sum(new for new, _ in chunks)
    windowed = tuple(min(context, decodes * span) for span in graph.model.attention_spans)
    samples = decodes + len(chunks)
    shape = BatchShape(tokens, samples, chunks, decodes, context, windowed)
    expected = estimate_step(graph, timer, shape).duration_s
    picoseconds = GraphCostModel(StepTables(graph, timer)).duration_ps(shape)
    assert picoseconds / 1e12 == pytest.approx(expected, rel=3e-3)


@pytest.mark.parametrize("calibration", sorted(CALIBRATIONS))
@pytest.mark.parametrize("model", MODELS)
@given(st.integers(1, 200), st.integers(1, 9000), st.integers(1, 300), st.integers(1, 10**12))
@settings(max_examples=40, deadline=None)
def test_a_run_is_the_sum_of_its_steps_to_the_last_picosecond(
    model: str, calibration: str, batch: int, mean_context: int, num_steps: int, elapsed: int
) -> None:
    graph, timer = graph_and_timer(model, calibration)
    spans = graph.model.attention_spans
    growth = tuple(batch // 2 for _ in spans)
    windowed = tuple(min(span, mean_context) * batch for span in spans)
    together, single = GraphCostModel(StepTables(graph, timer)), GraphCostModel(StepTables(graph, timer))
    run = together.run(BatchShape(batch, batch, (), batch, batch * mean_context, windowed), growth, num_steps)
    steps = [
        single.duration_ps(
            BatchShape(
                batch,
                batch,
                (),
                batch,
                batch * (mean_context + i),
                tuple(w + i * g for w, g in zip(windowed, growth, strict=True)),
            )
        )
        for i in range(num_steps)
    ]
    assert run.first_duration == steps[0]
    assert run.duration(num_steps) == sum(steps)
    assert run.duration(num_steps // 2) == sum(steps[: num_steps // 2])
    reached = run.steps_to_reach(elapsed)
    assert 1 <= reached <= num_steps
    assert reached == num_steps or sum(steps[:reached]) >= elapsed
    assert reached == 1 or sum(steps[: reached - 1]) < elapsed
    run.apply_leap(num_steps)
    one, other = together.usage(), single.usage()
    assert one.flops == pytest.approx(other.flops, rel=1e-9)
    assert one.hbm_bytes == pytest.approx(other.hbm_bytes, rel=1e-9)
    assert one.busy_s == pytest.approx(other.busy_s, rel=1e-6)


def test_usage_adds_up_to_the_steps_it_came_from() -> None:
    graph, timer = graph_and_timer("llama-3.1-8b", "datasheet")
    cost_model = GraphCostModel(StepTables(graph, timer))
    total, flops = 0.0, 0.0
    for i in range(1, 200, 7):
        shape = BatchShape(i + 100, i + 1, ((100, 50 * i),), i, i * 1000)
        total += cost_model.duration_ps(shape) / 1e12
        flops += estimate_step(graph, timer, shape).flops
    usage = cost_model.usage()
    assert usage.flops == pytest.approx(flops, rel=1e-6)
    assert usage.busy_s == pytest.approx(total, rel=1e-3)


def test_memory_of_prefill_shapes_is_bounded_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[GraphCostModel.__module__], "_MAX_KNOWN", 10)
    graph, timer = graph_and_timer("llama-3.1-8b", "datasheet")
    bounded = GraphCostModel(StepTables(graph, timer))
    for length in range(2, 102):
        bounded.duration_ps(BatchShape(length, 1, ((length, 0),)))
    monkeypatch.undo()
    free = GraphCostModel(StepTables(graph, timer))
    for length in range(2, 102):
        free.duration_ps(BatchShape(length, 1, ((length, 0),)))
    assert bounded.usage().flops == pytest.approx(free.usage().flops)
    assert len(bounded._prompts.known) <= 10


def test_a_run_under_way_counts_all_the_same_when_other_costs_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty steps foreseen, then taken after thirty unlike ones: the FLOPs of fifty steps."""
    graph, timer = graph_and_timer("llama-3.1-8b", "datasheet")
    shapes = [BatchShape(length, 1, ((length, 0),)) for length in range(2, 32)]
    monkeypatch.setattr(sys.modules[GraphCostModel.__module__], "_MAX_KNOWN", 5)
    cost_model, decodes = GraphCostModel(StepTables(graph, timer)), decode_shape(8, 1000)
    run = cost_model.run(decodes, (), 20)
    for shape in shapes:
        cost_model.duration_ps(shape)
    run.apply_leap(20)
    flops = sum(estimate_step(graph, timer, shape).flops for shape in shapes)
    flops += sum(estimate_step(graph, timer, decode_shape(8, 1000 + i)).flops for i in range(20))
    assert cost_model.usage().flops == pytest.approx(flops, rel=1e-9)


def test_usage_scales_with_the_number_of_steps() -> None:
    one = Usage(1.0, 2.0, 3.0, 0.5, {"compute": 4.0, "memory": 5.0, "communication": 6.0, "overhead": 7.0})
    total = Usage()
    total.add(one, 3.0)
    total.add(one, 1.0)
    assert (total.flops, total.peak_compute_s, total.hbm_bytes, total.unspent_compute_s) == (4.0, 8.0, 12.0, 2.0)
    assert total.bound_s == {"compute": 16.0, "memory": 20.0, "communication": 24.0, "overhead": 28.0}
    assert total.busy_s == 88.0


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_utilization_is_over_the_whole_step_and_bound_shares_sum_to_one(calibration: str) -> None:
    """A small step: with a fitted host model, the host takes longer than the device."""
    graph, timer = graph_and_timer("llama-3.1-8b", calibration)
    estimate = estimate_step(graph, timer, decode_shape(2, 100))
    assert (estimate.duration_s > estimate.device_s) == (calibration == "fitted")
    assert estimate.hbm_bytes == pytest.approx(sum(row.count * row.work.hbm_bytes for row in estimate.rows))
    assert estimate.flops == pytest.approx(sum(row.count * row.work.flops for row in estimate.rows))
    assert estimate.mbu * estimate.duration_s * HARDWARE.memory_bandwidth == pytest.approx(estimate.hbm_bytes)
    at_peaks = sum(row.count * row.work.flops / peak_flops_per_s(HARDWARE, row.work.rate) for row in estimate.rows)
    assert estimate.mfu * estimate.duration_s == pytest.approx(at_peaks)
    assert sum(estimate.bound_share.values()) == pytest.approx(1.0)


def test_steps_to_reach_inverts_the_duration_of_a_run() -> None:
    """To the picosecond, also between two linear segments over the context."""
    run = GraphCostModel(StepTables(*graph_and_timer("llama-3.1-8b", "datasheet"))).run(decode_shape(3, 200), (), 400)
    for count in range(1, 400):
        end = run.duration(count)
        assert (run.steps_to_reach(end), run.steps_to_reach(end + 1), run.steps_to_reach(end - 1)) == (
            count, count + 1, count,
        )  # fmt: skip

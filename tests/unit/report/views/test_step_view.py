"""A step as a document: its operators add up to it, its device's ridge points, its compiled kernels."""

import pytest

from perfmodel.planning.typical_step import estimate_choice
from perfmodel.report.document import Paragraph, Table, plain
from perfmodel.report.views.step import occupancy_view, ridge_points, step_view
from perfmodel.specs import load_scenario

KERNEL = {
    "kernel": "swapped_product_kernel",
    "tile": "EVEN_K=True BLOCK_M=32 BLOCK_N=64 SPLIT_K=4",
    "count": 64,
    "blocks": 256,
    "waves": 0.97,
    "warps": 4,
    "registers": 64,
    "shared_bytes": 98304,
    "spills": 0,
    "tensor_instructions": 8,
    "blocks_per_unit": 2,
    "occupancy": 0.125,
    "limited_by": "shared memory",
}


def tables(document):
    return [block for block in document.blocks if isinstance(block, Table)]


@pytest.mark.parametrize("overrides", [[], ["engine.pipeline_parallel_size=4"], ["engine.enforce_eager=true"]])
def test_rows_add_up_to_the_step(overrides):
    """Operators, bubbles and exposed host time are all that a step takes."""
    report = estimate_choice(load_scenario("llama-3.1-8b-h100-2048-256", overrides), batch=4, context=1000)
    (operators,) = tables(step_view(report))
    column = operators.head.index("ms")
    rows = [float(plain(row[column])) for row in operators.rows]
    assert sum(rows) == pytest.approx(float(plain(operators.total[column])), abs=0.0006 * len(rows))
    assert float(plain(operators.total[column])) == pytest.approx(report.estimate.duration_s * 1e3, abs=5e-4)


def test_a_roofline_begins_with_the_ridge_points():
    scenario = load_scenario("llama-3.1-8b-a100")
    assert ridge_points(scenario.hardware)["bf16"] == pytest.approx(153.0, abs=0.1)  # 312e12 / 2039e9
    ridges, _ = tables(step_view(estimate_choice(scenario), is_roofline=True))
    assert ("bf16", "312 TFLOP/s", "153.0") in ridges.rows


def test_stages_are_told_in_a_sentence():
    report = estimate_choice(load_scenario("llama-3.1-8b-a100", ["engine.pipeline_parallel_size=4"]), batch=2)
    lines = [plain(block.line) for block in step_view(report).blocks if isinstance(block, Paragraph)]
    assert any("Fewer sequences than stages leave 2 of them idle" in line for line in lines)


def test_a_compiled_kernel_is_a_row_with_its_tile_in_short():
    report = estimate_choice(load_scenario("llama-3.1-8b-a100"))
    (kernels,) = tables(occupancy_view(report, [KERNEL]))
    row = dict(zip(kernels.head, kernels.rows[0], strict=True))
    assert row["tile"] == "M=32 N=64 SPLIT_K=4"
    assert (row["SRAM"], row["waves"], row["per unit"]) == ("96.0 KiB", "0.97", "2 (12%)")
    assert row["limited by"] == "shared memory"

"""2:4 sparsity: multiplications are skipped, inputs are loaded as ever; without such units nothing is gained."""

import pytest

from perfmodel.cost import plan_memory, step_costs
from perfmodel.ops.work import BatchShape
from perfmodel.specs import load_scenario

SCENARIO = """
model: llama-2-7b
hardware: {hardware}
model_changes: {changes}
traffic: {{arrivals: {{process: burst}}, num_requests: 1, input_tokens: {{distribution: fixed, value: 9}},
  output_tokens: {{distribution: fixed, value: 9}}}}
"""


def linear_times(tmp_path, hardware, changes, num_tokens):
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO.format(hardware=hardware, changes=changes))
    rows = step_costs(load_scenario(path)).estimate(BatchShape(num_tokens, 1, ((num_tokens, 0),))).rows
    return {row.name: row.time.duration_s for row in rows if row.name.endswith("_proj")}


@pytest.mark.parametrize("hardware", ["a100-sxm-80gb", "h100-sxm-80gb"])
@pytest.mark.parametrize("num_tokens", [1, 64, 2048])
def test_sparse_products_gain_less_than_the_unit_promises(tmp_path, hardware, num_tokens):
    dense = linear_times(tmp_path, hardware, "{}", num_tokens)
    sparse = linear_times(tmp_path, hardware, "{prune: {kind: '2:4'}}", num_tokens)
    gains = [dense[name] / sparse[name] for name in dense]
    assert all(1.0 <= gain <= 2.0 for gain in gains)
    assert min(gains) < 2.0  # inputs are as many as before


def test_a_cpu_multiplies_the_zeros(tmp_path):
    assert linear_times(tmp_path, "cpu", "{}", 8) == linear_times(tmp_path, "cpu", "{prune: {kind: '2:4'}}", 8)
    path = tmp_path / "s.yaml"
    plans = []
    for changes in ("{}", "{prune: {kind: '2:4'}}"):
        path.write_text(SCENARIO.format(hardware="cpu", changes=changes))
        scenario = load_scenario(path)
        plans.append(plan_memory(scenario.model, scenario.hardware, scenario.engine).weight_bytes)
    assert plans[0] == plans[1]

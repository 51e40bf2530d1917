"""2:4 sparsity: multiplications are skipped, inputs are loaded as ever; without such units nothing is gained."""

import pytest

from perfmodel.cost import plan_memory, step_costs
from perfmodel.cost.kernel_models.device import peak_flops_per_s
from perfmodel.ops.work import BatchShape
from perfmodel.specs import load_hardware, load_scenario

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


@pytest.mark.parametrize(
    ("device", "rate", "sparse_pflops"),
    [
        ("b300-sxm", "fp4", 18.0),  # HGX B300: 144 PFLOP/s of eight, 108 dense
        ("gb300", "fp4", 20.0),  # GB300 NVL72: 1,440 PFLOP/s of 72, 1,080 dense
        ("b300-sxm", "fp8", 9.0),  # 72 PFLOP/s of eight
        ("b200-sxm", "fp4", 18.0),  # HGX B200: 144 PFLOP/s of eight, 72 dense
        ("h100-sxm-80gb", "fp8", 3.958),  # H100 datasheet
    ],
)
def test_sparse_peaks_are_those_of_the_datasheets(device, rate, sparse_pflops):
    found = peak_flops_per_s(load_hardware(device), f"{rate}@2:4")
    assert found == pytest.approx(sparse_pflops * 1e15, rel=0.01)

"""The kernels of a whole step: what the decoder launches for a model's real shapes, compiled for a GPU."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel.errors import SpecError  # noqa: E402
from perfmodel.ops.work import BatchShape, decode_shape  # noqa: E402
from perfmodel.specs import load_scenario  # noqa: E402
from perfmodel_executors.compiled.step import explain_occupancy  # noqa: E402


@pytest.fixture(scope="module")
def scenario():
    return load_scenario("tiny-llama-cpu", ["hardware=h100-sxm-80gb"])


def test_a_decode_step_launches_each_layers_kernels_once(scenario):
    layers = scenario.model.num_layers
    rows = explain_occupancy(scenario, decode_shape(8, 256))
    counts = {row["kernel"]: 0 for row in rows}
    for row in rows:
        counts[row["kernel"]] += row["count"]
    assert counts["attention_decode_kernel"] == layers
    assert counts["rope_kv_write_kernel"] == layers
    assert counts["activate_kernel"] == layers
    assert counts["swapped_product_kernel"] == 4 * layers + 1  # qkv, out, up, down, and the head
    assert all(row["waves"] > 0 and row["spills"] == 0 for row in rows)


def test_a_prompt_uses_the_tensor_cores(scenario):
    rows = explain_occupancy(scenario, BatchShape(256, 1, prefills=((256, 0),)))
    tensor = {row["kernel"] for row in rows if row["tensor_instructions"]}
    assert "attention_prefill_kernel" in tensor
    assert "many_tokens_kernel" in tensor


def test_a_device_without_these_kernels_is_a_sentence():
    with pytest.raises(SpecError, match="cpu: Triton kernels are built for CUDA devices"):
        explain_occupancy(load_scenario("tiny-llama-cpu"), decode_shape(1, 16))

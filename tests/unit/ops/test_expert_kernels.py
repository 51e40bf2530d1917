"""How engines run experts, norms over all heads and DSA's indexer: by the facts of their descriptions."""

import pytest

from perfmodel.ops.formats import linear_format, served_model
from perfmodel.ops.graphs.step import build_graph
from perfmodel.ops.work import decode_shape
from perfmodel.specs import EngineSpec, load_hardware, load_model
from perfmodel.specs.engine.devices import with_defaults


def names(model, **engine):
    hardware = load_hardware(engine.pop("hardware", "b200-sxm"))
    return {node.name for node in build_graph(load_model(model), EngineSpec(**engine), hardware=hardware).nodes}


@pytest.mark.parametrize("profile", ["vllm", "sglang", "trtllm"])
def test_mxfp4_meets_mxfp8_where_there_are_units_for_it_and_16_bits_elsewhere(profile):
    """gpt-oss: 4.25 bits a weight either way; inputs of 8.25 bits (OCP MX 1.0) or of 16."""
    for device, rate, input_bytes, quantizes in (
        ("h100-sxm-80gb", "bf16", 2.0, False),
        ("b200-sxm", "fp8", 8.25 / 8, True),
    ):
        served = served_model(load_model("gpt-oss-120b"), EngineSpec(profile=profile), load_hardware(device))
        form = linear_format(served, "experts")
        assert (form.rate, form.input_bytes, form.quantizes_input) == (rate, input_bytes, quantizes)
        assert form.weight_bytes == pytest.approx(4.25 / 8)


def test_kernels_that_choose_the_experts_leave_no_choice_to_others():
    assert "topk" in names("gpt-oss-120b", hardware="h100-sxm-80gb")
    assert "topk" not in names("gpt-oss-120b")


def test_a_norm_over_all_heads_asks_the_other_ranks():
    """One message of two sums a token and layer; none on a single device, none where each head has its own norm."""
    assert "qk_norm_all_reduce" not in names("minimax-m2.5")
    assert "qk_norm_all_reduce" not in names("qwen3-32b", tensor_parallel_size=4)
    graph = build_graph(load_model("minimax-m2.5"), EngineSpec(tensor_parallel_size=4))
    node = next(node for node in graph.nodes if node.name == "qk_norm_all_reduce")
    assert node.count == graph.num_layers
    message = node.work(decode_shape(3, 100)).message
    assert (message.bytes_, message.num_ranks) == (3 * 2 * 4, 4)


def test_an_indexer_prepares_queries_and_keys():
    graph = build_graph(load_model("glm-5"), EngineSpec())
    nodes = {node.name: node for node in graph.nodes}
    work = nodes["index_prepare"].work(decode_shape(4, 100))
    assert work.num_kernels == 6
    assert work.activation_bytes > 4 * 32 * 128 * (2 + 2)  # queries of 32 heads are read and written at least once
    assert nodes["index_weights_proj"].count == nodes["index_decode"].count


def test_tensorrt_llm_sends_tokens_beside_a_grace_cpu_and_gathers_them_elsewhere():
    engine = EngineSpec(profile="trtllm", data_parallel_size=4, enable_expert_parallel=True)
    assert with_defaults(engine, load_hardware("b200-sxm")).gathers_tokens
    assert not with_defaults(engine, load_hardware("gb200")).gathers_tokens
    given = EngineSpec(**{**engine.model_dump(exclude_unset=True), "all2all_backend": "pplx"})
    assert not with_defaults(given, load_hardware("b200-sxm")).gathers_tokens

"""How engines run experts, norms over all heads and DSA's indexer: by the facts of their descriptions."""

import pytest

from perfmodel.cost import OperatorTimer, load_calibration
from perfmodel.cost.steps.overlap import lane_of
from perfmodel.ops.formats import linear_format, served_model
from perfmodel.ops.graphs.step import build_graph
from perfmodel.ops.work import BatchShape, decode_shape
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


def work_of_experts(version, device="h100-sxm-80gb", num_tokens=64, **engine):
    """Works of decoding tokens by operator name, of 128 experts with 8 for each token, in blocks of FP8."""
    spec = EngineSpec(version=version, quantization="fp8_block", **engine)
    hardware = load_hardware(device)
    graph = build_graph(served_model(load_model("qwen3-235b-a22b"), spec, hardware), spec, hardware=hardware)
    shape = decode_shape(num_tokens, 100)
    works = {node.name: node.work(shape) for node in graph.nodes if node.name.startswith("experts")}
    return {name: work for name, work in works.items() if work.num_kernels}


def test_deepgemm_multiplies_every_block_that_might_have_been_needed():
    """vLLM 0.11.1 and 0.12: 64 tokens x 8 + 128 experts x 127 rows, in whole blocks of 128, whoever was chosen; from
    0.13 on only blocks with a token; FlashInfer's kernel from 0.15 on."""
    works = work_of_experts("0.12.0")
    up, down = works["experts_up_proj"].problem, works["experts_down_proj"].problem
    assert (up.m, up.n, up.k) == (16_768, 2 * 1536, 4096)
    assert (down.m, down.n, down.k) == (16_768, 4096, 1536)
    assert works["experts_activation"].activation_bytes == 3 * 16_768 * 1536 * 2
    skipped = work_of_experts("0.13.0")
    assert skipped["experts_up_proj"].problem.m == pytest.approx(128 * 128, rel=0.1)  # most experts have one block
    assert skipped["experts_up_proj"].problem.m < 128 * 128
    assert skipped["experts_activation"] == works["experts_activation"]
    (whole,) = work_of_experts("0.15.0").values()
    # Permutation and combination move the 512 chosen rows alone, the former in FP8, into which it quantizes 64. Scales,
    # 32 of 32 bits a row, are read and written for all rows.
    chosen = 64 * 4096 * (2 + 1 + 1) + 512 * 4096
    assert works["experts_permute"].activation_bytes == chosen + 16_768 * 32 * (4 + 4)
    assert works["experts_combine"].activation_bytes == (512 + 64) * 4096 * 2
    # Each expert that was chosen is read once, by either way.
    read = works["experts_up_proj"].weight_bytes + works["experts_down_proj"].weight_bytes
    assert read == pytest.approx(whole.weight_bytes, rel=1e-6)
    assert whole.flops < works["experts_up_proj"].flops / 10


RANKS = {"version": "0.12.0", "enable_expert_parallel": True, "data_parallel_size": 4}


@pytest.mark.parametrize(
    ("engine", "is_aligned"),
    [
        ({"version": "0.10.2", "device": "b200-sxm"}, False),
        ({"version": "0.11.0", "num_tokens": 127}, False),  # Hopper: by the size of the step and of the experts
        ({"version": "0.11.0", "num_tokens": 128}, True),
        ({"version": "0.11.0", "num_tokens": 128, "tensor_parallel_size": 4}, False),  # 384 columns of an expert
        ({"version": "0.11.0", "device": "b200-sxm"}, True),
        ({"version": "0.11.1", "tensor_parallel_size": 8}, True),
        ({"version": "0.12.0", "device": "l40s"}, False),
        ({"version": "0.12.0", "tensor_parallel_size": 4}, True),
        ({"version": "0.12.0", "tensor_parallel_size": 8}, False),
        ({"version": "0.13.0", "tensor_parallel_size": 4, "data_parallel_size": 2}, False),  # cut over all eight
        ({"version": "0.14.1", "tensor_parallel_size": 8, "enable_expert_parallel": True}, True),
        ({"version": "0.14.1", "tensor_parallel_size": 8, "device": "b200-sxm"}, False),
        ({"version": "0.15.0"}, False),
        ({"version": "0.15.0", "device": "b200-sxm"}, False),
        ({**RANKS, "all2all_backend": "allgather_reducescatter"}, True),
        ({**RANKS, "all2all_backend": "deepep_high_throughput"}, False),  # the host knows each expert's tokens
    ],
)
def test_which_experts_run_deepgemm(engine, is_aligned):
    aligned = {f"experts_{part}" for part in ("permute", "up_proj", "activation", "down_proj", "combine")}
    assert work_of_experts(**engine).keys() == (aligned if is_aligned else {"experts"})


@pytest.mark.parametrize(
    ("version", "ranks", "kernel"),
    [
        ("0.14.1", "tensor_parallel_size", "Triton"),  # in eight parts, no DeepGEMM
        ("0.16.0", "tensor_parallel_size", "FlashInfer"),
        ("0.16.0", "enable_expert_parallel", "FlashInfer"),
        ("0.18.0", "tensor_parallel_size", "Triton"),
        ("0.18.0", "enable_expert_parallel", "FlashInfer"),
        ("0.30.0", "tensor_parallel_size", "Triton"),
        ("0.30.0", "enable_expert_parallel", "FlashInfer"),
    ],
)
def test_which_kernel_times_experts_that_deepgemm_does_not_run(version, ranks, kernel):
    """Of Hopper's kernels for blocks of FP8 tables time FlashInfer's alone without a rule for its tiles."""
    engine = {"tensor_parallel_size": 8, "enable_expert_parallel": ranks == "enable_expert_parallel"}
    (work,) = work_of_experts(version, "h200-sxm", **engine).values()
    fit = OperatorTimer(
        load_hardware("h200-sxm"), load_calibration(load_hardware("h200-sxm"), "vllm", version=version)
    ).fit(work)
    assert ("Triton" if fit.tile_rule else "FlashInfer") == kernel


@pytest.mark.parametrize(
    ("version", "device", "launches"),
    [("0.12.0", "h100-sxm-80gb", 6), ("0.12.0", "b200-sxm", 7), ("0.13.0", "b200-sxm", 6)],
)
def test_deepgemm_lays_out_the_scales_of_permuted_rows(version, device, launches):
    """Quantize, count, zero expert ids, scatter twice, and scales: on Blackwell before both products, until 0.13."""
    assert work_of_experts(version, device)["experts_permute"].num_kernels == launches


def test_all_kernels_of_the_experts_are_with_the_experts():
    """Where layers are cut in lanes or over devices: all five, as the one operator of other engines is."""
    spec = EngineSpec(version="0.11.1", quantization="fp8_block", data_parallel_size=2)
    spec = EngineSpec(**{**spec.model_dump(exclude_unset=True), "afd_config": {"num_ffn_servers": 1}})
    hardware = load_hardware("h100-sxm-80gb")
    graph = build_graph(served_model(load_model("qwen3-235b-a22b"), spec, hardware), spec, hardware=hardware)
    parts = {node.name for node in graph.ffn.nodes if node.name.startswith("experts")}
    assert parts == {f"experts_{part}" for part in ("permute", "up_proj", "activation", "down_proj", "combine")}
    assert not any(node.name.startswith("experts") for node in graph.nodes)
    assert {lane_of(name) for name in parts} == {"experts"}


def test_experts_of_other_ranks_need_no_rows():
    """64 x 8 + 32 x 127 rows on each of four ranks: half a block less than 36 of them."""
    ranks = {"enable_expert_parallel": True, "tensor_parallel_size": 4}
    assert work_of_experts("0.12.0", **ranks)["experts_up_proj"].problem.m == 36 * 128


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


@pytest.mark.parametrize("ranks", [8, 64])
def test_kernels_see_the_tokens_that_are_gathered_and_of_sent_ones_those_that_arrive(ranks):
    """DeepSeek-V3, 128 tokens a rank, 8 experts each: sent, some 1,024 rows arrive at a rank, more at the busiest,
    however many ranks there are; gathered, all tokens of all ranks are there."""
    of_a_rank = 128
    for backend in ("deepep_low_latency", "allgather_reducescatter"):
        engine = EngineSpec(data_parallel_size=ranks, enable_expert_parallel=True, all2all_backend=backend)
        graph = build_graph(load_model("deepseek-v3"), engine)
        node = next(node for node in graph.nodes if node.name == "experts")
        problem = node.work(decode_shape(of_a_rank, 100)._replace(group_tokens=of_a_rank * ranks)).problem
        is_sent = backend == "deepep_low_latency"
        assert 1024 <= problem.assignments < 2 * 1024
        assert problem.tokens == pytest.approx(problem.assignments / 8 if is_sent else of_a_rank * ranks)
        assert problem.sum_bytes == pytest.approx(problem.tokens * 7168 * 2)


def attention(graph, prefills):
    nodes = [node for node in graph.nodes if node.name == "attention_prefill"]
    shape = BatchShape(sum(t for t, _ in prefills), len(prefills), prefills)
    return next(node.work(shape) for node in nodes)


@pytest.mark.parametrize(("device", "least"), [("h200-sxm", 64), ("b200-sxm", 128)])
@pytest.mark.parametrize("profile", ["vllm", "sglang"])
def test_prompts_with_an_indexer_are_computed_in_tiles_of_heads(profile, device, least):
    """GLM-5 has 64 heads, 8 on each of 8 devices: FlashMLA's kernel computes 64 or 128 whatever a device has."""
    model, hardware = load_model("glm-5"), load_hardware(device)
    for ranks, heads in ((1, max(64, least)), (8, least)):
        engine = EngineSpec(profile=profile, tensor_parallel_size=ranks)
        graph = build_graph(model, engine, hardware=hardware)
        work = attention(graph, ((1000, 20_000),))
        assert work.flops == 2 * 1000 * 2048 * heads * (2 * 512 + 64)


def test_prompts_that_the_indexer_keeps_all_of_are_computed_densely():
    """Up to 2,048 tokens nothing is left out: keys and values are expanded, and heads attend 256 wide, not 1,088."""
    graph = build_graph(load_model("glm-5"), EngineSpec(profile="sglang"), hardware=load_hardware("b200-sxm"))
    expand = next(node for node in graph.nodes if node.name == "kv_b_proj")
    absorbed = next(node for node in graph.nodes if node.name == "absorb_query_prefill")
    for tokens, is_dense in ((2048, True), (2049, False)):
        shape = BatchShape(tokens, 1, ((tokens, 0),))
        assert (expand.work(shape).num_kernels > 0) is is_dense
        assert (absorbed.work(shape).num_kernels > 0) is not is_dense
        assert (attention(graph, ((tokens, 0),)).family == "latent_prefill") is is_dense


@pytest.mark.parametrize(("device", "published"), [("h100-sxm-80gb", 640e12), ("b200-sxm", 1450e12)])
def test_the_kernel_of_chosen_latents_reaches_what_was_published(device, published):
    """deepseek-ai/FlashMLA, README: sparse prefill on an H800 SXM5, of an H100's tensor units, and on a B200."""
    hardware = load_hardware(device)
    graph = build_graph(load_model("glm-5"), EngineSpec(profile="sglang"), hardware=hardware)
    work = attention(graph, ((8192, 65_536),))
    seconds = OperatorTimer(hardware, load_calibration(hardware, "sglang")).time(work).duration_s
    assert work.flops / seconds == pytest.approx(published, rel=0.05)

"""The step graph: what each node depends on, how parallelism cuts it, what fusing saves."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel.models.cards import list_models, load_model
from perfmodel.models.vision import ImageGrid
from perfmodel.ops import BatchShape, Depends, build_graph, decode_shape
from perfmodel.ops.elementwise import BYTES_PER_LOGIT
from perfmodel.ops.routing import uniform_routing
from perfmodel.ops.sharding import stages
from perfmodel.specs.engine.spec import EngineSpec

MODELS = [
    "llama-3.1-8b",
    "mixtral-8x7b",
    "deepseek-v3",
    "deepseek-v3.2",
    "gpt-oss-120b",
    "llama-4-scout",
    "qwen3.5-27b",
    "nemotron-3-nano-30b-a3b",
    "opt-13b",
]
FAMILIES = {  # as `Work` lists them: what achieved fractions are known by
    "attention_decode",
    "attention_prefill",
    "attention_sparse",
    "collective",
    "elementwise",
    "embedding",
    "gemm",
    "moe",
    "sampling",
    "scan",
}
FIELDS = {
    Depends.TOKENS: ("num_tokens",),
    Depends.GROUP: ("group_tokens",),
    Depends.SAMPLES: ("num_samples",),
    Depends.PREFILL: ("prefills",),
    Depends.IMAGES: ("images",),
    Depends.DECODE: ("num_decodes", "decode_tokens", "decode_context", "decode_windowed"),
}
PREFILLS = st.lists(st.tuples(st.integers(2, 3000), st.integers(0, 3000)), max_size=4).map(tuple)


@st.composite
def shapes(draw, num_spans=2):
    """Any BatchShape, consistent or not: nodes must not care about fields that they do not name."""
    num_decodes = draw(st.integers(0, 200))
    context = num_decodes * draw(st.integers(1, 5000))
    windowed = tuple(num_decodes * draw(st.integers(1, 5000)) for _ in range(num_spans))
    counts = draw(st.integers(1, 5000)), draw(st.integers(1, 300))
    images = draw(st.lists(st.builds(ImageGrid, *[st.integers(1, 40)] * 3), max_size=3).map(tuple))
    return BatchShape(*counts, draw(PREFILLS), num_decodes, context, windowed, images=images)


def graph_of(name, **engine):
    return build_graph(load_model(name), EngineSpec(**engine))


def totals(graph, shape, attribute="flops"):
    return {n.name: n.count * getattr(n.work(shape), attribute) for n in graph.nodes}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(first=shapes(), second=shapes(), pp=st.sampled_from([1, 2]))
def test_nodes_depend_only_on_the_fields_they_name(name, first, second, pp):
    for node in graph_of(name, tensor_parallel_size=2, pipeline_parallel_size=pp).nodes:
        kept = {field: getattr(first, field) for field in FIELDS[node.depends]}
        one, other = node.work(first), node.work(second._replace(**kept))
        assert one == other, node.name
        assert one.problem == other.problem, node.name


@pytest.mark.parametrize("name", list_models())
def test_every_card_has_a_graph_of_distinctly_named_nodes(name):
    model = load_model(name)
    graph = build_graph(model, EngineSpec(tensor_parallel_size=2))
    names = [node.name for node in graph.nodes]
    assert len(names) == len(set(names))
    shape = decode_shape(8, 1000, model.attention_spans)
    works = [node.work(shape) for node in graph.nodes]
    assert all(work.flops >= 0 for work in works)
    assert {work.family for work in works} <= FAMILIES
    assert not {work.name for work in works} & FAMILIES - {"attention_decode", "attention_prefill", "embedding"}
    assert sum(len(nodes) for nodes in graph.by_depends.values()) == len(names)


@pytest.mark.parametrize("tp", [2, 8])
def test_each_rank_turns_its_own_query_heads_and_the_key_that_all_share(tp):
    """Latent attention has one rotated key for its 128 heads, which every rank computes: 128 / tp + 1 vectors."""
    one, cut = (totals(graph_of("deepseek-v3", tensor_parallel_size=n), decode_shape(7, 100)) for n in (1, tp))
    assert cut["rope"] / one["rope"] == pytest.approx((128 / tp + 1) / 129)


@pytest.mark.parametrize(("fused", "tensors"), [(True, 2), (False, 1)])
def test_stages_pass_the_hidden_states_on_and_the_residual_where_a_norm_adds_it(fused, tensors):
    """7 tokens of 4,096 elements in bf16, to the next of two stages; a norm that adds the residual leaves two."""
    graph = graph_of("llama-3.1-8b", pipeline_parallel_size=2, fused_kernels=fused)
    sent = next(node for node in graph.nodes if node.name == "send_recv").work(decode_shape(7, 100))
    assert sent.message.bytes_ == 7 * 4096 * 2 * tensors


def test_equal_layers_share_their_nodes():
    assert len(graph_of("llama-3.1-405b").nodes) == len(graph_of("llama-3.1-8b").nodes)
    assert len(graph_of("llama-3.1-405b").nodes) < 20


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b"])
@given(shape=shapes(0))
@settings(max_examples=20)
def test_two_tensor_parallel_ranks_do_half_each(name, shape):
    one, two = totals(graph_of(name), shape), totals(graph_of(name, tensor_parallel_size=2), shape)
    replicated = {"input_norm", "post_attention_norm", "final_norm", "router", "topk", "sample"}
    for operator, flops in one.items():
        assert two[operator] == pytest.approx(flops if operator in replicated else flops / 2), operator


def test_tensor_parallel_messages():
    """Two all-reduces a layer and the embedding's, each of n d b bytes, and the logits of the samples."""
    graph = graph_of("llama-3.1-8b", tensor_parallel_size=4)
    shape = decode_shape(16, 100)
    messages = {n.name: (n.count, n.work(shape).message) for n in graph.nodes if n.work(shape).message}
    reduces = {name: found for name, found in messages.items() if found[1].kind == "all_reduce"}
    assert sum(count for count, _ in reduces.values()) == 2 * 32 + 1
    assert all(message.bytes_ == 16 * 4096 * 2 and message.num_ranks == 4 for _, message in reduces.values())
    assert messages["logits_all_gather"][1].bytes_ == 16 * 128256 * 2


def test_kv_heads_are_replicated_beyond_their_number():
    """Llama-3.1-8B has 8 KV heads: 16 ranks read as much KV each as 8 do."""
    shape = decode_shape(8, 1000)
    eight, sixteen = (totals(graph_of("llama-3.1-8b", tensor_parallel_size=tp), shape, "kv_bytes") for tp in (8, 16))
    assert eight["attention_decode"] == sixteen["attention_decode"] == 32 * 8000 * 1 * 256 * 2


@pytest.mark.parametrize("ep", [True, False])
def test_experts_over_data_parallel_ranks_conserve_work(ep):
    """Four ranks of n tokens each do together what one device does with 4 n."""
    shape = decode_shape(64, 100)
    engine = EngineSpec(data_parallel_size=4, enable_expert_parallel=ep)
    four = totals(build_graph(load_model("mixtral-8x7b"), engine, routing=uniform_routing), shape)
    alone = totals(graph_of("mixtral-8x7b"), decode_shape(256, 100))
    assert 4 * four["experts"] == pytest.approx(alone["experts"])
    assert 4 * four["qkv_proj"] == pytest.approx(alone["qkv_proj"])


def test_the_slowest_expert_parallel_rank_sets_the_time():
    shape, model = decode_shape(64, 100), load_model("mixtral-8x7b")
    engine = EngineSpec(data_parallel_size=4, enable_expert_parallel=True)
    slowest = totals(build_graph(model, engine), shape)
    average = totals(build_graph(model, engine, routing=uniform_routing), shape)
    assert slowest["experts"] > 1.03 * average["experts"]


def test_expert_parallel_messages():
    """Without data parallelism tokens are everywhere: an all-reduce. With it they travel, and back, or all get all."""
    shape = decode_shape(64, 100)

    def kinds(**engine):
        nodes = graph_of("mixtral-8x7b", **engine).nodes
        return [n.work(shape).message.kind for n in nodes if n.work(shape).message and n.name.startswith("moe")]

    assert kinds(tensor_parallel_size=4, enable_expert_parallel=True) == ["all_reduce"]
    assert kinds(data_parallel_size=4) == ["all_gather", "reduce_scatter"]
    experts = {"data_parallel_size": 4, "enable_expert_parallel": True}
    assert kinds(**experts) == ["all_gather", "reduce_scatter"]  # vLLM's default
    assert kinds(**experts, all2all_backend="deepep_high_throughput") == ["all_to_all", "all_to_all"]
    assert kinds(**experts, profile="trtllm") == ["all_to_all", "all_to_all"]
    both = kinds(**experts, tensor_parallel_size=2, all2all_backend="deepep_low_latency")
    assert both == ["all_to_all", "all_to_all", "all_gather"]


def test_gathered_tokens_are_those_of_all_ranks():
    """Two ranks with 8 tokens each: 16 tokens of 4,096 numbers and 8 logits in two bytes each, then 4,096 numbers."""
    engine = EngineSpec(data_parallel_size=2, enable_expert_parallel=True)
    nodes = {node.name: node for node in build_graph(load_model("mixtral-8x7b"), engine).nodes}
    shape = decode_shape(8, 100)
    assert nodes["moe_all_gather"].work(shape).message.bytes_ == 16 * (4096 + 8) * 2
    assert nodes["moe_reduce_scatter"].work(shape).message.bytes_ == 16 * 4096 * 2


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_do_together_what_one_device_does(name, pp):
    """FLOPs, weights and KV of a step are those of the whole model, wherever its layers are; nothing twice."""
    model = load_model(name)
    shape = BatchShape(1100, 10, ((1000, 50), (92, 0)), 8, 8000, tuple(8 * span for span in model.attention_spans))
    one, staged = graph_of(name), graph_of(name, pipeline_parallel_size=pp)
    assert len(staged.stages) == pp
    for attribute in ("flops", "weight_bytes", "kv_bytes"):
        whole = sum(totals(one, shape, attribute).values())
        assert sum(totals(staged, shape, attribute).values()) == pytest.approx(whole)
        assert sum(sum(totals(stage, shape, attribute).values()) for stage in staged.stages) == pytest.approx(whole)


def test_embedding_is_on_the_first_stage_the_head_on_the_last_and_messages_between():
    graph, shape = graph_of("llama-3.1-8b", pipeline_parallel_size=4), decode_shape(64, 1000)
    names = [{node.name for node in stage.nodes} for stage in graph.stages]
    assert ["embedding" in each for each in names] == [True, False, False, False]
    assert ["lm_head" in each and "sample" in each for each in names] == [False, False, False, True]
    assert ["send_recv" in each for each in names] == [True, True, True, False]
    sends = next(node for node in graph.nodes if node.name == "send_recv")
    assert sends.count == 3
    assert sends.work(shape).message.bytes_ == 64 * 4096 * 2 * 2  # hidden states and residual, two bytes each


def test_tensor_parallel_ranks_send_a_part_each_and_gather():
    graph, shape = graph_of("llama-3.1-8b", tensor_parallel_size=4, pipeline_parallel_size=2), decode_shape(64, 1000)
    works = {node.name: node.work(shape) for node in graph.stages[0].nodes}
    assert works["send_recv"].message.bytes_ * 4 == works["stage_all_gather"].message.bytes_ == 64 * 4096 * 2 * 2


def test_equal_stages_are_known_as_such():
    """80 layers in 4 stages: the two in the middle are equal."""
    assert [s.stage_kind for s in graph_of("llama-3.1-70b", pipeline_parallel_size=4).stages] == [0, 1, 1, 3]


@pytest.mark.parametrize(("layers", "p", "sizes"), [(32, 2, [16, 16]), (61, 4, [15, 15, 16, 15]), (3, 4, [1, 1, 1, 0])])
def test_stages_give_the_remainder_to_those_before_the_last(layers, p, sizes):
    assert [len(stage) for stage in stages(layers, p)] == sizes


@pytest.mark.parametrize("name", MODELS)
def test_fusing_saves_kernels_and_bytes_but_no_matrix_flops(name):
    model = load_model(name)
    shape = decode_shape(8, 1000, model.attention_spans)._replace(prefills=((512, 0),), num_tokens=520)
    fused, unfused = (build_graph(model, EngineSpec(fused_kernels=on)) for on in (True, False))

    def total(graph, value, families=("gemm", "moe")):
        works = [(n.count, n.work(shape)) for n in graph.nodes]
        return sum(count * value(work) for count, work in works if families is None or work.family in families)

    assert total(fused, lambda w: w.flops) == pytest.approx(total(unfused, lambda w: w.flops))
    assert total(fused, lambda w: w.num_kernels, None) < total(unfused, lambda w: w.num_kernels, None)
    assert total(fused, lambda w: w.hbm_bytes, None) < total(unfused, lambda w: w.hbm_bytes, None)


@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_step_has_the_flops_of_its_parts(name):
    model = load_model(name)
    graph = build_graph(model)
    decodes = decode_shape(32, 700, model.attention_spans)
    prefill = BatchShape(512, 1, ((512, 100),), decode_windowed=(0,) * len(model.attention_spans))
    mixed = decodes._replace(num_tokens=544, num_samples=33, prefills=prefill.prefills)
    together = sum(totals(graph, mixed).values())
    apart = sum(totals(graph, decodes).values()) + sum(totals(graph, prefill).values())
    assert together == pytest.approx(apart)


def test_sampling_follows_the_card_unless_told():
    shape = decode_shape(10, 10)

    def sampled(**options):
        graph = build_graph(replace(load_model("llama-3.1-8b"), sampling="top_p"), **options)
        return next(n.work(shape).hbm_bytes for n in graph.nodes if n.name == "sample") / (10 * 128256)

    assert sampled() == BYTES_PER_LOGIT["top_p"]
    assert sampled(sampling="greedy") == 10
    assert sampled(bytes_per_logit=300.0) == 300


def test_windowed_layers_read_their_window_only():
    """gpt-oss: half the layers see 128 tokens; each kind has its own node."""
    model = load_model("gpt-oss-120b")
    graph = build_graph(model)
    bytes_of = totals(graph, decode_shape(4, 5000, model.attention_spans), "kv_bytes")
    full, window = bytes_of["attention_decode@full"], bytes_of["attention_decode@window_128"]
    assert full / window == pytest.approx(5000 / 128)


@pytest.mark.parametrize("on_device", [0, 10, 32, 33])
def test_the_host_computes_layers_that_are_not_offloaded(on_device):
    """The host has the first of 32 layers and always the embedding; layer 33, the head, moves to the device last."""
    graph = build_graph(
        load_model("llama-3.1-8b"), EngineSpec(profile="llamacpp", n_gpu_layers=on_device, cpu="xeon-8480plus")
    )
    counts = {node.name: node.count for node in graph.nodes}
    layers = min(on_device, 32)
    assert counts.get("qkv_proj", 0) == layers
    assert counts.get("qkv_proj@host", 0) == 32 - layers
    assert "embedding@host" in counts
    assert ("lm_head" in counts, "lm_head@host" in counts) == (on_device == 33, on_device != 33)

"""Nothing is lost and nothing is counted twice: weights of a step, FLOPs of weights, sequences of a batch, devices.

What a step reads of weights is what the checkpoint has, what it multiplies follows from that; equal sequences cost as
many times one; devices of a group do together what one would do alone.
"""

from dataclasses import replace

import pytest

from perfmodel.models.architecture import QuantizationSpec
from perfmodel.models.cards import load_model
from perfmodel.models.hf.config import model_from_config
from perfmodel.models.params import count_parameters
from perfmodel.ops import BatchShape, build_graph, decode_shape
from perfmodel.ops.messages import distinct_ranks
from perfmodel.ops.routing import ExpertLoad
from perfmodel.ops.work import Depends
from perfmodel.specs.engine.kv import KvEviction, KvTier
from perfmodel.specs.engine.spec import EngineSpec

MODELS = [
    *("llama-3.1-8b", "llama-2-7b", "gemma-2-2b", "opt-13b", "mixtral-8x7b", "gpt-oss-20b", "llama-4-scout"),
    *("deepseek-v2-lite", "deepseek-v3.2", "qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b", "nemotron-h-56b"),
    "falcon-mamba",
]
TIERS = EngineSpec(kv_tiers=(KvTier(tokens=64), KvTier(tokens=128, dtype="int8"), KvTier(dtype="int4")))
EVICTS = EngineSpec(kv_eviction=KvEviction(heavy_tokens=64, recent_tokens=64))
COUNTS = ("flops", "activation_bytes", "kv_bytes", "vector_ops")


def every_expert(ffn, num_tokens, num_ranks):
    """All experts of a rank get tokens: their weights are read once each."""
    return ExpertLoad(ffn.num_experts / num_ranks, num_tokens * ffn.top_k / num_ranks)


def plain(name):
    """The model in its 16 bits throughout; Falcon-Mamba by its published sizes, which no card has."""
    if name == "falcon-mamba":
        sizes = {"hidden_size": 4096, "num_hidden_layers": 64, "state_size": 16, "vocab_size": 65024}
        return model_from_config({"model_type": "falcon_mamba", "expand": 2, "conv_kernel": 4, **sizes}, name)
    return replace(load_model(name), quantization=QuantizationSpec())


def of_step(graph, rows):
    """The works of a step of so many decodes with 3,000 tokens each, and how often each runs."""
    shape = decode_shape(rows, 3000, graph.model.attention_spans)
    return [(node.count, node.work(shape)) for node in graph.nodes]


def summed(works, name):
    return sum(getattr(work, name) for work in works)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_reads_each_weight_once(name):
    """All parameters but the rows of the embedding that no token has; biases of experts and sinks (gpt-oss) and the
    vectors of scans, some 1e-4 of all, are not counted as traffic, nor is A of Mamba-1, a row of 16 for a channel."""
    model = plain(name)
    works = of_step(build_graph(model, routing=every_expert), 4096)
    read = sum(count * work.weight_bytes for count, work in works if work.family != "embedding") / 2
    counts = count_parameters(model)
    held = counts.total - counts.embedding + model.tie_word_embeddings * model.vocab_size * model.hidden_size
    decay = 64 * 8192 * 16 if name == "falcon-mamba" else 0
    assert read == pytest.approx(held - decay, rel=4e-4)


@pytest.mark.parametrize("name", MODELS)
def test_each_weight_is_multiplied_once_for_each_row(name):
    """2 FLOPs for each row and weight, of single products and of those of each head or expert."""
    for _, work in of_step(build_graph(plain(name), routing=every_expert), 64):
        if work.family == "gemm" and not work.name.startswith(("qkv", "lm_head", "o_proj", "gate_up", "up", "down")):
            assert work.flops == pytest.approx(2 * 64 * work.weight_bytes / 2), work.name
        if work.family == "moe":
            assert work.flops * work.extent.distinct == pytest.approx(
                2 * work.extent.assignments * work.weight_bytes / 2
            )


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "nemotron-h-56b"])
def test_a_convolution_reads_its_taps(name):
    """Four taps for each channel of queries, keys and values: 8,192 of Qwen3-Next; x, B and C of Nemotron-H."""
    mixer = next(layer.mixer for layer in plain(name).iter_layers() if hasattr(layer.mixer, "conv_kernel"))
    (work,) = [work for _, work in of_step(build_graph(plain(name)), 1) if work.name == "causal_conv"]
    channels = work.activation_bytes / (2 * 2)  # read and written in 16 bits
    assert work.weight_bytes == 2 * channels * mixer.conv_kernel


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize(
    ("name", "engine"), [*((name, EngineSpec()) for name in MODELS), ("llama-3.1-8b", TIERS), ("llama-2-7b", EVICTS)]
)
def test_equal_sequences_cost_as_many_times_one(name, engine, queries):
    """Beyond windows, tiers of precision and what an indexer keeps, too: limits are those of each sequence."""
    graph = build_graph(plain(name), engine)
    spans = graph.model.attention_spans
    one, six = (decode_shape(count, 5000, spans, queries) for count in (1, 6))
    for node in graph.by_depends[Depends.DECODE]:
        for count in COUNTS:
            assert getattr(node.work(six), count) == pytest.approx(6 * getattr(node.work(one), count)), (
                node.name,
                count,
            )


@pytest.mark.parametrize(
    ("name", "engine"), [*((name, EngineSpec()) for name in MODELS), ("llama-3.1-8b", TIERS), ("llama-2-7b", EVICTS)]
)
def test_prompts_of_a_step_cost_what_each_of_them_does(name, engine):
    graph = build_graph(plain(name), engine)
    prompts = ((700, 3000), (500, 2300))
    for node in graph.by_depends[Depends.PREFILL]:
        together = node.work(BatchShape(1200, 2, prompts))
        apart = [node.work(BatchShape(tokens, 1, ((tokens, cached),))) for tokens, cached in prompts]
        for count in (*COUNTS, "sram_bytes"):
            assert getattr(together, count) == pytest.approx(summed(apart, count)), (node.name, count)


@pytest.mark.parametrize("name", MODELS)
def test_one_kernel_for_prompts_and_decodes_does_the_work_of_both(name):
    graph = build_graph(plain(name))
    shape = decode_shape(6, 3000, graph.model.attention_spans)._replace(prefills=((500, 700), (30, 0)))
    for mixed, parts in graph.mixed:
        for count in COUNTS:
            both = summed([part.work(shape) for part in parts], count)
            assert getattr(mixed.work(shape), count) == pytest.approx(both), count


@pytest.mark.parametrize("name", MODELS)
def test_devices_of_a_group_multiply_together_what_one_does_alone(name):
    """A half each, or all of it on both: routers, latents, the projections of an indexer, gates of single columns."""
    copied = ("router", "_a_proj", "index_", "latent_", "shared_expert_gate", "gates_proj")
    alone = build_graph(plain(name), EngineSpec())
    halved = build_graph(plain(name), EngineSpec(tensor_parallel_size=2))
    shape = decode_shape(64, 3000, alone.model.attention_spans)._replace(prefills=((256, 0),))
    halves = {node.name: node for node in halved.nodes}
    for node in alone.nodes:
        whole, half = node.work(shape), halves[node.name].work(shape)
        if whole.family in ("gemm", "moe", "attention_prefill", "attention_decode", "attention_sparse", "scan"):
            share = 1.0 if any(part in node.name for part in copied) and whole.flops == half.flops else 0.5
            assert half.flops == pytest.approx(share * whole.flops, rel=1e-3), node.name


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_send_each_token_once_to_each_rank_of_its_experts(tp):
    """Dispatched in the experts' own format, FP8, and back in 16 bits; the devices of a rank share out its tokens."""
    model = load_model("deepseek-v3")
    engine = EngineSpec(
        tensor_parallel_size=tp,
        data_parallel_size=8,
        enable_expert_parallel=True,
        all2all_backend="pplx",
    )
    nodes = {node.name.partition("@")[0]: node for node in build_graph(model, engine).nodes}
    ffn = next(layer.ffn for layer in model.iter_layers() if hasattr(layer.ffn, "num_experts"))
    copies = 100 * distinct_ranks(ffn, 8 * tp) * model.hidden_size
    sent, returned = (nodes[name].work(BatchShape(100, 100)).message for name in ("moe_dispatch", "moe_combine"))
    assert (sent.bytes_ * tp, returned.bytes_ * tp) == pytest.approx((copies * 1, copies * 2))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "llama-3.1-8b", "gpt-oss-20b"])
def test_every_block_of_a_tensor_parallel_layer_adds_up_the_hidden_states_of_all_tokens(name):
    """In 16 bits, after the mixer and after the feed-forward block; a table of words that is cut adds up once."""
    model = load_model(name)
    graph, shape = build_graph(model, EngineSpec(tensor_parallel_size=4)), decode_shape(7, 700, model.attention_spans)
    sums = [
        (node.count, node.work(shape).message.bytes_)
        for node in graph.nodes
        if node.work(shape).message is not None and node.work(shape).message.kind == "all_reduce"
    ]
    assert {num_bytes for _, num_bytes in sums} == {7 * model.hidden_size * 2}
    assert sum(count for count, _ in sums) == 2 * model.num_layers + 1

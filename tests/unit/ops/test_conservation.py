"""Conservation: weights of a step, FLOPs of weights, sequences of a batch and devices, none lost or counted twice.

A step reads the weights of the checkpoint, and its FLOPs follow from them. Work is linear in equal sequences. The
devices of a group together do the work of one device.
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
from perfmodel.specs.engine.spec import EngineSpec, KvEviction, KvTier

MODELS = [
    *("llama-3.1-8b", "llama-2-7b", "gemma-2-2b", "opt-13b", "mixtral-8x7b", "gpt-oss-20b", "llama-4-scout"),
    *("deepseek-v2-lite", "deepseek-v3.2", "qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b", "nemotron-h-56b"),
    "falcon-mamba",
]
TIERS = EngineSpec(kv_tiers=(KvTier(tokens=64), KvTier(tokens=128, dtype="int8"), KvTier(dtype="int4")))
EVICTS = EngineSpec(kv_eviction=KvEviction(heavy_tokens=64, recent_tokens=64))
COUNTS = ("flops", "activation_bytes", "kv_bytes", "vector_ops")


def every_expert(ffn, num_tokens, num_ranks):
    """All experts of a rank get tokens, so their weights are read once."""
    return ExpertLoad(ffn.num_experts / num_ranks, num_tokens * ffn.top_k / num_ranks)


def plain(name):
    """The model in 16 bits throughout; Falcon-Mamba, which has no card, by its published sizes."""
    if name == "falcon-mamba":
        sizes = {"hidden_size": 4096, "num_hidden_layers": 64, "state_size": 16, "vocab_size": 65024}
        return model_from_config({"model_type": "falcon_mamba", "expand": 2, "conv_kernel": 4, **sizes}, name)
    return replace(load_model(name), quantization=QuantizationSpec())


def step_works(graph, rows):
    """(count, work) of a step of `rows` decodes with 3,000 tokens of context."""
    shape = decode_shape(rows, 3000, graph.model.attention_spans)
    return [(node.count, node.work(shape)) for node in graph.nodes]


def total_of(works, name):
    return sum(getattr(work, name) for work in works)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_reads_every_weight_once(name):
    """All parameters but unused embedding rows. Not counted as traffic: biases of experts and sinks (gpt-oss) and
    vectors of scans, some 1e-4 of all, and A of Mamba-1, 16 elements per channel."""
    model = plain(name)
    works = step_works(build_graph(model, routing=every_expert), 4096)
    read = sum(count * work.weight_bytes for count, work in works if work.family != "embedding") / 2
    counts = count_parameters(model)
    expected = counts.total - counts.embedding + model.tie_word_embeddings * model.vocab_size * model.hidden_size
    decay = 64 * 8192 * 16 if name == "falcon-mamba" else 0
    assert read == pytest.approx(expected - decay, rel=4e-4)


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_multiplied_once_per_row(name):
    """2 FLOPs per row and weight, also for per-head and per-expert products."""
    for _, work in step_works(build_graph(plain(name), routing=every_expert), 64):
        if work.family == "gemm" and not work.name.startswith(("qkv", "lm_head", "o_proj", "gate_up", "up", "down")):
            assert work.flops == pytest.approx(2 * 64 * work.weight_bytes / 2), work.name
        if work.family == "moe":
            assert work.flops * work.problem.distinct == pytest.approx(
                2 * work.problem.assignments * work.weight_bytes / 2
            )


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "nemotron-h-56b"])
def test_a_convolution_reads_its_taps(name):
    """Four taps per channel: queries, keys and values of Qwen3-Next (8,192); x, B and C of Nemotron-H."""
    mixer = next(layer.mixer for layer in plain(name).iter_layers() if hasattr(layer.mixer, "conv_kernel"))
    (work,) = [work for _, work in step_works(build_graph(plain(name)), 1) if work.name == "causal_conv"]
    channels = work.activation_bytes / (2 * 2)  # read and written in 16 bits
    assert work.weight_bytes == 2 * channels * mixer.conv_kernel


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize(
    ("name", "engine"), [*((name, EngineSpec()) for name in MODELS), ("llama-3.1-8b", TIERS), ("llama-2-7b", EVICTS)]
)
def test_decode_work_is_linear_in_equal_sequences(name, engine, queries):
    """Also beyond windows, precision tiers and the indexer's top-k, which are limits per sequence."""
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
def test_prefill_work_of_a_step_is_the_sum_over_its_prompts(name, engine):
    graph = build_graph(plain(name), engine)
    prompts = ((700, 3000), (500, 2300))
    for node in graph.by_depends[Depends.PREFILL]:
        together = node.work(BatchShape(1200, 2, prompts))
        apart = [node.work(BatchShape(tokens, 1, ((tokens, cached),))) for tokens, cached in prompts]
        for count in (*COUNTS, "sram_bytes"):
            assert getattr(together, count) == pytest.approx(total_of(apart, count)), (node.name, count)


@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_kernel_does_the_work_of_its_parts(name):
    graph = build_graph(plain(name))
    shape = decode_shape(6, 3000, graph.model.attention_spans)._replace(prefills=((500, 700), (30, 0)))
    for mixed, parts in graph.mixed:
        for count in COUNTS:
            both = total_of([part.work(shape) for part in parts], count)
            assert getattr(mixed.work(shape), count) == pytest.approx(both), count


@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_devices_split_the_flops(name):
    """Half the FLOPs per device; routers, latents, indexer projections and single-column gates are replicated."""
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
def test_dispatch_sends_a_token_once_to_every_rank_of_its_experts(tp):
    """Dispatched in the experts' FP8 and combined in 16 bits; the devices of a rank split its tokens."""
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
def test_every_tensor_parallel_block_all_reduces_the_hidden_states(name):
    """In 16 bits, after the mixer and after the feed-forward block, and once after a split embedding."""
    model = load_model(name)
    graph, shape = build_graph(model, EngineSpec(tensor_parallel_size=4)), decode_shape(7, 700, model.attention_spans)
    sums = [
        (node.count, node.work(shape).message.bytes_)
        for node in graph.nodes
        if node.work(shape).message is not None and node.work(shape).message.kind == "all_reduce"
    ]
    assert {num_bytes for _, num_bytes in sums} == {7 * model.hidden_size * 2}
    assert sum(count for count, _ in sums) == 2 * model.num_layers + 1

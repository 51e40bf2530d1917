"""DeepSeek-V4's attention, MiniMax-M3's chosen blocks, shared choices, Kimi delta attention, residual streams.

Counts are by hand from the reports and from shapes of transformers' classes, which a docstring names."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.memory.footprint import kv_bytes_per_token, state_bytes_per_sequence
from perfmodel.cost.memory.plan import compressed_blocks, plan_memory
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.files.catalog import find_file
from perfmodel.models.architecture import KEYED, CompressedAttention, GatedDeltaNet, Indexer, LatentAttention
from perfmodel.models.cards import load_card, load_model
from perfmodel.models.executed import why_not_executed
from perfmodel.models.hf.config import model_from_config
from perfmodel.models.params import layer_parameters
from perfmodel.ops import build_graph
from perfmodel.ops.attention.compressed import (
    compressed_prefill,
    compressed_row_bytes,
    kept_bytes,
    visible_compressed,
)
from perfmodel.ops.attention.indexer import index_prefill
from perfmodel.ops.attention.prefill import Heads
from perfmodel.ops.elementwise import residual_mix
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.specs import load_hardware, load_scenario
from perfmodel.specs.engine.spec import EngineSpec

CSA = CompressedAttention(64, 512, 64, 1024, 8, 1024, 128, 4, Indexer(64, 128, 512))
HCA = replace(CSA, ratio=128, indexer=None)
WINDOW = replace(HCA, ratio=0)
HEADS = Heads(64, 1, 512, 512, "bf16", 2.0, 584 / 512)
KINDS = st.sampled_from([CSA, HCA, WINDOW])
ONE = Sharding.of(EngineSpec())
FP8 = EngineSpec(kv_cache_dtype="fp8", block_size=256, max_num_seqs=16)


def _nodes(name, engine=FP8):
    return {node.name: node for node in build_graph(load_model(name), engine).nodes}


def _fp8(name):
    model = load_model(name)
    return replace(model, quantization=replace(model.quantization, kv_cache="fp8"))


def _bytes_per_token(model):
    return kv_bytes_per_token(model, ONE, list(model.iter_layers()))


@given(KINDS, st.integers(1, 3000), st.integers(0, 3000))
def test_prompts_see_what_their_queries_see_one_by_one(mixer, new, cached):
    """Summed query by query; fails for a compressed key too many, a limit in tokens instead of keys, or a window that
    the cached tokens shorten."""
    keys = 0.0
    for position in range(cached, cached + new):
        keys += min(position + 1, 128)
        if mixer.ratio:
            compressed = (position + 1) / mixer.ratio
            keys += compressed if mixer.indexer is None else min(compressed, 512)
    work = compressed_prefill([(new, cached)], mixer, HEADS, 584)
    assert work.flops == pytest.approx(4 * 64 * 512 * keys)
    assert sum(visible_compressed(mixer, p + 1) for p in range(cached, cached + new)) == pytest.approx(keys)


@given(KINDS, st.integers(1, 2000), st.integers(1, 2000))
def test_a_prompt_in_chunks_costs_as_many_flops_as_at_once(mixer, first, second):
    chunks = [compressed_prefill([prompt], mixer, HEADS, 584).flops for prompt in ((first, 0), (second, first))]
    assert sum(chunks) == pytest.approx(compressed_prefill([(first + second, 0)], mixer, HEADS, 584).flops)


def test_a_cached_key_has_584_bytes_in_fp8_and_1024_in_16_bits():
    """448 bytes, 64 rotated elements of 2, 7 scales padded to 8 (vLLM 0.30, models/deepseek_v4/attention.py)."""
    assert compressed_row_bytes(CSA, 1.0, 2.0) == 448 + 128 + 8
    assert compressed_row_bytes(CSA, 2.0, 2.0) == 1024


def test_what_a_sequence_keeps_by_hand():
    """The window, 128 keys of 584 bytes; compressors in fp32: CSA 8 tokens of key and weight of 2 x 512 (and 2 x 128 of
    the indexer's) each, HCA 128 tokens of 2 x 512 (vLLM, compressor.py: state_dim, sliding_window)."""
    window = 128 * 584
    assert kept_bytes(WINDOW, 1.0, 2.0) == window
    assert kept_bytes(CSA, 1.0, 2.0) == window + 8 * 4 * 512 * 4 + 8 * 4 * 128 * 4
    assert kept_bytes(HCA, 1.0, 2.0) == window + 128 * 2 * 512 * 4


def test_a_million_tokens_of_deepseek_v4_pro_take_what_vllm_published():
    """9.62 GiB a sequence in 16 bits, index keys too, against 83.9 GiB of a 61-layer stack of V3.2 (vLLM blog,
    DeepSeek V4 in vLLM, 2026-04-24). Fails for layers of the wrong kind, or a ratio of the index keys other than 4."""

    def wide(layer):
        indexer = getattr(layer.mixer, "indexer", None)
        if indexer is None:
            return layer
        return replace(layer, mixer=replace(layer.mixer, indexer=replace(indexer, key_bytes=2.0, scale_bytes=0.0)))

    for name, published in (("deepseek-v4-pro", 9.62), ("deepseek-v3.2", 83.9)):
        model = load_model(name)
        model = replace(model, layers=tuple((wide(layer), count) for layer, count in model.layers))
        assert _bytes_per_token(model) * 2**20 / 2**30 == pytest.approx(published, rel=0.001)


@pytest.mark.parametrize(("name", "published"), [("deepseek-v4-pro", 0.10), ("deepseek-v4-flash", 0.07)])
def test_the_cache_is_the_published_share_of_deepseek_v3_2s(name, published):
    """10 % and 7 % at 1M tokens (DeepSeek-V4 report, 2026), with index keys in FP4, which are in FP8 here: one
    percentage point more at most."""
    share = _bytes_per_token(_fp8(name)) / _bytes_per_token(_fp8("deepseek-v3.2"))
    assert published < share < published + 0.03


def test_deepseek_v4_flash_caches_3850_bytes_a_token():
    """21 CSA layers (584 + 132) / 4, 20 HCA layers 584 / 128, two that keep their window alone."""
    assert _bytes_per_token(_fp8("deepseek-v4-flash")) == 21 * (584 + 132) / 4 + 20 * 584 / 128


def test_windows_and_compressors_take_blocks_of_the_pool():
    """Of a sequence all layers' kept bytes in whole blocks, and none of the memory beside the pool."""
    model = _fp8("deepseek-v4-flash")
    layers = list(model.iter_layers())
    blocks = ceil(state_bytes_per_sequence(model, ONE, layers) / (256 * _bytes_per_token(model)))
    assert compressed_blocks(model, FP8) == blocks > 1
    plan = plan_memory(model, load_hardware("b300-sxm"), FP8)
    assert (plan.state_bytes, plan.num_buffers) == (0.0, blocks)
    assert plan.max_batch(2048) == plan.num_kv_blocks // (8 + blocks)


def test_the_indexer_scores_one_key_for_four_tokens():
    """Decode at 4,096 tokens: 1,024 keys of 64 heads of 128; prompts a quarter of what every token's keys cost."""
    work = _nodes("deepseek-v4-flash")["index_decode"].work(decode_shape(2, 4096))
    assert work.flops == 2 * 2 * 1024 * 64 * 128
    whole, fourth = (index_prefill([(100, 50)], CSA.indexer, ratio) for ratio in (1, 4))
    assert whole.flops == 4 * fourth.flops
    assert whole.kv_bytes == 4 * fourth.kv_bytes


def test_decodes_attend_to_the_window_and_the_choice():
    """At 100,000 tokens CSA sees 128 + 512 keys, HCA 128 + 781.25, the first layers 128: 4 x 64 x 512 FLOPs each."""
    shape, keys = decode_shape(1, 100_000), set()
    for name, node in _nodes("deepseek-v4-flash").items():
        if name.startswith("attention_decode"):
            keys.add(node.work(shape).flops / (4 * 64 * 512))
    assert keys == {128.0, 128 + 512, 128 + 781.25}


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("deepseek-v4-flash", 284_332_230_231 + 43 * 256),
        ("deepseek-v4-pro", 1_572_997_179_491 + 61 * 384),
        ("kimi-linear-48b-a3b", 49_122_675_072 + 26 * 256),
        ("glm-4.7-flash", 29_943_390_976 + 46 * 64),
        ("gemma-4-31b", 30_697_345_280 + 10 * 5376 * 4 * 512),
    ],
)
def test_parameters_are_those_of_the_classes_tensors(name, counted):
    """What transformers 5.24's classes of these sizes have on the meta device, and the routers' biases, which are
    buffers there; of Gemma 4 the second copy of the global layers' key projections that vLLM loads."""
    model = load_model(name)
    layers = sum(sum(layer_parameters(model, layer).values()) * count for layer, count in model.layers)
    d, n = model.hidden_size, model.num_streams
    head = model.vocab_size * d * (1 if model.tie_word_embeddings else 2) + d
    assert layers + head + (n * (n * d + 1) + 1 if n > 1 else 0) == pytest.approx(counted, abs=3000)


def test_minimax_m3_reads_sixteen_blocks_and_scores_all_tokens():
    """128 x 16 keys of 4 heads of 128 at 100,000 tokens; index keys of all 100,000 in 16 bits. Cached: 60 layers of
    2 x 4 x 128 and 57 index keys of 128, 2 bytes each."""
    model = load_model("minimax-m3")
    assert _bytes_per_token(model) == 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2
    nodes = _nodes("minimax-m3", EngineSpec())
    shape = decode_shape(1, 100_000, model.attention_spans)
    dense, sparse = (nodes[f"attention_decode@{kind}"] for kind in ("full", "sparse"))
    assert dense.work(shape).kv_bytes == 100_000 * 2 * 4 * 128 * 2
    assert sparse.work(shape).kv_bytes == 2048 * 2 * 4 * 128 * 2
    index = nodes["index_decode"].work(shape)
    assert (index.rate, index.kv_bytes, index.flops) == ("bf16", 100_000 * 128 * 2, 2 * 100_000 * 4 * 128)


def test_glm_5_2_chooses_in_every_fourth_layer():
    """llama.cpp's list of its config.json: the first three layers, then 6, 10, ... 74: 21 of 78 score and cache."""
    model = load_model("glm-5.2")
    assert _nodes("glm-5.2", EngineSpec())["index_decode"].count == 21
    assert _bytes_per_token(model) == 78 * 576 * 2 + 21 * 132
    own = sum(count for layer, count in model.layers if not layer.mixer.indexer.is_shared)
    assert own == 21
    assert [layer.mixer.indexer.is_shared for layer in model.iter_layers()][:8] == [False] * 3 + [True] * 3 + [
        False,
        True,
    ]


def test_kimi_delta_attention_by_hand():
    """d = 2304, 32 heads of 128: q, k, v, out 4 d D with D = 4096; decay and gate through 128 each; beta d x 32; conv
    3 D x 4; A 32, dt D. A state of 32 x 128 x 128 in fp32 and 3 conv inputs of 3 D in 16 bits. The decays of key
    channels are read beside q, k, v and the output."""
    model = load_model("kimi-linear-48b-a3b")
    layer = next(layer for layer in model.iter_layers() if isinstance(layer.mixer, GatedDeltaNet))
    d, width = 2304, 4096
    thin = 2 * (d * 128 + 128 * width)
    assert layer_parameters(model, layer)["linear_attention"] == (
        4 * d * width + thin + d * 32 + 3 * width * 4 + 32 + width
    )
    assert state_bytes_per_sequence(model, ONE, [layer]) == 32 * 128 * 128 * 4 + 3 * 3 * width * 2
    update = _nodes("kimi-linear-48b-a3b", EngineSpec())["state_update"].work(decode_shape(1, 100))
    assert update.activation_bytes == 5 * width * 2


def test_kimi_latents_are_not_rotated_and_kimi_k3s_are_gated():
    linear, k3 = _nodes("kimi-linear-48b-a3b", EngineSpec()), _nodes("kimi-k3", EngineSpec(tensor_parallel_size=8))
    assert "rope" not in linear
    assert "rope" not in k3
    assert {"gate_proj", "output_gate"} <= k3.keys()
    assert "decay_proj" in k3
    gated = [layer for layer in load_model("kimi-k3").iter_layers() if isinstance(layer.mixer, KEYED)]
    assert len(gated) == 24


def test_residual_streams_by_hand():
    """4 streams of 4,096 read and written beside a block's output and input, in 16 bits: 10 x 4096 x 2 bytes a token;
    weights 4 x 4096 x 24 in fp32. Kimi-K3: the mean layer sees the sums of 12 layers each, of the 93 before it."""
    work = residual_mix(7, 4096, 2.0, 4, 4, 24)
    assert (work.activation_bytes, work.weight_bytes) == (7 * 10 * 4096 * 2, 4 * 4096 * 24 * 4)
    streams = _nodes("deepseek-v4-flash")["residual_mix@compressed"].work(BatchShape(7, 0))
    assert streams.activation_bytes == work.activation_bytes
    sums = sum(ceil(layer / 12) for layer in range(93)) / 93
    k3 = _nodes("kimi-k3", EngineSpec(tensor_parallel_size=8))
    mixed = next(node for name, node in k3.items() if name.startswith("residual_mix")).work(BatchShape(1, 0))
    assert mixed.activation_bytes == pytest.approx((sums + 1 + 1 + 2) * 7168 * 2)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("deepseek-v4-flash", "residuals of several hidden states"),
        ("minimax-m3", "the activation swigluoai"),
        ("glm-5.2", "the indexer of sparse attention"),
        ("kimi-linear-48b-a3b", "Kimi delta attention"),
        ("kimi-k3", "residuals of several hidden states"),
        ("gemma-4-31b", "proportional scaling of rotary frequencies"),
        ("glm-4.7-flash", "the computation of glm4_moe_lite models"),
    ],
)
def test_the_executor_refuses_by_name_what_it_does_not_compute(name, what):
    assert why_not_executed(load_model(name)) == what


def test_each_new_part_is_refused_without_the_others():
    """A model whose type is known and whose single new part is the one refused."""
    plain = load_model("llama-3.1-8b")
    mixers = [layer.mixer for name in ("deepseek-v4-flash", "kimi-k3") for layer in load_model(name).iter_layers()]
    compressed, delta, latent = (
        next(mixer for mixer in mixers if isinstance(mixer, kind))
        for kind in (CompressedAttention, GatedDeltaNet, LatentAttention)
    )
    reasons = [
        why_not_executed(replace(plain, layers=((replace(plain.layers[0][0], mixer=mixer), 1),)))
        for mixer in (compressed, delta, latent)
    ]
    assert reasons == [
        "attention to compressed keys",
        "Kimi delta attention",
        "latent attention without rotation or with a gate",
    ]


def _planned(settings):
    scenario = load_scenario("llama-3.1-8b-a100", settings)
    return plan_memory(scenario.model, scenario.hardware, scenario.engine)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("deepseek-v4-flash", {"decode_context_parallel_size": 2}, "some of deepseek-v4-flash do not"),
        ("deepseek-v4-flash", {"tensor_parallel_size": 16}, "tensor_parallel_size"),
        ("deepseek-v4-flash", {"kv_cache_dtype": "int4"}, "int4"),
        ("minimax-m3", {"decode_context_parallel_size": 2}, "some of minimax-m3 do not"),
    ],
)
def test_what_is_not_modelled_together_is_refused(model, change, message):
    settings = [f"engine.{name}={value}" for name, value in ({"tensor_parallel_size": 8} | change).items()]
    with pytest.raises(PerfmodelError, match=message):
        _planned([f"model={model}", "hardware=b200-sxm", *settings])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [4] * 3}, "compress_ratios has 3 entries"),
        ({"compress_ratios": ["4"] * 43}, "compress_ratios: got '4' of layer 0"),
        ({"compress_ratios": None, "layer_types": ["full_attention"] * 43}, "compress_ratios: got None"),
        ({"engram_layer_ids": [1]}, "embeddings of n-grams"),
        ({"mhc_num_residual_streams": 4}, "GLM-5-Next"),
    ],
)
def test_files_that_are_not_modelled_are_refused_in_a_sentence(changes, message):
    config = load_card(find_file("models", "deepseek-v4-flash")).config
    with pytest.raises(SpecError, match=message):
        model_from_config({**config, **changes}, "x")


def test_layers_by_their_names_are_those_by_their_ratios():
    """transformers writes DeepSeek-V4's layers as kinds and rates, the publisher as ratios."""
    config = dict(load_card(find_file("models", "deepseek-v4-flash")).config)
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    kinds = [names[ratio] for ratio in config.pop("compress_ratios")]
    assert model_from_config({**config, "layer_types": kinds}, "x").layers == load_model("deepseek-v4-flash").layers

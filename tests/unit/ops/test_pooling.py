"""Models that return a vector or scores of a prompt: parameters, FLOPs and bytes by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.models import load_model
from perfmodel.models.hf.config import model_from_config
from perfmodel.models.params import count_parameters, weight_bytes
from perfmodel.ops.attention.prefill import pairs_around, visible_pairs
from perfmodel.ops.graphs.step import build_graph
from perfmodel.ops.work import BatchShape
from perfmodel.specs.engine.spec import EngineSpec

MODERNBERT = {
    "model_type": "modernbert",
    "architectures": ["ModernBertModel"],
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "vocab_size": 50368,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
}


def test_parameters_are_those_of_the_published_checkpoints():
    """Of transformers' classes without a pooler: BertModel of the base size, (30,522 + 512 + 2) 768 + 1,536 + 12 x
    7,087,872; XLMRobertaModel of the large one with 8,194 positions; with a head of (1,024 + 1) (1,024 + 1); and
    ModernBertModel, whose first layer has no norm before attention."""
    counts = {name: count_parameters(load_model(name)).total for name in ("arctic-embed-m", "bge-m3")}
    assert counts == {"arctic-embed-m": 108_891_648, "bge-m3": 566_705_152}
    assert count_parameters(load_model("bge-reranker-v2-m3")).total == 566_705_152 + 1025**2 == 567_755_777
    assert count_parameters(model_from_config(MODERNBERT, "x")).total == 149_014_272
    assert count_parameters(load_model("qwen3-embedding-0.6b")).total == 595_776_512


def test_positions_that_padding_takes_are_not_for_prompts():
    """RoBERTa counts positions from 2: of bge-m3's 8,194 a prompt has 8,192; BERT has all 512."""
    assert load_model("bge-m3").max_position_embeddings == 8192
    assert load_model("arctic-embed-m").max_position_embeddings == 512


def test_a_reranker_has_one_score_and_a_classifier_two_unless_its_file_says_otherwise():
    config = {**MODERNBERT, "architectures": ["ModernBertForSequenceClassification"]}
    labels = {"id2label": {str(i): f"L{i}" for i in range(5)}}
    models = [load_model("bge-reranker-v2-m3"), model_from_config(config, "x"), model_from_config(config | labels, "x")]
    assert [model.num_labels for model in models] == [1, 2, 5]


@given(st.integers(1, 70), st.one_of(st.none(), st.integers(0, 40)))
def test_pairs_around_are_counted_one_by_one(num_tokens, side):
    window = None if side is None else 2 * side + 1
    places = range(num_tokens)
    expected = sum(side is None or abs(i - j) <= side for i in places for j in places)
    assert pairs_around(num_tokens, window) == expected


def flops_of(model, shape):
    nodes = build_graph(model, EngineSpec(kv_cache="off" if model.is_encoder else "paged")).nodes
    return {node.name: node.count * node.work(shape).flops for node in nodes}


@pytest.mark.parametrize("lengths", [(512,), (7, 300, 205)])
def test_flops_of_an_encoder_by_hand(lengths):
    """BERT-base, 12 layers, d = 768: products 2 T (4 d^2 + 8 d^2) and attention 4 d sum of T_i^2 a layer. Half of the
    pairs, as under causal attention, would be 4 d sum of T_i (T_i + 1) / 2."""
    tokens, d = sum(lengths), 768
    shape = BatchShape(tokens, len(lengths), tuple((n, 0) for n in lengths))
    flops = flops_of(load_model("arctic-embed-m"), shape)
    attention = sum(value for name, value in flops.items() if name.startswith("attention_prefill"))
    assert attention == 12 * 4 * d * sum(n * n for n in lengths)
    products = sum(value for name, value in flops.items() if name.split("@")[0].endswith("_proj"))
    assert products == 12 * 2 * tokens * 12 * d * d


def test_a_local_layer_sees_a_window_around_each_token():
    """ModernBERT's: 14 of 22 layers see 64 tokens on each side, the others all; pairs of 1,000 tokens."""
    model = model_from_config(MODERNBERT, "x")
    flops = flops_of(model, BatchShape(1000, 1, ((1000, 0),)))
    pairs = [value / (4 * 768) for name, value in flops.items() if name.startswith("attention_prefill")]
    assert sorted(pairs) == sorted([14 * (1000 * 129 - 64 * 65), 8 * 1000**2])


def test_no_lm_head_is_multiplied_held_or_sampled_from():
    model = load_model("qwen3-embedding-8b")
    text = replace(model, pooling=None, tie_word_embeddings=False)
    shape = BatchShape(100, 2, ((60, 0), (40, 0)))
    left_out = set(flops_of(text, shape)) - set(flops_of(model, shape))
    assert left_out == {"lm_head", "sample"}
    assert sum(weight_bytes(text).values()) - sum(weight_bytes(model).values()) == 2 * 151665 * 4096


def test_the_mean_reads_all_states_and_the_others_one_of_each_prompt():
    """bf16, d = 1,024: 2 B d b for a state; n d (2 + 12) for the mean, whose step has n tokens."""
    shape = BatchShape(500, 3, ((100, 0), (250, 0), (150, 0)))
    for pooling, name, expected in (("cls", "take_states", 2 * 3 * 1024 * 2), ("mean", "mean_pool", 500 * 1024 * 14)):
        nodes = build_graph(replace(load_model("bge-m3"), pooling=pooling, dtype="bf16")).nodes
        assert next(node.work(shape).hbm_bytes for node in nodes if node.name == name) == expected


def test_scores_of_an_encoder_come_behind_a_layer():
    """2 B d (d + c), once a prompt; a decoder's without the layer."""
    shape, bge = BatchShape(500, 4, ((125, 0),) * 4), load_model("bge-reranker-v2-m3")
    flops = flops_of(bge, shape)
    assert flops["score_layer"] + flops["score"] == 2 * 4 * 1024 * (1024 + 1)
    flops = flops_of(replace(load_model("qwen3-embedding-0.6b"), num_labels=2), shape)
    assert (flops["score"], "score_layer" in flops) == (2 * 4 * 1024 * 2, False)


def test_every_pair_is_once_more_than_causal_but_for_the_diagonal():
    for tokens in (1, 2, 127, 1000):
        assert pairs_around(tokens) + tokens == 2 * visible_pairs(tokens, 0)

"""Steps in which a sequence verifies drafted tokens: more rows everywhere, but its keys and values are read once."""

import pytest

from perfmodel.ops import BatchShape, StepGraph, Work, build_graph, decode_shape
from perfmodel.ops.attention.decode import attention_decode
from perfmodel.ops.attention.prefill import Heads
from perfmodel.specs import load_model

MODELS = ["llama-3.1-8b", "deepseek-v2-lite", "gpt-oss-20b", "mixtral-8x7b", "nemotron-3-nano-30b-a3b"]
HEADS = Heads(32, 8, 128, 128, "bf16", 2.0, 2.0)


def works(graph: StepGraph, shape: BatchShape) -> dict[str, Work]:
    return {node.name: node.work(shape) for node in graph.nodes}


def test_queries_of_a_sequence_share_its_keys() -> None:
    one, five = (attention_decode(8, 8000, HEADS, queries=queries) for queries in (1, 5))
    assert five.kv_bytes == one.kv_bytes
    assert five.flops == 5 * one.flops
    assert five.activation_bytes == 5 * one.activation_bytes
    assert five.num_kernels == one.num_kernels


def test_a_window_reaches_as_much_further_as_its_last_query() -> None:
    heads = Heads(32, 8, 128, 128, "bf16", 2.0, 2.0, window=100)
    filled = attention_decode(1, 100, heads, queries=5)
    assert filled.kv_bytes == attention_decode(1, 104, HEADS).kv_bytes
    assert attention_decode(1, 50, heads, queries=5).kv_bytes == attention_decode(1, 50, HEADS).kv_bytes


@pytest.mark.parametrize("name", MODELS)
def test_one_query_each_is_a_plain_decode(name: str) -> None:
    graph = build_graph(load_model(name))
    spans = graph.model.attention_spans
    plain = decode_shape(6, 3000, spans)
    counted = BatchShape(6, 6, (), 6, 18000, plain.decode_windowed, decode_tokens=6)
    assert works(graph, plain) == works(graph, counted)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_that_are_verified_are_multiplied_like_those_of_other_sequences(name: str) -> None:
    graph = build_graph(load_model(name))
    spans = graph.model.attention_spans
    verified, more = works(graph, decode_shape(4, 2000, spans, 5)), works(graph, decode_shape(20, 2000, spans))
    for node, work in verified.items():
        if work.family in ("gemm", "moe", "sampling", "elementwise"):
            assert work == more[node], node


@pytest.mark.parametrize("name", MODELS)
def test_keys_and_values_are_read_once_and_multiplied_for_every_query(name: str) -> None:
    graph = build_graph(load_model(name))
    spans = graph.model.attention_spans
    plain, verified = works(graph, decode_shape(4, 5000, spans)), works(graph, decode_shape(4, 5000, spans, 5))
    for node, work in plain.items():
        if work.family == "attention_decode":
            assert verified[node].flops == pytest.approx(5 * work.flops)
            assert verified[node].kv_bytes == pytest.approx(work.kv_bytes, rel=0.04)  # a window of 128 and 4 more
        if work.family == "scan" and work.kv_bytes:  # the state is read once, and kept after each token
            assert verified[node].kv_bytes == pytest.approx(3 * work.kv_bytes)


def test_prompts_and_decodes_partition_a_step() -> None:
    """Tokens, samples and contexts add up; both parts include the tokens of other ranks."""
    shape = BatchShape(506, 8, ((300, 0), (200, 50)), 6, 900, (600,), group_tokens=1500)
    prompts, decodes = shape.apart
    assert (prompts.num_tokens, prompts.num_samples, prompts.prefills) == (500, 2, shape.prefills)
    assert (decodes.num_tokens, decodes.num_samples, decodes.decode_context) == (6, 6, 900)
    assert prompts.num_decodes == 0
    assert not decodes.prefills
    others = 1500 - 506
    assert (prompts.group_tokens, decodes.group_tokens) == (500 + others, 6 + others)

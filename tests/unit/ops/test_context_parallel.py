"""Decode context parallelism: what ranks say to each other by hand, what they share out, what memory they gain."""

import pytest

from perfmodel.cost import plan_memory
from perfmodel.errors import UnsupportedError
from perfmodel.models.cards import load_model
from perfmodel.ops import BatchShape, build_graph
from perfmodel.ops.messages import RankGroup
from perfmodel.specs import EngineSpec, load_hardware, load_scenario

# 64 heads of 128 over 8 KV heads, and 128 heads of a latent of 512 + 64, in 16 bits.
GQA, MLA = "llama-3.1-70b", "deepseek-v3"
SHAPE = BatchShape(5 + 100, 6, ((100, 4000),), 5, 5 * 3000)


def works(name, size, tp=16):
    engine = EngineSpec(tensor_parallel_size=tp, decode_context_parallel_size=size)
    return {node.name: node.work(SHAPE) for node in build_graph(load_model(name), engine).nodes}


@pytest.mark.parametrize(
    ("name", "size", "heads", "widths", "token_bytes"),
    [(GQA, 2, 4 * 2, (128, 128), 2 * 128 * 2), (MLA, 8, 8 * 8, (576, 512), 576 * 2)],
)
def test_messages_by_hand(name, size, heads, widths, token_bytes):
    """heads: of a group; widths: elements of a query and of its result; token_bytes: cached."""
    messages = {key: work.message for key, work in works(name, size).items() if key.startswith("dcp_") and work.message}
    query, result = widths
    assert {key: (message.kind, message.bytes_) for key, message in messages.items()} == {
        "dcp_query_all_gather": ("all_gather", 5 * heads * query * 2),
        "dcp_sums_all_gather": ("all_gather", 5 * heads * size * 4),
        "dcp_reduce_scatter": ("reduce_scatter", 5 * heads * result * 2),
        "dcp_context_all_gather": ("all_gather", 4000 * token_bytes),
    }
    assert all(message.group.members().shape == (16 // size, size) for message in messages.values())


@pytest.mark.parametrize(("name", "size"), [(GQA, 2), (MLA, 2), (MLA, 16)])
def test_a_rank_reads_and_writes_its_part_of_the_tokens_and_multiplies_as_much(name, size):
    """More heads over fewer tokens; prompts attend as before."""
    alone, shared = works(name, 1), works(name, size)
    attention = "attention_decode"
    assert shared[attention].kv_bytes == pytest.approx(alone[attention].kv_bytes / size)
    assert shared[attention].flops == pytest.approx(alone[attention].flops)
    assert shared["kv_write"].kv_bytes == pytest.approx(alone["kv_write"].kv_bytes / size)
    assert shared["attention_prefill"] == alone["attention_prefill"]
    assert not [key for key in alone if key.startswith("dcp_")]


def test_groups_are_neighbours_of_a_tensor_parallel_group():
    """As vLLM reshapes its ranks: all_ranks.reshape(-1, dcp)."""
    assert RankGroup("context", 4, 2, dcp=2).members().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_cache_holds_as_many_times_the_tokens(size):
    """Blocks are as many, of tokens of all ranks: vLLM's KV budget grows by the size (pull request 23734)."""
    plans = [
        plan_memory(
            load_model(MLA),
            load_hardware("h200-sxm"),
            EngineSpec(tensor_parallel_size=8, decode_context_parallel_size=number, block_size=64),
        )
        for number in (1, size)
    ]
    assert plans[1].num_kv_blocks == plans[0].num_kv_blocks
    assert plans[1].max_tokens == size * plans[0].max_tokens
    assert plans[1].kv_bytes == plans[0].kv_bytes
    assert plans[1].weight_bytes == plans[0].weight_bytes


def test_what_is_no_plain_cache_is_refused():
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    for more in ({"speculative_config": drafts}, {"kv_cache": "contiguous"}, {"kv_cache_residual_tokens": 64}):
        with pytest.raises(ValueError, match=f"got {next(iter(more))} with decode_context_parallel_size=2"):
            EngineSpec(tensor_parallel_size=2, decode_context_parallel_size=2, kv_cache_dtype="int8", **more)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["engine.decode_context_parallel_size=2"], "is on 1 of 4 tensor-parallel devices; expected a divisor of that"),
        (["engine.tensor_parallel_size=16", "engine.decode_context_parallel_size=4"], "is on 2 of 16"),
        (
            ["engine.tensor_parallel_size=16", "engine.decode_context_parallel_size=2", "engine.profile=trtllm"],
            "does not have it",
        ),
        (
            ["model=gemma-2-9b", "engine.tensor_parallel_size=16", "engine.decode_context_parallel_size=2"],
            "some of gemma-2-9b do not",
        ),
    ],
)
def test_what_ranks_cannot_share_out_is_refused(changes, reason):
    """vLLM's limit: from 1 to tensor-parallel size / KV heads, of which it is a divisor."""
    with pytest.raises(UnsupportedError, match=reason):
        load_scenario("llama-3.1-70b-h100-tp4", ["engine.quantization=none", *changes])

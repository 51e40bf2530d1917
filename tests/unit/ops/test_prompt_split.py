"""Prefill context parallelism: what ranks compute of a prompt, what they say to each other, what is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import plan_memory
from perfmodel.cost.steps.stages import PromptSplitCostModel, rank_shape
from perfmodel.cost.steps.step_costs import step_costs
from perfmodel.errors import UnsupportedError
from perfmodel.models.cards import load_model
from perfmodel.ops import BatchShape, build_graph
from perfmodel.ops.attention.layer import split_prompts
from perfmodel.ops.attention.prefill import visible_pairs
from perfmodel.ops.work import decode_shape
from perfmodel.specs import EngineSpec, load_hardware, load_scenario

SHAPE = BatchShape(5 + 8192, 6, ((8192, 4096),), 5, 5 * 3000)


def scenario(*overrides, profile="datasheet", model="deepseek-v3", **engine):
    data = {"name": "split", "model": model, "hardware": "h200-sxm", "traffic": "chat"}
    sizes = {"tensor_parallel_size": 8, "prefill_context_parallel_size": 2}
    return load_scenario(json.dumps({**data, "engine": {"profile": profile, **sizes, **engine}}), list(overrides))


def test_parts_are_those_of_vllm():
    """DualChunkSwap (pcp_manager.py): of four ranks the first has chunks 0 and 7 of eight; 16 tokens, 10 cached."""
    assert split_prompts([(16, 10)], 4) == [(2, 10), (2, 24)]
    assert split_prompts([(5, 0)], 2) == [(2, 0), (2, 3)]
    assert split_prompts([(16, 10)], 1) == [(16, 10)]


@given(st.integers(1, 64), st.integers(0, 5000), st.integers(1, 9))
def test_all_ranks_attend_to_as_many_pairs(chunk, cached, ranks):
    """A prompt that divides evenly: the pairs of one rank times the ranks are all pairs, and so are the tokens."""
    new = 2 * ranks * chunk
    parts = split_prompts([(new, cached)], ranks)
    assert ranks * sum(visible_pairs(*part) for part in parts) == visible_pairs(new, cached)
    assert ranks * sum(tokens for tokens, _ in parts) == new


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 900)), min_size=1, max_size=4), st.integers(2, 8))
def test_no_rank_has_less_than_its_share_nor_more_than_a_chunk_beyond(prefills, ranks):
    """Ragged prompts: the rank that is counted has the longest parts."""
    tokens = sum(new for new, _ in prefills)
    shape = rank_shape(BatchShape(tokens + 3, 9, tuple(prefills), 3, 30), ranks)
    own = shape.num_tokens - 3
    assert tokens / ranks <= own <= tokens / ranks + 2 * len(prefills)
    assert shape.prefills == tuple(prefills)


@pytest.mark.parametrize(("name", "token_bytes"), [("llama-3.1-70b", 2 * 128 * 2), ("deepseek-v3", 576 * 2)])
@pytest.mark.parametrize("size", [2, 4])
def test_messages_and_work_by_hand(name, token_bytes, size):
    """One KV head of 128 per device, or latents of 576, in 16 bits; hidden states go to all ranks before the logits."""
    model = load_model(name)

    def works(pcp):
        engine = EngineSpec(profile="datasheet", tensor_parallel_size=8, prefill_context_parallel_size=pcp)
        return {node.name: node.work(rank_shape(SHAPE, pcp)) for node in build_graph(model, engine).nodes}

    alone, shared = works(1), works(size)
    gathers = {key: work.message for key, work in shared.items() if key.startswith("pcp_") and work.message}
    assert {key: (message.kind, message.bytes_) for key, message in gathers.items()} == {
        "pcp_kv_all_gather": ("all_gather", 8192 * token_bytes),
        "pcp_hidden_all_gather": ("all_gather", 8192 * model.hidden_size * 2),
    }
    groups = gathers["pcp_kv_all_gather"].group.members()
    assert groups.tolist() == [[rank + 8 * other for other in range(size)] for rank in range(8)]
    attention = "attention_prefill"
    assert size * shared[attention].flops == pytest.approx(alone[attention].flops)
    assert shared["o_proj"].flops / alone["o_proj"].flops == pytest.approx((8192 / size + 5) / (8192 + 5))
    assert shared["attention_decode"] == alone["attention_decode"]
    assert shared["kv_write"].kv_bytes + shared["pcp_kv_write"].kv_bytes == pytest.approx(alone["kv_write"].kv_bytes)
    assert not [key for key in alone if key.startswith("pcp_")]


def test_prompts_are_faster_decodes_are_not_and_the_cache_is_as_large():
    alone, shared = (scenario(model="llama-3.1-70b", prefill_context_parallel_size=size) for size in (1, 4))
    assert shared.engine.num_devices == 4 * alone.engine.num_devices
    prompt, decodes = BatchShape(32768, 1, ((32768, 0),)), decode_shape(16, 4000)
    times = [
        [step_costs(item).cost_model().duration_ps(shape) for shape in (prompt, decodes)] for item in (alone, shared)
    ]
    assert times[0][0] / 4 < times[1][0] < times[0][0] / 2
    assert times[1][1] == times[0][1]  # all ranks compute all decodes
    plans = [plan_memory(item.model, load_hardware("h200-sxm"), item.engine) for item in (alone, shared)]
    assert plans[1].kv_bytes_per_token == plans[0].kv_bytes_per_token


def test_explained_and_priced_alike_and_leaps_are_steps():
    costs = step_costs(scenario(prefill_context_parallel_size=2))
    model = costs.cost_model()
    assert isinstance(model, PromptSplitCostModel)
    assert model.duration_ps(SHAPE) / 1e12 == pytest.approx(costs.estimate(SHAPE).duration_s, rel=2e-3)
    first = decode_shape(8, 1000)
    run = model.run(first, (), 5)
    steps = [model.duration_ps(first._replace(decode_context=8 * (1000 + i))) for i in range(5)]
    assert run.duration(5) == sum(steps)
    assert model.fresh().usage().flops == 0.0


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"profile": "vllm", "model": "llama-3.1-70b"}, "latent attention"),
        ({"profile": "vllm", "version": "0.21.0"}, "does not have it"),
        ({"profile": "trtllm"}, "does not have it"),
        ({"profile": "vllm", "data_parallel_size": 2}, "data_parallel_size=2"),
        ({"profile": "vllm", "pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"profile": "vllm", "decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        ({"model": "gpt-oss-120b"}, "all layers attend to all keys"),
    ],
)
def test_what_prompts_are_not_split_with(given, why):
    """vLLM refuses all of its rows but the third in validate_config and check_and_update_config."""
    with pytest.raises(UnsupportedError, match=f"prefill_context_parallel_size: got 2.*{why}"):
        scenario(**given)

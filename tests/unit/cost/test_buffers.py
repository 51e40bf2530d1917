"""Buffers beside weights and KV blocks, against what PyTorch and vLLM said that they asked for."""

import pytest

from perfmodel.cost import plan_memory
from perfmodel.cost.memory.footprint import activation_bytes, rotary_table_bytes, sampler_bytes_per_logit
from perfmodel.models.cards import load_model
from perfmodel.models.hf.config import model_from_config
from perfmodel.ops.sharding import Sharding
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario_file import load_hardware

GIB, MIB = 2**30, 2**20
H100: HardwareSpec = load_hardware("h100-sxm-80gb")
VLLM = EngineSpec(version="0.15.1")


def config(**more: object) -> dict[str, object]:
    base: dict[str, object] = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 4}
    base |= {"num_attention_heads": 32, "intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 8192}
    return base | more


def test_the_sort_asks_for_what_a_log_says() -> None:
    """vLLM 0.8.0, Qwen2.5-72B, 1,024 dummy requests: "Tried to allocate 1.74 GiB" (issue 15105 of vllm-project/vllm) is
    CUB's second buffer, a key of 4 bytes and an index of 8 for each of 1024 x 152064 logits. Beside it are logits (2),
    their copy (4), sorted ones (4) and both sets of indices (8, 8)."""
    engine = VLLM.model_copy(update={"max_num_seqs": 1024})
    second_buffer = sampler_bytes_per_logit(engine, 2) - (2 + 4 + 4 + 8 + 8)
    assert second_buffer * 1024 * load_model("qwen2.5-72b").vocab_size / GIB == pytest.approx(1.74, abs=0.005)


def test_few_rows_are_sorted_as_one_and_other_engines_do_not_sort() -> None:
    """Below 128 rows: 2 + 4 + 4 + 8, two arrays of (row, index) pairs of 8, keys of 4, the second buffer of 12."""
    assert sampler_bytes_per_logit(VLLM.model_copy(update={"max_num_seqs": 128}), 2) == 38
    assert sampler_bytes_per_logit(VLLM.model_copy(update={"max_num_seqs": 127}), 2) == 50
    assert sampler_bytes_per_logit(EngineSpec(profile="sglang"), 2) == 2 + 4 + 4
    assert sampler_bytes_per_logit(EngineSpec(profile="trtllm"), 2) == 2 + 4 + (4 + 4) + 4 + (4 + 4)


def test_the_worse_moment_counts_and_hidden_states_stay_for_both() -> None:
    """One sequence of 2,048 tokens: layers of T b (d + 3 f); 4,096 sequences of 32,000 logits outweigh them."""
    model, shard = model_from_config(config(), "any"), Sharding.of(VLLM)
    few, many = (VLLM.model_copy(update={"max_num_seqs": n, "max_num_batched_tokens": 2048}) for n in (1, 4096))
    hidden = 2048 * 2 * 4096
    assert activation_bytes(model, shard, few) == hidden + 2048 * 2 * (4096 + 3 * 8192)
    assert activation_bytes(model, shard, many) == hidden + 38 * 4096 * 32000


def test_a_table_cut_to_the_context_saves_what_was_measured() -> None:
    """With --max-model-len 32768 "Qwen3-VL saves 224MB" (pull request 44738 of vllm-project/vllm): its table has four
    times as many positions."""
    longest, shorter = load_model("qwen3-vl-8b"), config(head_dim=128, max_position_embeddings=32768)
    sections = {"rope_type": "default", "mrope_section": [24, 20, 20]}
    cut = model_from_config(shorter | {"rope_scaling": sections}, "cut")
    saved = rotary_table_bytes(longest, VLLM) - rotary_table_bytes(cut, VLLM)
    assert saved / MIB == pytest.approx(224, abs=0.5)


def test_tables_are_one_for_each_rotation_and_by_the_engines_format() -> None:
    """8,192 positions of 128 elements: 2 bytes under vLLM, 4 under SGLang, none where angles are computed; a quarter
    where a quarter of each head is rotated."""
    whole = model_from_config(config(head_dim=128), "whole")
    part = model_from_config(config(head_dim=128, partial_rotary_factor=0.25), "part")
    assert rotary_table_bytes(whole, VLLM) == 8192 * 128 * 2
    assert rotary_table_bytes(whole, EngineSpec(profile="sglang")) == 8192 * 128 * 4
    assert rotary_table_bytes(whole, EngineSpec(profile="llamacpp")) == 0
    assert rotary_table_bytes(part, VLLM) == rotary_table_bytes(whole, VLLM) / 4


def test_a_table_of_ten_million_positions_takes_its_share_of_the_blocks() -> None:
    """Llama-4 Scout: 10,485,760 positions x 128 x 2 bytes on each device, however short the served context is."""
    engine = EngineSpec(version="0.15.1", tensor_parallel_size=4, max_model_len=4096)
    plan = plan_memory(load_model("llama-4-scout-fp8"), H100, engine)
    assert plan.rotary_table_bytes == 10_485_760 * 128 * 2
    used = plan.weight_bytes + plan.workspace_bytes + plan.kv_bytes
    assert used == pytest.approx(plan.usable_bytes, abs=plan.block_size * plan.kv_bytes_per_token)
    assert "rotary table" in str(plan)


def test_standard_attention_holds_the_scores_and_their_softmax() -> None:
    """Two matrices of 1,000 x 1,000 per head: 32 heads on one device, 16 on each of two."""
    model, standard = model_from_config(config(), "any"), {"attention": "standard", "max_num_batched_tokens": 1000}
    for tp, heads in ((1, 32), (2, 16)):
        engine = VLLM.model_copy(update={"max_num_seqs": 1, "tensor_parallel_size": tp, **standard})
        fused = engine.model_copy(update={"attention": EngineSpec().attention})
        plain, more = (activation_bytes(model, Sharding.of(spec), spec) for spec in (fused, engine))
        assert more - plain == 2 * heads * 1000 * 1000 * 2

"""Groups of layers with KV blocks of their own: counted by hand from vLLM's rules, by engine, version and device."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost import MemoryPlan, plan_memory
from perfmodel.cost.memory.groups import kv_groups, state_blocks
from perfmodel.models.architecture import Attention, GatedDeltaNet
from perfmodel.specs import load_hardware, load_model
from perfmodel.specs.engine.spec import EngineSpec

H100 = load_hardware("h100-sxm-80gb")


def groups_of(name: str, hardware: str = "h100-sxm-80gb", **engine: object) -> list[tuple[int, int | None, bool]]:
    found = kv_groups(load_model(name), load_hardware(hardware), EngineSpec.model_validate(engine))
    return [(group.num_layers, group.span, group.is_chunk) for group in found]


def planned(name: str, tp: int = 1, **engine: object) -> MemoryPlan:
    spec = EngineSpec.model_validate({"tensor_parallel_size": tp, "num_gpu_blocks_override": 100_000, **engine})
    return plan_memory(load_model(name), H100, spec)


def test_gpt_oss_is_two_groups_by_hand() -> None:
    """36 layers, every other with a window of 128: two groups of 18. Of 16,384 tokens the one keeps 1,024 blocks of 16,
    the other those of 128 tokens and one more, 9; a block is 16 tokens x 18 layers x 8 heads x 64 x 2 x 2 bytes."""
    assert groups_of("gpt-oss-120b") == [(18, None, False), (18, 128, False)]
    plan = planned("gpt-oss-120b")
    assert plan.block_size * plan.kv_bytes_per_token == 16 * 18 * 8 * 64 * 2 * 2
    assert plan.max_batch(16_384) == 100_000 // (1024 + 9)
    assert plan.max_tokens == 100_000 // 2 * 16  # as vLLM logs it: a block in each group


def test_gemma_3_wastes_eight_places_by_hand() -> None:
    """62 layers, 10 of them full: groups of 10, 52 windowed layers in ceil(52 / 10) = 6 of them, 70 places in all.

    32,768 tokens are 2,048 blocks of the full group and 1,024 / 16 + 1 of each of the others.
    """
    found = groups_of("gemma-3-27b")
    assert found[0] == (10, None, False)
    assert sorted(found[1:]) == [(8, 1024, False)] * 2 + [(9, 1024, False)] * 4
    assert planned("gemma-3-27b").max_batch(32_768) == 100_000 // (2048 + 6 * 65)


def test_llama_4_keeps_a_chunk_by_hand() -> None:
    """48 layers, every fourth full: 12 + 3 x 12; of 32,768 tokens a chunk of 8,192 at most."""
    assert groups_of("llama-4-scout") == [(12, None, False)] + [(12, 8192, True)] * 3
    assert planned("llama-4-scout", tp=4).max_batch(32_768) == 100_000 // (2048 + 3 * 512)


def test_stages_of_a_pipeline_have_a_share_of_each_group() -> None:
    """gpt-oss's 36 layers on two stages: 9 of each group on each, so a block is half as large."""
    whole, halved = planned("gpt-oss-120b"), planned("gpt-oss-120b", pipeline_parallel_size=2)
    assert halved.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    assert halved.max_batch(16_384) == whole.max_batch(16_384)


def test_where_all_layers_have_a_window_they_are_one_group_with_or_without_the_switch() -> None:
    assert groups_of("mistral-7b") == groups_of("mistral-7b", disable_hybrid_kv_cache_manager=True)
    assert groups_of("mistral-7b") == [(32, 4096, False)]
    plan = planned("mistral-7b")
    assert plan.max_batch(100_000) == 100_000 // (4096 // 16 + 1)
    assert plan.max_context() >= plan.longest  # nothing limits it


def test_cpus_have_the_groups_of_gpus() -> None:
    """`support_hybrid_kv_cache` of vLLM's CpuPlatform; a run of a hybrid there has four blocks for each sequence."""
    assert groups_of("gemma-3-27b", "cpu") == groups_of("gemma-3-27b") != []


@pytest.mark.parametrize(
    ("why", "name", "hardware", "engine"),
    [
        ("the switch", "gpt-oss-120b", "h100-sxm-80gb", {"disable_hybrid_kv_cache_manager": True}),
        ("a version before", "gpt-oss-120b", "h100-sxm-80gb", {"version": "0.9.0"}),
        ("another engine, of which it is not known", "gpt-oss-120b", "h100-sxm-80gb", {"profile": "trtllm"}),
        ("not for TPUs", "gemma-3-27b", "tpu-v6e", {}),
        ("chunks only from 0.14 on", "llama-4-scout", "h100-sxm-80gb", {"version": "0.12"}),
        ("nothing differs", "llama-3.1-8b", "h100-sxm-80gb", {}),
        ("blocks of two sizes", "mimo-v2-flash", "h100-sxm-80gb", {}),
        ("one run of memory", "gpt-oss-120b", "h100-sxm-80gb", {"kv_cache": "contiguous"}),
    ],
)
def test_no_groups(why: str, name: str, hardware: str, engine: dict[str, object]) -> None:
    assert groups_of(name, hardware, **engine) == [], why


def test_as_many_as_the_largest_kind_where_kinds_are_nearly_equal() -> None:
    """13 full layers beside 12 windowed ones, as with a drafter's layer, are two groups of 13, not three of 12."""
    model = load_model("gpt-oss-20b")
    full = next(layer for layer, _ in model.layers if isinstance(layer.mixer, Attention) and layer.mixer.span is None)
    found = kv_groups(replace(model, layers=(*model.layers, (full, 1))), H100, EngineSpec())
    assert sorted(group.num_layers for group in found) == [12, 13]


@given(
    name=st.sampled_from(["gpt-oss-20b", "gpt-oss-120b", "gemma-3-27b", "gemma-3-4b"]),
    context=st.integers(1, 130_000),
    block=st.sampled_from([8, 16, 32, 64]),
    tp=st.sampled_from([1, 2]),
)
@settings(max_examples=60, deadline=None)
def test_no_less_fits_than_without_groups_but_for_what_they_waste(name: str, context: int, block: int, tp: int) -> None:
    """In tokens of the layers' share of a block's places: a window keeps one block too many at most, rounding one."""
    model = load_model(name)
    engine = EngineSpec(tensor_parallel_size=tp, block_size=block)
    grouped = plan_memory(model, H100, engine)
    plain = plan_memory(model, H100, engine.model_copy(update={"disable_hybrid_kv_cache_manager": True}))
    groups = kv_groups(model, H100, engine)
    places = len(groups) * max(group.num_layers for group in groups)
    share = sum(group.num_layers for group in groups) / places
    rows = -(-context // block)
    assert grouped.max_batch(context) + 1 >= share * plain.max_batch(context) * rows / (rows + 1)
    assert grouped.max_context() >= share * plain.max_context() - 2 * block


@given(context=st.integers(1, 8192), name=st.sampled_from(["llama-4-scout-fp8", "gpt-oss-120b"]))
@settings(max_examples=30, deadline=None)
def test_what_a_window_does_not_cut_is_full_attention(context: int, name: str) -> None:
    """Up to the window (or chunk) n groups of L / n layers hold as many sequences as one of L."""
    model, engine = load_model(name), EngineSpec(tensor_parallel_size=2)
    context = min(context, 8192 if "llama" in name else 128)
    plain = engine.model_copy(update={"disable_hybrid_kv_cache_manager": True})
    fits = [plan_memory(model, H100, each).max_batch(context) for each in (engine, plain)]
    assert fits[0] == pytest.approx(fits[1], abs=1)


@pytest.mark.parametrize(("name", "logged"), [("qwen3.5-27b", 784), ("qwen3.5-35b-a3b", 1056)])
def test_attention_blocks_are_as_large_as_vllm_says_when_it_starts(name: str, logged: int) -> None:
    """vLLM 0.19.1 with Qwen3.5-27B: "Setting attention block size to 784 tokens to ensure that attention page size is
    >= mamba page size"; 1,056 with a Qwen3.5 mixture whose attention has 2 KV heads of 256.
    """
    states = state_blocks(load_model(name), H100, EngineSpec())
    assert states is not None
    assert states.block_size == logged


def test_states_are_blocks_of_the_pool_by_hand() -> None:
    """Qwen3.5-27B: 16 layers with keys, 48 with states: one group and three. A state takes the room of 49 blocks of 16
    tokens (784), three of them 147, and half of a large block is empty on average: 24. 2,048 tokens are 128 more."""
    plan = planned("qwen3.5-27b")
    assert plan.state_bytes == 0
    assert plan.block_size * plan.kv_bytes_per_token == 16 * 16 * 4 * 512 * 2
    assert plan.max_batch(2048) == 100_000 // (128 + 147 + 24)


@pytest.mark.parametrize("other", [{"profile": "sglang"}, {"disable_hybrid_kv_cache_manager": True}])
def test_states_are_set_apart_elsewhere(other: dict[str, object]) -> None:
    """Under other engines, and under the switch, by which the executor plans: its states are tensors of their own."""
    engine = EngineSpec.model_validate({"max_num_seqs": 64, "num_gpu_blocks_override": 1000, **other})
    plan = plan_memory(load_model("qwen3.5-27b"), load_hardware("h200-sxm"), engine)
    assert plan.state_bytes == 64 * plan.state_bytes_per_sequence > 0


def test_what_a_server_starts_with_by_default_fits() -> None:
    """vLLM serves Qwen3.5-27B on one H200, with 1,024 sequences at most, of which as many run as there are states."""
    plan = plan_memory(load_model("qwen3.5-27b"), load_hardware("h200-sxm"), EngineSpec(max_num_seqs=1024))
    assert 100 < plan.max_batch(2048) < 1024


def test_state_blocks_need_attention_and_states_of_one_kind():
    """With one layer of another window or state size, blocks have no common size."""
    model = load_model("qwen3.5-27b")
    assert state_blocks(model, H100, EngineSpec()) is not None
    layers = list(model.iter_layers())
    for kind, changed in ((Attention, {"window": 128}), (GatedDeltaNet, {"num_value_heads": 16})):
        place = next(i for i, layer in enumerate(layers) if isinstance(layer.mixer, kind))
        other = replace(layers[place], mixer=replace(layers[place].mixer, **changed))
        mixed = [*layers[:place], other, *layers[place + 1 :]]
        assert state_blocks(replace(model, layers=tuple((layer, 1) for layer in mixed)), H100, EngineSpec()) is None

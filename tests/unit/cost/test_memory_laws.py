"""Laws of the memory plan: parts add up, devices together hold the model, and the promised batches fit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost import plan_memory
from perfmodel.cost.memory.file_types import fits_of_types
from perfmodel.cost.memory.footprint import kv_bytes, kv_bytes_per_token, weights
from perfmodel.models.architecture import MoEFFN, QuantizationSpec
from perfmodel.models.cards import load_model
from perfmodel.models.changes import CHANGES
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.params import count_parameters, weight_bytes
from perfmodel.ops.formats import served_model
from perfmodel.ops.sharding import Sharding, stages
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario_file import load_hardware

H200 = load_hardware("h200-sxm")
ENGINES = [
    EngineSpec(),
    EngineSpec(version="0.21", max_num_batched_tokens=8192),  # graphs count inside the share
    EngineSpec(tensor_parallel_size=2, disable_hybrid_kv_cache_manager=True, max_num_seqs=64),  # states are set apart
    EngineSpec(pipeline_parallel_size=2),
    EngineSpec(kv_tiers=({"tokens": 64}, {"dtype": "int4"})),  # type: ignore[arg-type]
]
MODELS = ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v2-lite", "nemotron-3-nano-30b-a3b", "qwen3.5-27b"]


def plan(name, engine):
    return plan_memory(load_model(name), H200, engine)


def changed(name, **fields):
    model, changes = load_model(name), ModelChanges.model_validate(fields)
    for field, change in CHANGES.items():
        model = change(model, changes) if getattr(changes, field) is not None else model
    return model


def stage_weights_of(model, engine):
    """Weight bytes of a device, by pipeline stage."""
    served, shard = served_model(model, engine), Sharding.of(engine)
    layers = list(served.iter_layers())
    spans = stages(len(layers), shard.pp)
    return [
        weights(served, shard, layers[span.start : span.stop], is_first=number == 0, is_last=number == len(spans) - 1)
        for number, span in enumerate(spans)
    ]


def plan_if_supported(name, engine):
    if engine.kv_tiers and name != "llama-3.1-8b":
        return None  # KV tiers need plain attention
    return plan(name, engine)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: ",".join(sorted(engine.model_fields_set)) or "defaults")
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_add_up_to_the_usable_memory_within_a_block(name, engine):
    layout = plan_if_supported(name, engine)
    if layout is None:
        return
    buffers = layout.activation_bytes + layout.rotary_table_bytes + layout.reserve_bytes + layout.graph_bytes
    left = layout.usable_bytes - sum(layout.weights.values()) - buffers - layout.state_bytes - layout.kv_bytes
    assert 0 <= left < layout.block_size * layout.kv_bytes_per_token
    assert (
        min(layout.activation_bytes, layout.reserve_bytes, layout.rotary_table_bytes) > 0
        or not layout.rotary_table_bytes
    )
    assert layout.usable_bytes == pytest.approx(0.9 * layout.visible_bytes, rel=0.03)


def test_every_part_occurs_in_some_layout():
    """Otherwise the law above would miss an omitted part."""
    layouts = [
        layout for name in MODELS for engine in ENGINES if (layout := plan_if_supported(name, engine)) is not None
    ]
    for part in (
        "activation_bytes",
        "rotary_table_bytes",
        "reserve_bytes",
        "graph_bytes",
        "state_bytes",
        "num_buffers",
    ):
        assert any(getattr(layout, part) for layout in layouts), part


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: ",".join(sorted(engine.model_fields_set)) or "defaults")
@pytest.mark.parametrize("name", MODELS)
def test_max_batch_and_max_context_agree(name, engine):
    """Maximum batch and maximum context are inverse functions of the number of blocks."""
    layout = plan_if_supported(name, engine)
    for context in (100, 5_000, 50_000) if layout is not None else ():
        batch = layout.max_batch(context)
        if batch and not (layout.state_bytes and batch == layout.max_num_seqs):
            assert layout.max_context(batch) >= context
            assert layout.max_context(batch + 1) < context + layout.block_size
        assert layout.max_batch(context + 1) <= batch


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "gemma-2-9b"])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_fullest_stage_limits_the_number_of_blocks(name, num_stages):
    """The stage with most weights or layers has the fewest blocks."""
    engine = EngineSpec(pipeline_parallel_size=num_stages)
    layout, model = plan(name, engine), served_model(load_model(name), engine)
    layers = list(model.iter_layers())
    num_blocks = []
    for span, stage_weights in zip(stages(len(layers), num_stages), stage_weights_of(model, engine), strict=True):
        token = kv_bytes_per_token(model, Sharding(), layers[span.start : span.stop])
        num_blocks.append((layout.usable_bytes - sum(stage_weights.values()) - layout.workspace_bytes) // (16 * token))
    if not layout.kv_groups:
        assert layout.num_kv_blocks == min(num_blocks)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "gemma-2-2b", "mixtral-8x7b", "opt-13b"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stage_weights_add_up_to_the_checkpoint(name, num_stages):
    """A tied embedding is on the first stage, and a copy of it on the last."""
    model = load_model(name)
    num_bytes = sum(
        sum(stage_weights.values())
        for stage_weights in stage_weights_of(model, EngineSpec(pipeline_parallel_size=num_stages))
    )
    copy = 2 * model.vocab_size * model.hidden_size if model.tie_word_embeddings and num_stages > 1 else 0
    assert num_bytes == pytest.approx(sum(weight_bytes(model).values()) + copy)


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2), (2, 1)])
def test_ranks_share_the_experts_and_replicate_the_router(is_whole, tp, dp):
    """Experts are whole or split by width; a router always has all experts."""
    model = load_model("mixtral-8x7b")
    engine = EngineSpec(tensor_parallel_size=tp, data_parallel_size=dp, enable_expert_parallel=is_whole)
    (stored,) = stage_weights_of(model, engine)
    counts = count_parameters(model).stored
    assert stored["experts"] * tp * dp == 2 * counts["experts"]
    assert stored["router"] == 2 * counts["router"]
    assert stored["attention"] * tp == pytest.approx(2 * counts["attention"])
    assert sum(isinstance(layer.ffn, MoEFFN) for layer in model.iter_layers()) == 32


def test_shared_layers_are_stored_once():
    """Four layers used eight times: the weights of 4 layers, keys and values of 32."""
    shared, four = changed("llama-3.1-8b", share_layers=4), count_parameters(load_model("llama-3.1-8b")).stored
    (stored,) = stage_weights_of(shared, EngineSpec())
    assert stored["dense_ffn"] == 2 * four["dense_ffn"] * 4 / 32
    layout = plan_memory(shared, H200, EngineSpec())
    assert layout.kv_bytes_per_token == plan("llama-3.1-8b", EngineSpec()).kv_bytes_per_token


@pytest.mark.parametrize(
    "engine", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}]
)
def test_nccl_buffers_need_more_than_one_rank_of_any_kind(engine):
    """NCCL allocates its buffers as soon as there are two devices."""
    alone = plan("mixtral-8x7b", EngineSpec()).reserve_bytes
    assert plan("mixtral-8x7b", EngineSpec(**engine)).reserve_bytes > alone + 1e8


def test_n_gpu_layers_counts_the_head_as_the_last_layer():
    """llama.cpp: with 32 layers, layer 33 is the head; the embedding stays on the host."""
    local = {"profile": "llamacpp", "cpu": "xeon-8480", "max_model_len": 4096}
    plans = [plan("llama-3.1-8b", EngineSpec(n_gpu_layers=count, **local)).weights for count in (31, 32, 33)]
    assert ["lm_head" in parts for parts in plans] == [False, False, True]
    assert plans[1]["dense_ffn"] == pytest.approx(plans[0]["dense_ffn"] * 32 / 31)
    assert plans[2]["dense_ffn"] == plans[1]["dense_ffn"]
    assert not any("embedding" in parts for parts in plans)


def test_published_kv_bytes_per_token():
    """DeepSeek-V2 (2024), table 1: MLA caches 9/2 head sizes per layer, here 512 + 64 elements. V3.2's
    indexer adds a key of 128 in FP8 and its scale (vLLM: 132 bytes). Llama-3.1-70B: 8 heads of 128, 320 KiB in all
    (Grattafiori et al.)."""
    for name, size in (
        ("deepseek-v3", 61 * (512 + 64) * 2),
        ("deepseek-v3.2", 61 * ((512 + 64) * 2 + 128 + 4)),
        ("llama-3.1-70b", 320 * 1024),
    ):
        model = load_model(name)
        assert kv_bytes_per_token(model, Sharding(), list(model.iter_layers())) == size


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 2))
def test_rolling_layers_hold_at_most_their_window(context, tp):
    """Half of the layers keep 1,000 tokens and 4 sinks; shorter contexts are kept whole."""
    rolling = changed("llama-2-7b", window=1000, sinks=4, window_every=2)
    full, shard = load_model("llama-2-7b"), Sharding(tp=tp)
    num_bytes = kv_bytes(rolling, shard, list(rolling.iter_layers()), context)
    token = kv_bytes_per_token(full, shard, list(full.iter_layers()))
    assert num_bytes == pytest.approx(token / 2 * (context + min(context, 1004)))


def test_offloaded_layers_leave_memory_for_every_slot():
    """Eight slots of 16,384 tokens need more KV than one, so fewer layers fit, and all slots fit with them."""
    model, card = load_model("llama-3.1-70b"), load_hardware("rtx-4090")
    sizes = {"max_model_len": 16384, "gpu_memory_utilization": 0.95, "block_size": 32}
    one, eight = (
        {
            row.file_type: row
            for row in fits_of_types(model, card, EngineSpec(profile="llamacpp", max_num_seqs=n, **sizes))
        }
        for n in (1, 8)
    )
    for name, row in eight.items():
        assert row.layers < one[name].layers
        engine = EngineSpec(
            profile="llamacpp", max_num_seqs=8, n_gpu_layers=row.layers, cpu="xeon-8480", quantization=name, **sizes
        )
        assert plan_memory(model, card, engine).max_batch(16384) >= 8


def test_norms_are_never_quantized():
    """Mixtral in 8 bits throughout: one byte per router weight, two per norm weight."""
    model = replace(load_model("mixtral-8x7b"), quantization=QuantizationSpec("x", "fp8", kept=frozenset()))
    stored = weights(model, Sharding(), list(model.iter_layers()), is_first=True, is_last=True)
    counts = count_parameters(model).stored
    assert (stored["norms"], stored["router"]) == (2 * counts["norms"], counts["router"])

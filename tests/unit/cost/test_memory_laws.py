"""Laws of the memory plan: its parts are the whole, devices hold the model together, what fits is what was promised."""

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


def held_by(model, engine):
    """Bytes of weights of each device, by pipeline stage."""
    served, shard = served_model(model, engine), Sharding.of(engine)
    layers = list(served.iter_layers())
    spans = stages(len(layers), shard.pp)
    return [
        weights(served, shard, layers[span.start : span.stop], is_first=number == 0, is_last=number == len(spans) - 1)
        for number, span in enumerate(spans)
    ]


def fits(name, engine):
    if engine.kv_tiers and name != "llama-3.1-8b":
        return None  # precisions by age are of plain attention alone
    return plan(name, engine)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: ",".join(sorted(engine.model_fields_set)) or "defaults")
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_are_what_the_engine_may_use_but_for_less_than_a_block(name, engine):
    found = fits(name, engine)
    if found is None:
        return
    beside = found.activation_bytes + found.rotary_table_bytes + found.reserve_bytes + found.graph_bytes
    left = found.usable_bytes - sum(found.weights.values()) - beside - found.state_bytes - found.kv_bytes
    assert 0 <= left < found.block_size * found.kv_bytes_per_token
    assert (
        min(found.activation_bytes, found.reserve_bytes, found.rotary_table_bytes) > 0 or not found.rotary_table_bytes
    )
    assert found.usable_bytes == pytest.approx(0.9 * found.visible_bytes, rel=0.03)


def test_every_part_is_there_somewhere():
    """Else the law above would not notice one that is left out."""
    plans = [found for name in MODELS for engine in ENGINES if (found := fits(name, engine)) is not None]
    for part in (
        "activation_bytes",
        "rotary_table_bytes",
        "reserve_bytes",
        "graph_bytes",
        "state_bytes",
        "num_buffers",
    ):
        assert any(getattr(found, part) for found in plans), part


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: ",".join(sorted(engine.model_fields_set)) or "defaults")
@pytest.mark.parametrize("name", MODELS)
def test_so_many_sequences_of_so_long_a_context_fit_and_no_more(name, engine):
    """Batch and context ask the same of the blocks from two sides."""
    found = fits(name, engine)
    for context in (100, 5_000, 50_000) if found is not None else ():
        batch = found.max_batch(context)
        if batch and not (found.state_bytes and batch == found.max_num_seqs):
            assert found.max_context(batch) >= context
            assert found.max_context(batch + 1) < context + found.block_size
        assert found.max_batch(context + 1) <= batch


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "gemma-2-9b"])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_every_stage_holds_the_blocks_that_the_plan_counts(name, num_stages):
    """The one with most weights, or layers, is what limits them."""
    engine = EngineSpec(pipeline_parallel_size=num_stages)
    found, model = plan(name, engine), served_model(load_model(name), engine)
    layers = list(model.iter_layers())
    room = []
    for span, held in zip(stages(len(layers), num_stages), held_by(model, engine), strict=True):
        token = kv_bytes_per_token(model, Sharding(), layers[span.start : span.stop])
        room.append((found.usable_bytes - sum(held.values()) - found.beside_bytes) // (16 * token))
    if not found.kv_groups:
        assert found.num_kv_blocks == min(room)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "gemma-2-2b", "mixtral-8x7b", "opt-13b"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_hold_the_checkpoint_together(name, num_stages):
    """A table that serves words in and out is on the first stage, and a copy of it on the last."""
    model = load_model(name)
    held = sum(sum(each.values()) for each in held_by(model, EngineSpec(pipeline_parallel_size=num_stages)))
    copy = 2 * model.vocab_size * model.hidden_size if model.tie_word_embeddings and num_stages > 1 else 0
    assert held == pytest.approx(sum(weight_bytes(model).values()) + copy)


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2), (2, 1)])
def test_ranks_hold_all_experts_together_and_each_a_whole_router(is_whole, tp, dp):
    """Experts whole or cut by width; what a router knows is every expert."""
    model = load_model("mixtral-8x7b")
    engine = EngineSpec(tensor_parallel_size=tp, data_parallel_size=dp, enable_expert_parallel=is_whole)
    (held,) = held_by(model, engine)
    counts = count_parameters(model).stored
    assert held["experts"] * tp * dp == 2 * counts["experts"]
    assert held["router"] == 2 * counts["router"]
    assert held["attention"] * tp == pytest.approx(2 * counts["attention"])
    assert sum(isinstance(layer.ffn, MoEFFN) for layer in model.iter_layers()) == 32


def test_layers_that_share_their_weights_are_held_once():
    """Four layers used eight times: as many weights as a model of four, keys and values of all 32."""
    shared, four = changed("llama-3.1-8b", share_layers=4), count_parameters(load_model("llama-3.1-8b")).stored
    (held,) = held_by(shared, EngineSpec())
    assert held["dense_ffn"] == 2 * four["dense_ffn"] * 4 / 32
    found = plan_memory(shared, H200, EngineSpec())
    assert found.kv_bytes_per_token == plan("llama-3.1-8b", EngineSpec()).kv_bytes_per_token


@pytest.mark.parametrize(
    "engine", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}]
)
def test_ranks_of_any_kind_talk_to_each_other(engine):
    """What NCCL holds is there with two devices as with eight, and not with one."""
    alone = plan("mixtral-8x7b", EngineSpec()).reserve_bytes
    assert plan("mixtral-8x7b", EngineSpec(**engine)).reserve_bytes > alone + 1e8


def test_the_head_is_a_layer_more_than_the_model_has():
    """llama.cpp: of 33 for a model of 32 layers the last is the head; the table of words stays with the host."""
    local = {"profile": "llamacpp", "cpu": "xeon-8480", "max_model_len": 4096}
    held = [plan("llama-3.1-8b", EngineSpec(n_gpu_layers=count, **local)).weights for count in (31, 32, 33)]
    assert ["lm_head" in each for each in held] == [False, False, True]
    assert held[1]["dense_ffn"] == pytest.approx(held[0]["dense_ffn"] * 32 / 31)
    assert held[2]["dense_ffn"] == held[1]["dense_ffn"]
    assert not any("embedding" in each for each in held)


def test_published_sizes_of_a_cached_token():
    """DeepSeek-V2 (2024), table 1: of MLA 9/2 head sizes a layer, here 512 + 64 elements; V3.2's indexer adds a key of
    128 in FP8 and its scale (vLLM: 132 bytes); Llama-3.1-70B: 8 heads of 128, 320 KiB in all (Grattafiori et al.)."""
    for name, size in (
        ("deepseek-v3", 61 * (512 + 64) * 2),
        ("deepseek-v3.2", 61 * ((512 + 64) * 2 + 128 + 4)),
        ("llama-3.1-70b", 320 * 1024),
    ):
        model = load_model(name)
        assert kv_bytes_per_token(model, Sharding(), list(model.iter_layers())) == size


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 2))
def test_layers_that_overwrite_hold_their_window_at_most(context, tp):
    """Half of the layers keep 1,000 tokens and 4 sinks; of short contexts all layers hold what there is."""
    rolling = changed("llama-2-7b", window=1000, sinks=4, window_every=2)
    full, shard = load_model("llama-2-7b"), Sharding(tp=tp)
    held = kv_bytes(rolling, shard, list(rolling.iter_layers()), context)
    token = kv_bytes_per_token(full, shard, list(full.iter_layers()))
    assert held == pytest.approx(token / 2 * (context + min(context, 1004)))


def test_layers_on_the_device_leave_room_for_every_slot():
    """Four slots of 4,096 tokens each: 128 KiB a token of Llama-3.1-8B, in 33 shares less what stays with the host."""
    model, card = load_model("llama-3.1-70b"), load_hardware("rtx-4090")
    sizes = {"max_model_len": 16384, "gpu_memory_utilization": 0.95, "block_size": 32}
    one, eight = (
        {
            each.file_type: each
            for each in fits_of_types(model, card, EngineSpec(profile="llamacpp", max_num_seqs=n, **sizes))
        }
        for n in (1, 8)
    )
    for name, each in eight.items():
        assert each.layers < one[name].layers
        engine = EngineSpec(
            profile="llamacpp", max_num_seqs=8, n_gpu_layers=each.layers, cpu="xeon-8480", quantization=name, **sizes
        )
        assert plan_memory(model, card, engine).max_batch(16384) >= 8


def test_norms_are_never_quantized_whatever_a_checkpoint_keeps():
    """Mixtral in 8 bits throughout: a byte a weight of its router, two of a norm."""
    model = replace(load_model("mixtral-8x7b"), quantization=QuantizationSpec("x", "fp8", kept=frozenset()))
    held = weights(model, Sharding(), list(model.iter_layers()), is_first=True, is_last=True)
    counts = count_parameters(model).stored
    assert (held["norms"], held["router"]) == (2 * counts["norms"], counts["router"])

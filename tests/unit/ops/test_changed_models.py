"""What changed models do in a step: FLOPs, bytes, kernels, largest batches, against counts derived by hand."""

from typing import Any

import pytest

from perfmodel.cost import OperatorTimer, estimate_step, plan_memory
from perfmodel.models.changes import CHANGES
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.spec import ModelSpec
from perfmodel.ops import build_graph
from perfmodel.ops.work import BatchShape, Work, decode_shape
from perfmodel.specs import EngineSpec, load_hardware, load_model

LLAMA = "llama-3.1-8b"
D, KV_WIDTH, LAYERS, VOCABULARY = 4096, 1024, 32, 128256
TOTALS = ("flops", "weight_bytes", "kv_bytes", "activation_bytes")


def changed(**fields: Any) -> ModelSpec:
    model, changes = load_model(LLAMA), ModelChanges.model_validate(fields)
    for field, change in CHANGES.items():
        if getattr(changes, field) is not None:
            model = change(model, changes)
    return model


def works(model: ModelSpec, shape: BatchShape, **engine: Any) -> dict[str, tuple[float, Work]]:
    """Name -> (expected runs, work of one)."""
    graph = build_graph(model, EngineSpec(**engine))
    return {node.name: (node.expected_runs(shape), node.work(shape)) for node in graph.nodes}


def total(found: dict[str, tuple[float, Work]], what: str, *names: str) -> float:
    return sum(runs * getattr(work, what) for name, (runs, work) in found.items() if not names or name in names)


def decode(model: ModelSpec, batch: int, context: int = 1000, **engine: Any) -> dict[str, tuple[float, Work]]:
    return works(model, decode_shape(batch, context, model.attention_spans), **engine)


def test_a_window_with_sinks_reads_so_many_keys() -> None:
    """64 queries of 1,000 tokens see 100 + 4 each; in every second layer, so (104 + 1000) / 2000 of all bytes."""
    full, windowed = decode(load_model(LLAMA), 64), decode(changed(window=100, sinks=4, window_every=2), 64)
    names = ("attention_decode", "attention_decode@full", "attention_decode@window_100")
    assert total(windowed, "kv_bytes", *names) == total(full, "kv_bytes", *names) * 1104 / 2000


def test_a_prompt_under_a_window_sees_a_band() -> None:
    """w (w + 1) / 2 + (T - w) w pairs, with w + s for w."""
    model = changed(window=100, sinks=4)
    prompt = works(model, BatchShape(1000, 1, ((1000, 0),), 0, 0, (0,)))["attention_prefill"][1]
    assert prompt.problem.pairs == 104 * 105 / 2 + 896 * 104


def test_blocks_are_a_share_of_bytes_and_flops() -> None:
    """A quarter of 10,000 keys and half a block of 64 per sequence; a prompt's pairs likewise."""
    dense, sparse = (decode(m, 8, 10_000)["attention_decode"][1] for m in (load_model(LLAMA), changed(sparse=_QUARTER)))
    share = 0.25 + 32 / 10_000
    assert sparse.kv_bytes == pytest.approx(dense.kv_bytes * share)
    assert sparse.flops == pytest.approx(dense.flops * share)
    shape = BatchShape(4000, 1, ((4000, 0),))
    prompts = [works(m, shape)["attention_prefill"][1] for m in (load_model(LLAMA), changed(sparse=_QUARTER))]
    pairs = 4000 * 4001 / 2
    assert prompts[1].flops == pytest.approx(prompts[0].flops * (0.25 + 4000 * 32 / pairs))
    assert prompts[1].kv_bytes == prompts[0].kv_bytes  # some query sees each key


_QUARTER = {"fraction": 0.25}


def test_a_state_costs_the_same_at_every_context() -> None:
    model = changed(linear={"kind": "performer"})
    assert decode(model, 8, 100)["linear_decode"] == decode(model, 8, 100_000)["linear_decode"]


def test_a_rolling_cache_holds_a_window_of_each_sequence() -> None:
    """Blocks of 16: 1028 tokens are 65 blocks, whatever the context; sequences of 600 tokens hold 38."""
    engine, hardware = EngineSpec(), load_hardware("h100-sxm-80gb")
    full, rolling = (plan_memory(m, hardware, engine) for m in (load_model(LLAMA), changed(window=1024, sinks=4)))
    assert rolling.num_kv_blocks == full.num_kv_blocks
    assert rolling.max_batch(100_000) == full.num_kv_blocks // 65
    assert rolling.max_batch(600) == full.max_batch(600)


def test_rolling_layers_beside_others_have_buffers_of_their_own() -> None:
    """Half of the layers: at most half the bytes per token in blocks, and 16 buffers of 256 tokens."""
    engine, hardware = EngineSpec(max_num_seqs=16), load_hardware("h100-sxm-80gb")
    plan = plan_memory(changed(window=256, window_every=2), hardware, engine)
    assert plan.kv_bytes_per_token == LAYERS / 2 * KV_WIDTH * 2 * 2
    assert plan.state_bytes == 16 * 256 * plan.kv_bytes_per_token


def test_sparse_tensor_cores_double_the_peak_where_there_are_any() -> None:
    """2:4 in a compute-bound step takes half the time on an A100's datasheet; a V100-like device gains bytes only."""
    shape = BatchShape(8192, 1, ((8192, 0),))
    hardware = load_hardware("a100-sxm-80gb")
    without = hardware.model_copy(update={"declared": hardware.declared.model_copy(update={"sparsity_speedup": 1.0})})

    def seconds(model: ModelSpec, device: Any) -> float:
        rows = estimate_step(build_graph(model), OperatorTimer(device), shape).rows
        return sum(row.count * row.time.compute_s for row in rows if row.name == "gate_up_proj")

    dense, sparse = load_model(LLAMA), changed(prune={"kind": "2:4"})
    assert seconds(sparse, hardware) == pytest.approx(seconds(dense, hardware) / 2)
    assert seconds(sparse, without) == pytest.approx(seconds(dense, without))
    assert total(decode(sparse, 1), "weight_bytes", "gate_up_proj") == 0.5625 * total(
        decode(dense, 1), "weight_bytes", "gate_up_proj"
    )


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_rank_is_two_multiplications(is_fused: bool) -> None:
    """2 T r (in + out) FLOPs and one kernel more for each matrix, however the projections are launched."""
    model = changed(low_rank={"rank": 256})
    found = decode(model, 10, fused_kernels=is_fused)
    gate_up = [name for name in found if name in ("up_rank_proj", "gate_up_proj", "gate_proj", "up_proj")]
    assert total(found, "flops", *gate_up) == LAYERS * 2 * 10 * 256 * (D + 2 * 14336)
    assert len(gate_up) == (2 if is_fused else 3)


def test_shared_layers_are_read_each_time_and_stored_once() -> None:
    model, hardware = changed(share_layers=1), load_hardware("a100-sxm-80gb")
    shape = decode_shape(8, 1000)
    assert works(model, shape) == works(load_model(LLAMA), shape)
    plans = [plan_memory(each, hardware) for each in (model, load_model(LLAMA))]
    assert plans[0].weights["dense_ffn"] == plans[1].weights["dense_ffn"] / LAYERS


# ---------------------------------------------------------------- early exit

_HALF = {"expected_share": 0.5}
_MATRICES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def test_reach_has_the_mean_that_was_asked_for() -> None:
    exits = changed(early_exit=_HALF).exits
    assert exits is not None
    assert exits.reach[0] == 1
    assert sum(exits.reach) / LAYERS == pytest.approx(0.5)
    leave = [0.0] * LAYERS
    leave[7] = 0.25
    given = changed(early_exit={"exit_probabilities": leave}).exits
    assert given is not None
    assert given.reach == (1.0,) * 8 + (0.75,) * 24


def test_nobody_who_leaves_leaves_the_model_as_it_was() -> None:
    assert changed(early_exit={"expected_share": 1.0}) == load_model(LLAMA)
    assert changed(early_exit={"exit_probabilities": [0.0] * LAYERS}) == load_model(LLAMA)


def test_flops_follow_the_tokens_and_bytes_the_batch() -> None:
    """FLOPs p at any batch; weights p at batch 1 and 1 - (1 - p)^B, layer by layer, at 512."""
    model = changed(early_exit=_HALF)
    assert model.exits is not None
    for batch in (1, 8, 512):
        ours, all_of_it = decode(model, batch), decode(load_model(LLAMA), batch)
        flops = total(ours, "flops", *_MATRICES) / total(all_of_it, "flops", *_MATRICES)
        weights = total(ours, "weight_bytes", *_MATRICES) / total(all_of_it, "weight_bytes", *_MATRICES)
        assert flops == pytest.approx(0.5)
        assert weights == pytest.approx(sum(1 - (1 - p) ** batch for p in model.exits.reach) / LAYERS)
    assert weights > 0.99


def test_skipped_layers_still_get_their_keys_and_values() -> None:
    """Of 100 tokens half, on average, project 2 K h more; all of them write to the cache."""
    found = decode(changed(early_exit=_HALF), 100)
    assert total(found, "flops", "skipped_kv_proj") == pytest.approx(0.5 * LAYERS * 2 * 100 * D * 2 * KV_WIDTH)
    assert found["kv_write"] == decode(load_model(LLAMA), 100)["kv_write"]


def test_keys_and_values_of_exited_tokens_are_computed_in_skipped_layers() -> None:
    """Half of the tokens exit after layer 8, so 24 layers compute keys and values for that half."""
    model = changed(early_exit={"exit_probabilities": [0.5 if layer == 7 else 0.0 for layer in range(LAYERS)]})
    assert model.exits is not None
    assert model.exits.reach == tuple(1.0 if layer < 8 else 0.5 for layer in range(LAYERS))
    step = decode(model, 100)
    assert total(step, "flops", "skipped_kv_proj") == pytest.approx(24 * 0.5 * 2 * 100 * D * 2 * KV_WIDTH)
    shares = changed(early_exit={"exit_probabilities": [0.9 if layer == 7 else 0.0 for layer in range(LAYERS)]})
    filled = total(decode(shares, 100), "flops", "skipped_kv_proj")
    assert filled == pytest.approx(24 * 0.9 * 2 * 100 * D * 2 * KV_WIDTH)


def test_prompts_pass_all_layers() -> None:
    shape = BatchShape(900, 1, ((900, 0),))
    ours, all_of_it = works(changed(early_exit=_HALF), shape), works(load_model(LLAMA), shape)
    for what in TOTALS:
        assert total(ours, what) == pytest.approx(total(all_of_it, what))


def test_asking_the_lm_head_behind_each_layer_costs_it() -> None:
    """At batch 1 the LM head runs where the token is, behind all layers but the last."""
    model = changed(early_exit={**_HALF, "confidence": "softmax"})
    assert model.exits is not None
    asked = total(decode(model, 1), "flops", "exit_lm_head")
    assert asked == pytest.approx(sum(model.exits.reach[:-1]) * 2 * D * VOCABULARY)


def test_gain_is_that_of_the_share_alone_and_none_in_a_large_memory_bound_batch() -> None:
    """Decode steps of short contexts: about half the time at batch 1, nearly all of it at 64 (memory-bound)."""
    timer = OperatorTimer(load_hardware("a100-sxm-80gb"))

    def seconds(model: ModelSpec, batch: int) -> float:
        return estimate_step(build_graph(model), timer, decode_shape(batch, 50)).device_s

    alone, many = (seconds(changed(early_exit=_HALF), b) / seconds(load_model(LLAMA), b) for b in (1, 64))
    assert 0.45 < alone < 0.75
    assert 0.9 < many < 1.15

"""Keys and values in fewer bits, in several precisions, and evicted: bytes exactly, times by what binds."""

import pytest

from perfmodel.cost import plan_memory, step_costs
from perfmodel.cost.memory.footprint import kv_bytes
from perfmodel.errors import SpecError
from perfmodel.models.number_formats import unpack_operations
from perfmodel.ops.formats import on_device, served_model
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.specs import EngineSpec, load_hardware, load_model, load_scenario

_PER_TOKEN = 2 * 32 * 128 * 32  # elements of K and V of Llama-2-7B


def held(context: int, model: str = "llama-2-7b", **engine: object) -> float:
    served = served_model(load_model(model), EngineSpec(**engine))  # type: ignore[arg-type]
    return kv_bytes(served, Sharding(), list(served.iter_layers()), context)


@pytest.mark.parametrize(("form", "bits"), [("int8", 8), ("int4", 4), ("int2", 2)])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_bytes_of_groups_are_exact(form, bits, group):
    expected = _PER_TOKEN * 2 * bits / 16 * (1 + 2 * 16 / (group * bits))
    assert held(1, kv_cache_dtype=form, kv_cache_group_size=group) == pytest.approx(expected, rel=1e-12)


def test_fp8_and_int8_without_groups_stay_a_byte():
    assert held(1, kv_cache_dtype="fp8") == held(1, kv_cache_dtype="int8") == _PER_TOKEN


@pytest.mark.parametrize(("hardware", "operations"), [("cpu", 4.0), ("a100-sxm-80gb", 0.0), ("h100-sxm-80gb", 0.0)])
def test_fp8_is_converted_by_instructions_of_a_cpu_alone(hardware, operations):
    """GPUs' attention kernels were calibrated on FP8 as they are."""
    model = on_device(load_model("llama-2-7b"), load_hardware(hardware))
    assert unpack_operations(served_model(model, EngineSpec(kv_cache_dtype="fp8"))) == operations
    assert unpack_operations(served_model(model, EngineSpec())) == 0


@pytest.mark.parametrize("context", [1, 128, 1000])
def test_a_residual_window_is_a_tier_in_the_models_dtype(context):
    window = held(context, kv_cache_dtype="int2", kv_cache_residual_tokens=128)
    tiers = held(context, kv_tiers=({"tokens": 128}, {"dtype": "int2"}))
    newest = min(context, 128)
    assert window == tiers == pytest.approx(_PER_TOKEN * (2 * newest + 0.375 * (context - newest)))


def test_three_tiers_add_up():
    tiers = ({"tokens": 100}, {"tokens": 200, "dtype": "int8"}, {"dtype": "int4"})
    scales = 2 * 16 / 64 / 8
    expected = 100 * 2 + 200 * (1 + scales) + 700 * (0.5 + scales)
    assert held(1000, kv_tiers=tiers, kv_cache_group_size=64) == pytest.approx(_PER_TOKEN * expected)


def test_tiers_that_grow_wider_with_age_are_refused():
    with pytest.raises(SpecError, match="from wide to narrow"):
        held(1, kv_tiers=({"tokens": 8, "dtype": "int4"}, {"dtype": "int8"}))


@pytest.mark.parametrize("hardware", ["a100-sxm-80gb", "h100-sxm-80gb", "l40s"])
def test_the_batch_limit_is_the_pool_over_what_a_sequence_holds(hardware):
    model, device = load_model("llama-2-7b"), load_hardware(hardware)
    for engine in (
        EngineSpec(),
        EngineSpec(kv_cache_dtype="int4"),
        EngineSpec(kv_cache_dtype="int2", kv_cache_residual_tokens=128),
        EngineSpec(kv_eviction={"heavy_tokens": 200, "recent_tokens": 200}),
    ):
        plan = plan_memory(model, device, engine)
        served = served_model(model, engine)
        each = kv_bytes(served, Sharding(), list(served.iter_layers()), 2048)
        assert 0.97 * plan.kv_bytes / each - 1 < plan.max_batch(2048) <= plan.kv_bytes / each


def decode(batch: int, context: int, *overrides: str, hardware: str = "a100-sxm-80gb"):
    named = ["model=llama-2-7b", "engine.max_model_len=4096", f"hardware={hardware}", *overrides]
    costs = step_costs(load_scenario("llama-3.1-8b-a100", named))
    found = costs.estimate(decode_shape(batch, context, costs.graph.model.attention_spans))
    return next(row for row in found.rows if row.name == "attention_decode")


@pytest.mark.parametrize("hardware", ["a100-sxm-80gb", "h100-sxm-80gb", "rtx-4090", "l4"])
def test_fewer_bytes_never_take_longer_unless_unpacking_binds(hardware):
    device = load_hardware(hardware)
    plain = decode(16, 4096, hardware=hardware)
    for form in ("int8", "int4", "int2"):
        row = decode(16, 4096, f"engine.kv_cache_dtype={form}", hardware=hardware)
        assert row.work.kv_bytes < plain.work.kv_bytes
        lanes = (device.declared.vector_flops_per_s or device.declared.peak_flops_per_s["fp32"]) / 2
        unpacking = row.work.vector_ops / lanes
        assert row.time.duration_s <= max(plain.time.duration_s, unpacking + plain.time.duration_s * 0.2)
        assert row.time.duration_s >= unpacking


def test_tensor_parallelism_shares_what_is_unpacked():
    one, four = (
        decode(16, 4096, "engine.kv_cache_dtype=int4", f"engine.tensor_parallel_size={tp}").work for tp in (1, 4)
    )
    assert four.kv_bytes == pytest.approx(one.kv_bytes / 4)
    assert four.vector_ops == pytest.approx(one.vector_ops / 4)


def test_heavy_hitters_bound_what_a_decode_reads_and_a_sequence_holds():
    evicting = "engine.kv_eviction={heavy_tokens: 300, recent_tokens: 100}"
    short, full, long = (decode(8, context, evicting).work for context in (300, 400, 4000))
    assert short.kv_bytes < full.kv_bytes == long.kv_bytes
    plain = decode(8, 400).work
    assert long.kv_bytes == plain.kv_bytes
    # Scores written and read, probabilities too (2 bytes each), and fp32 sums read and written.
    assert long.activation_bytes - plain.activation_bytes == (4 * 2 + 2 * 4) * 32 * 8 * 400
    assert held(4000, kv_eviction={"heavy_tokens": 300, "recent_tokens": 100}) == 400 * (_PER_TOKEN * 2 + 32 * 32 * 4)


def test_a_prompt_in_chunks_finds_what_eviction_left():
    evicting = "engine.kv_eviction={heavy_tokens: 300, recent_tokens: 100}"
    costs = step_costs(load_scenario("llama-3.1-8b-a100", ["model=llama-2-7b", "engine.max_model_len=4096", evicting]))

    def flops(tokens: int, cached: int) -> float:
        rows = costs.estimate(BatchShape(tokens, 1, ((tokens, cached),))).rows
        return next(row.work.flops for row in rows if row.name == "attention_prefill")

    assert flops(512, 1000) == flops(512, 400) > flops(512, 100)


def test_latents_are_neither_evicted_nor_packed_below_a_byte():
    for engine, words in (
        (EngineSpec(kv_eviction={"heavy_tokens": 8, "recent_tokens": 8}), "no layer of plain attention"),
        (EngineSpec(kv_cache_dtype="int4"), "multiplied as they lie"),
        (EngineSpec(kv_tiers=({"tokens": 8}, {"dtype": "fp8"})), "several precisions"),
    ):
        with pytest.raises(SpecError, match=words):
            served_model(load_model("deepseek-v2"), engine)

"""Attention and feed-forward layers on different devices: the pipeline of micro-batches against a simulated line, the
plain step on one device, bytes of StepMesh's table, weights, devices and prices of both kinds, refusals."""

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import sim
from perfmodel.cost import plan_memory
from perfmodel.cost.memory.plan import ffn_device_weights
from perfmodel.cost.steps.ffn_devices import Phases, round_trips
from perfmodel.cost.steps.step_costs import step_costs
from perfmodel.errors import DoesNotFitError, SpecError, UnsupportedError
from perfmodel.models.architecture import Attention
from perfmodel.models.params import layer_parameters
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.specs import load_scenario

TIMES = st.floats(0.0, 100.0)
SIZES = {"num_ffn_servers": 2, "ffn_tensor_parallel_size": 8, "num_afd_stages": 3}
BASE = {
    "name": "apart",
    "model": "step3",
    "hardware": "h800-sxm",
    "traffic": "chat",
    "sampling": {"method": "greedy"},
    "engine": {
        "profile": "sglang",
        "data_parallel_size": 16,
        "enable_expert_parallel": True,
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "afd_config": SIZES,
    },
    "cluster": {"network": {"link": "infiniband-ndr", "devices_per_node": 8, "nics_per_node": 8}},
}
LONE = (
    "engine.data_parallel_size=1",
    "engine.enable_expert_parallel=false",
    "engine.quantization=null",
    "engine.kv_cache_dtype=auto",
    "model=qwen3-30b-a3b",
)


def scenario(*overrides):
    return load_scenario(json.dumps(BASE), list(overrides))


def line(times, num_layers, num_batches):
    """When the last job leaves a line of machines that all jobs pass in order, `num_layers` times."""
    free, ready = [0.0] * len(times), [0.0] * num_batches
    for _, job in product(range(num_layers), range(num_batches)):
        for machine, time in enumerate(times):
            free[machine] = ready[job] = max(free[machine], ready[job]) + time
    return ready[-1]


@given(st.tuples(*[TIMES] * 5), st.integers(1, 6), st.integers(1, 5))
def test_micro_batches_pass_as_jobs_pass_a_line_of_machines(times, num_layers, num_batches):
    attention, to_ffn, scatter, ffn, to_attention = times
    phases = Phases(attention, to_ffn, 0.0, ffn, scatter, to_attention)
    expected = line((attention, to_ffn, ffn, scatter, to_attention), num_layers, num_batches)
    assert round_trips(phases, num_layers, num_batches) == pytest.approx(expected)


@given(st.builds(Phases, *[TIMES] * 6), st.integers(1, 6), st.integers(1, 5))
def test_a_server_gathers_and_reduces_over_the_same_links(phases, num_layers, num_batches):
    """No faster than on links of their own, nor than these links carry both; one micro-batch waits for none."""
    time = round_trips(phases, num_layers, num_batches)
    assert time >= line(phases, num_layers, num_batches) * (1 - 1e-9)
    assert time >= num_layers * num_batches * (phases.gather + phases.scatter) * (1 - 1e-9)
    assert round_trips(phases, num_layers, 1) == pytest.approx(num_layers * sum(phases))


def test_one_device_of_each_kind_and_a_free_link_are_the_plain_step():
    alone = {"num_ffn_servers": 1, "ffn_tensor_parallel_size": 1, "num_afd_stages": 1}
    shape = decode_shape(32, 1000)
    apart = step_costs(scenario(*LONE, f"engine.afd_config={json.dumps(alone)}"))
    plain = step_costs(scenario(*LONE, "engine.afd_config=null"))
    estimate, whole = apart.estimate(shape), plain.estimate(shape)
    messages = sum(row.duration_s for row in estimate.rows if row.work.message is not None)
    assert estimate.duration_s - messages == pytest.approx(whole.duration_s, rel=1e-6)
    names = {row.name for row in estimate.rows} - {row.name for row in whole.rows}
    assert names == {"attention_to_ffn", "ffn_to_attention"}
    assert apart.cost_model().duration_ps(shape) / 1e12 == pytest.approx(estimate.duration_s, rel=1e-5)


def test_messages_have_the_bytes_of_stepmesh_table_1():
    """Micro-batches of 128 tokens on 2 x 8 attention devices: each of 8 feed-forward devices of a server receives
    2 x 128 tokens of 7,168 bytes, and sends as many of twice the bytes; a server gathers all 2,048 tokens."""
    rows = {row.name: row for row in step_costs(scenario()).estimate(decode_shape(384, 4096)).rows}
    sent = 2 * 128 * 7168
    assert rows["attention_to_ffn"].work.message.bytes_ == sent
    assert rows["ffn_to_attention"].work.message.bytes_ == 2 * sent
    assert rows["ffn_all_gather"].work.message.bytes_ == 8 * sent
    assert rows["attention_to_ffn"].count == 3 * 61
    assert rows["attention_to_ffn"].num_nodes == 2
    one_more = step_costs(scenario("engine.afd_config.num_ffn_servers=3")).estimate(decode_shape(384, 4096))
    third = next(row for row in one_more.rows if row.name == "attention_to_ffn")
    assert third.work.message.bytes_ == 3 * 128 * 7168  # an attention device sends to each server


@pytest.mark.parametrize("whole", ["true", "false"])
def test_weights_of_both_kinds_are_the_models_and_kv_is_on_attention_ranks_alone(whole):
    of = (*LONE[2:], f"engine.enable_expert_parallel={whole}", "engine.data_parallel_size=4")
    apart, plain = scenario(*of), scenario(*of, "engine.afd_config=null", "engine.data_parallel_size=1")
    plain = plain.with_({"engine.gpu_memory_utilization": 0.95})
    attention = plan_memory(apart.model, apart.hardware, apart.engine)
    ffn = ffn_device_weights(apart.model, apart.hardware, apart.engine)
    everything = plan_memory(plain.model, plain.hardware, plain.engine)
    assert attention.weight_bytes + 16 * sum(ffn.values()) == pytest.approx(everything.weight_bytes)
    assert "experts" in ffn
    assert not set(ffn) & set(attention.weights)
    assert attention.kv_bytes_per_token == everything.kv_bytes_per_token
    assert apart.engine.num_devices == 4 + 16


def test_feed_forward_devices_that_are_too_few_are_said():
    one = '{"num_ffn_servers": 1, "ffn_tensor_parallel_size": 2}'
    big = scenario(f"engine.afd_config={one}")
    with pytest.raises(DoesNotFitError, match=r"a feed-forward device needs 15\d\.\d GB at 2 of them"):
        plan_memory(big.model, big.hardware, big.engine)


def test_more_micro_batches_hide_messages_until_each_reads_the_weights_too_often():
    times = [
        step_costs(scenario(f"engine.afd_config.num_afd_stages={n}")).estimate(decode_shape(384, 4096)).duration_s
        for n in (1, 2, 3, 48)
    ]
    assert times[0] > times[1] > times[2]
    assert times[3] > times[2]


def test_a_decode_pool_pays_for_the_devices_of_both_kinds():
    pooled = load_scenario("step3-h800-afd", ["traffic.num_requests=20", "price.usd_per_gpu_hour=2"])
    summary = sim.simulate(pooled).summary
    assert pooled.num_devices == 3 * 8 + 16 + 16
    prefill, decode = summary["pools"]
    assert (prefill["num_devices"], decode["num_devices"]) == (24, 32)
    assert decode["usd_total"] == pytest.approx(32 * 2 * summary["duration"] / 3600)
    assert decode["energy_j"] >= 32 * 0.9 * summary["duration"] * 50  # idle alone


@given(st.lists(st.tuples(st.integers(6, 5000), st.integers(0, 3000)), min_size=1, max_size=3), st.integers(0, 64))
def test_micro_batches_have_the_prompts_work_between_them(prefills, num_decodes):
    """Tokens, and pairs of queries and keys, of all micro-batches are the step's, but for what is rounded up."""
    tokens = num_decodes + sum(new for new, _ in prefills)
    shape = BatchShape(tokens, len(prefills) + num_decodes, tuple(prefills), num_decodes, 1000 * num_decodes)
    count, batch, everyone = step_costs(scenario()).cost_model()._micro_batches(shape)
    assert count == 3
    assert tokens <= count * batch.num_tokens <= tokens + count * (len(prefills) + 1)
    assert everyone.num_tokens == 16 * batch.num_tokens

    def pairs(rows):
        return sum(new * cached + new * (new + 1) / 2 for new, cached in rows)

    slack = sum(count * (new + cached) + 2 * new for new, cached in prefills)
    assert abs(count * pairs(batch.prefills) - pairs(prefills)) <= slack


def test_prompts_take_the_plain_step_on_one_device_of_each_kind_and_hide_messages_on_several():
    """As for decodes; three micro-batches of a prompt take less than one, and no less than the busiest kind alone."""
    alone = {"num_ffn_servers": 1, "ffn_tensor_parallel_size": 1, "num_afd_stages": 1}
    prompt = BatchShape(2000, 1, ((2000, 500),))
    estimate = step_costs(scenario(*LONE, f"engine.afd_config={json.dumps(alone)}")).estimate(prompt)
    whole = step_costs(scenario(*LONE, "engine.afd_config=null")).estimate(prompt)
    messages = sum(row.duration_s for row in estimate.rows if row.work.message is not None)
    assert estimate.duration_s - messages == pytest.approx(whole.duration_s, rel=1e-6)
    prompt = BatchShape(16_000, 4, ((4000, 0),) * 4)
    one, three = (step_costs(scenario(f"engine.afd_config.num_afd_stages={n}")).estimate(prompt) for n in (1, 3))
    assert three.duration_s < one.duration_s
    assert three.duration_s > 3 * max(three.pipeline.stage_s)


def test_engines_that_answer_alone_have_feed_forward_devices_too():
    """Prompts and decodes of a unified pool; a preempted request is computed again."""
    few = ("traffic.num_requests=8", "traffic.arrivals={process: burst}", "engine.num_gpu_blocks_override=200")
    prompts, answers = (f"traffic.{name}_tokens={{distribution: fixed, value: 900}}" for name in ("input", "output"))
    tight = scenario(*few, prompts, answers)
    summary = sim.simulate(tight.with_({"engine.data_parallel_size": 1, "engine.profile": "vllm"})).summary
    assert summary["completed"] == 8
    assert summary["preemptions"] > 0


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["engine.tensor_parallel_size=2"], "tensor_parallel_size"),
        (["engine.pipeline_parallel_size=2"], "pipeline_parallel_size"),
        (["engine.enable_dbo=true", "engine.all2all_backend=deepep_low_latency"], "enable_dbo"),
        (["engine.enable_eplb=true"], "enable_eplb"),
        (["engine.speculative_config={method: ngram, num_speculative_tokens: 4}"], "speculative_config"),
        (["engine.fused_kernels=false"], "fused_kernels"),
        (["model=llama-3.1-8b", "engine.enable_expert_parallel=false"], "has no experts"),
        (["cluster.autoscaling={max_replicas: 2, target: 4}"], "autoscaling"),
        (["traffic.beam_width=2", "engine.profile=vllm", "engine.data_parallel_size=1"], "beam_width"),
    ],
)
def test_what_is_not_modelled_together_is_refused_by_name(overrides, name):
    with pytest.raises((UnsupportedError, SpecError), match=f"afd_config.*{name}"):
        scenario(*overrides)


def test_queries_of_step3_come_from_2048_shared_elements():
    """d (r + K h + K h_v) + r H h + H h_v d: StepFun's config, 316e9 parameters in all."""
    model = scenario().model
    layer = next(layer for layer, _ in model.layers)
    assert isinstance(layer.mixer, Attention)
    by_hand = 7168 * (2048 + 2 * 256) + 2048 * 64 * 256 + 64 * 256 * 7168
    assert layer_parameters(model, layer)["attention"] == by_hand
    rows = {row.name: row for row in step_costs(scenario()).estimate(decode_shape(384, 4096)).rows}
    flops = [rows[name].work.flops for name in ("qkv_a_proj", "q_b_proj", "o_proj")]
    assert sum(flops) == 2 * 128 * by_hand

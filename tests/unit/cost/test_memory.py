"""The memory plan against what vLLM reported, and its own arithmetic."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost import plan_memory
from perfmodel.cost.memory.footprint import activation_bytes
from perfmodel.cost.memory.plan import smallest_fitting_tp
from perfmodel.errors import DoesNotFitError
from perfmodel.models.cards import list_models, load_model
from perfmodel.models.params import weight_bytes
from perfmodel.ops.sharding import Sharding
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import SpeculativeConfig
from perfmodel.specs.scenario_file import load_hardware


def plan(model, hardware="h100-sxm-80gb", **engine):
    return plan_memory(load_model(model), load_hardware(hardware), EngineSpec(**engine))


@pytest.mark.parametrize(
    ("model", "hardware", "tp", "blocks"),
    [
        ("llama-2-7b", "h100-sxm-80gb", 1, 7463),
        ("llama-3.1-70b", "h100-sxm-80gb", 4, 30425),
        ("mistral-nemo", "h100-sxm-80gb", 1, 19251),
        ("llama-3.1-8b", "rtx-4090", 1, 2588),
    ],
)
def test_kv_blocks_as_vllm_sized_them(model, hardware, tp, blocks):
    """KV blocks that vLLM 0.15 (RTX 4090: 0.19) logged in served runs, at its default arguments."""
    found = plan(model, hardware, tensor_parallel_size=tp, version="0.15.1")
    assert found.num_kv_blocks == pytest.approx(blocks, rel=0.02)


@pytest.mark.parametrize(
    ("device", "most", "share"), [("b300-sxm", 1024, 0.9200 - 0.9172), ("l40s", 256, 0.5000 - 0.4855)]
)
def test_cuda_graphs_count_in_the_share_from_0_21_on(device, most, share):
    """vLLM's start-up log: "The current --gpu-memory-utilization=0.9200 is equivalent to 0.9172 without CUDA graph
    memory profiling", with 51 sizes with prompts and 51 of decodes; 0.5000 and 0.4855 with 51 and 35. Its estimates
    scatter by 40 % between models. What counts in no share takes no blocks."""
    sizes = {"max_num_seqs": most, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.8}
    before, since, eager = (
        plan("llama-3.1-8b", device, **sizes, **more)
        for more in ({"version": "0.20"}, {"version": "0.21"}, {"version": "0.21", "enforce_eager": True})
    )
    assert since.graph_bytes / since.visible_bytes == pytest.approx(share, rel=0.4)
    assert (before.graph_bytes, eager.graph_bytes) == (0.0, 0.0)
    assert before.num_kv_blocks == eager.num_kv_blocks
    lost = (before.num_kv_blocks - since.num_kv_blocks) * since.block_size * since.kv_bytes_per_token
    assert lost == pytest.approx(since.graph_bytes, abs=since.block_size * since.kv_bytes_per_token)


def test_each_size_that_is_captured_takes_room():
    graphs = [plan("llama-3.1-8b", max_num_seqs=most).graph_bytes for most in (1, 8, 64, 256)]
    assert graphs == sorted(set(graphs))
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert plan("llama-3.1-8b", max_num_seqs=8, speculative_config=drafts).graph_bytes > graphs[1]


def test_llama_2_7b_by_hand():
    """13.48 GB of weights; 2 x 32 x 128 x 2 B x 32 layers = 512 KiB a token, 8 MiB a block of 16."""
    found = plan("llama-2-7b")
    assert found.weight_bytes == pytest.approx(6_738_415_616 * 2)
    assert found.kv_bytes_per_token == 524_288
    left = found.usable_bytes - found.weight_bytes - found.workspace_bytes
    assert found.num_kv_blocks == int(left // (16 * 524_288))
    assert found.max_tokens == 16 * found.num_kv_blocks


@pytest.mark.parametrize("name", list_models())
def test_one_device_would_hold_all_weights(name):
    """The sharded architecture at one device has the parameters of the model, component by component."""
    model = load_model(name)
    expected = {component: size for component, size in weight_bytes(model).items() if size}
    everything = load_hardware("b300-sxm")
    memory = everything.declared.memory[0].model_copy(update={"capacity_bytes": 1e13, "visible_bytes": 1e13})
    declared = everything.declared.model_copy(update={"memory": (memory, *everything.declared.memory[1:])})
    found = plan_memory(model, everything.model_copy(update={"declared": declared})).weights
    other = found.pop("other", 0.0)
    assert other == pytest.approx(model.extra_params * 2)
    assert {name: size for name, size in found.items() if size} == pytest.approx(expected, rel=1e-3)


def test_tensor_parallelism_shares_weights_and_heads():
    one, four = (plan("llama-3.1-8b", tensor_parallel_size=tp) for tp in (1, 4))
    assert four.weight_bytes == pytest.approx(one.weight_bytes / 4, rel=0.01)
    assert four.kv_bytes_per_token == one.kv_bytes_per_token / 4


def test_latents_are_on_every_rank():
    assert plan("deepseek-v3", "h200-sxm", tensor_parallel_size=8).kv_bytes_per_token == 70_272


def test_pipeline_stages_hold_their_layers():
    one, two = (plan("llama-3.1-70b", "mi300x", pipeline_parallel_size=pp) for pp in (1, 2))
    assert two.kv_bytes_per_token == one.kv_bytes_per_token / 2
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2, rel=0.01)


def test_experts_are_shared_out_over_data_parallel_ranks():
    engine = {"tensor_parallel_size": 1, "data_parallel_size": 8}
    cut = plan("mixtral-8x7b", **engine)
    whole = plan("mixtral-8x7b", **engine, enable_expert_parallel=True)
    assert cut.weights["experts"] == whole.weights["experts"] == pytest.approx(8 * 32 * 3 * 4096 * 14336 * 2 / 8)
    assert cut.weights["attention"] == 32 * 41_943_040 * 2


def test_recurrent_states_are_reserved_for_all_sequences():
    """Nemotron-3 Nano: 23 Mamba layers of 64 heads x 64 x 128 in fp32 and windows of 3 x 6144 in bf16."""
    found = plan("nemotron-3-nano-30b-a3b", "h200-sxm", max_num_seqs=100, profile="sglang")
    assert found.state_bytes_per_sequence == 23 * (64 * 64 * 128 * 4 + 3 * 6144 * 2)
    assert found.state_bytes == 100 * found.state_bytes_per_sequence
    assert found.max_batch(16) == 100


def test_fp8_caches_hold_twice_the_tokens():
    half, whole = (plan("llama-3.1-8b", kv_cache_dtype=dtype) for dtype in ("fp8", "auto"))
    assert half.max_tokens == pytest.approx(2 * whole.max_tokens, rel=0.001)


def test_an_override_is_taken_as_it_is():
    assert plan("llama-3.1-8b", num_gpu_blocks_override=77).num_kv_blocks == 77


@settings(max_examples=50)
@given(st.integers(1, 100_000), st.sampled_from([8, 16, 32]))
def test_largest_batch_and_context_fit_and_one_more_does_not(context, block_size):
    found = plan("llama-3.1-8b", block_size=block_size)
    blocks = -(-context // block_size)
    batch = found.max_batch(context)
    assert batch * blocks <= found.num_kv_blocks < (batch + 1) * blocks
    if batch:
        longest = found.max_context(batch)
        assert longest >= context // block_size * block_size
        assert batch * -(-(longest + 1) // block_size) > found.num_kv_blocks


def test_a_device_too_small_names_each_of_its_sizes():
    """An A100's "80 GB" are 80 GiB, 85.9e9 bytes, less what the driver takes; the engine takes its share of those."""
    with pytest.raises(DoesNotFitError) as error:
        plan("llama-3.1-70b", "a100-sxm-80gb", gpu_memory_utilization=0.92)
    text = str(error.value)
    sizes = [float(size) for size in re.findall(r"([0-9.]+) GB", text)]
    assert sizes[0] == 80.0
    assert sizes[2] < sizes[1] < 85.9
    assert sizes[2] == pytest.approx(0.92 * sizes[1], abs=0.1)
    for name in ("by its datasheet", "as a process sees it", "the engine may use", "gpu_memory_utilization=0.92"):
        assert name in text


def test_a_model_that_does_not_fit_says_what_would():
    with pytest.raises(DoesNotFitError) as error:
        plan("llama-3.1-405b", "h200-sxm")
    text = str(error.value)
    assert text.startswith("h200-sxm has 141.0 GB")
    assert "the weights need 811.7 GB per device at tensor_parallel_size=1. Smallest that fits: 8." in text
    assert plan("llama-3.1-405b", "h200-sxm", tensor_parallel_size=8).num_kv_blocks > 0
    with pytest.raises(DoesNotFitError):
        plan("llama-3.1-405b", "h200-sxm", tensor_parallel_size=4)


def test_a_model_that_fits_nowhere_says_so():
    with pytest.raises(DoesNotFitError, match="No tensor_parallel_size up to 64 fits"):
        plan("kimi-k2", "t4")
    assert smallest_fitting_tp(load_model("kimi-k2"), load_hardware("t4"), EngineSpec()) is None


def test_weights_that_leave_no_block_name_the_rest():
    with pytest.raises(DoesNotFitError, match="weights, activations and one KV block need"):
        plan("llama-3.1-8b", "h100-sxm-80gb", gpu_memory_utilization=0.195)


def test_the_plan_prints_its_layout():
    text = str(plan("llama-2-7b"))
    assert "llama-2-7b on 1 x h100-sxm-80gb" in text
    assert "dense ffn" in text
    assert "524,288 B a token" in text


def test_gradients_keep_every_layers_inputs_and_inference_mode_drops_them():
    """Llama-2-7B, T tokens in bf16: 32 layers of 2 d + 4 d (q, k, v, attention) + 2 d + 3 f elements each."""
    engine = EngineSpec(max_num_batched_tokens=2048)
    plans = [
        plan_memory(load_model("llama-2-7b"), load_hardware("a100-sxm-80gb"), e)
        for e in (engine, engine.model_copy(update={"inference_mode": False}))
    ]
    kept = 2048 * 2 * 32 * (8 * 4096 + 3 * 11008)
    assert plans[1].activation_bytes - plans[0].activation_bytes == kept
    assert plans[1].num_kv_blocks < plans[0].num_kv_blocks


def test_gradients_keep_inputs_and_outputs_of_recurrent_mixers():
    """Nemotron Nano 9B v2, d = 4480, f = 15680, one mixer or feed-forward block per layer. 27 Mamba layers:
    residual, normed state, input and output, 4 d; 4 attention layers: 2 d and (40 + 8 heads) x 256; 25 feed-forward
    layers without a gate: 2 d + 2 f."""
    engine, model = EngineSpec(max_num_batched_tokens=2048), load_model("nemotron-nano-9b-v2")
    dropped, kept = (
        activation_bytes(model, Sharding.of(spec), spec)
        for spec in (engine, engine.model_copy(update={"inference_mode": False}))
    )
    layers = 27 * 4 * 4480 + 4 * (2 * 4480 + 48 * 256) + 25 * (2 * 4480 + 2 * 15680)
    assert kept - dropped == 2048 * 2 * layers


def test_what_collectives_hold_is_reserved_on_every_device_of_several():
    """vLLM logged 30,425 blocks for Llama-3.1-70B on 4 H100s, run 61 of the served ones with its own arguments. NCCL's
    buffers (0.4 GB a device) are one per cent of its KV cache, and a device by itself has none: the Llama-2-7B run."""
    limits = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "max_model_len": 4096, "gpu_memory_utilization": 0.9}
    limits = {"version": "0.15.1", **limits}
    several, one = plan("llama-3.1-70b", tensor_parallel_size=4, **limits), plan("llama-2-7b", **limits)
    assert several.num_kv_blocks == pytest.approx(30425, rel=0.01)
    assert one.num_kv_blocks == pytest.approx(7463, rel=0.01)
    assert several.reserve_bytes > one.reserve_bytes

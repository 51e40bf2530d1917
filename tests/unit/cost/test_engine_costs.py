"""What an engine's profile does to steps: launches, prompts outside graphs, synchronous hosts, fused quantization."""

import pytest

from perfmodel.cost import (
    Calibration,
    EngineProfile,
    GraphCostModel,
    HostFit,
    OperatorTimer,
    StepTables,
    estimate_step,
    host_fit,
)
from perfmodel.cost.calibrations.files import load_calibration
from perfmodel.cost.kernel_models.experts import GroupedExpertsFit
from perfmodel.ops import BatchShape, build_graph, decode_shape
from perfmodel.specs import EngineSpec, load_hardware, load_model

H100 = load_hardware("h100-sxm-80gb")
HOST = HostFit(
    serial_step_s=2e-4,
    hidden_step_s=1e-3,
    hidden_per_sequence_s=1e-5,
    replays_graphs=True,
    captured_tokens=512,
    prompt_step_s=5e-3,
    hidden_prompt_layer_s=1e-4,
    hidden_prompt_moe_layer_s=2e-4,
)
PROFILE = EngineProfile(engine="vllm", host=HOST, graph_kernel_s=2e-6)


def timer(is_eager=False):
    return OperatorTimer(H100, PROFILE.applied_to(load_calibration(H100, "vllm"), is_eager=is_eager))


def step_s(engine, shape, model="llama-3.1-8b"):
    graph = build_graph(load_model(model), engine)
    time = timer(engine.enforce_eager)
    found = estimate_step(graph, time, shape)
    picoseconds = GraphCostModel(StepTables(graph, time)).duration_ps(shape)
    assert picoseconds / 1e12 == pytest.approx(found.duration_s, rel=1e-3)
    return found


def prompt(num_tokens):
    return BatchShape(num_tokens, 1, ((num_tokens, 0),))


def test_without_graphs_launches_show_where_the_device_is_faster():
    graphs, eager = (step_s(EngineSpec(enforce_eager=flag), decode_shape(1, 100)) for flag in (False, True))
    assert eager.duration_s > 0.2e-3 + 5e-6 * eager.num_kernels + 1e-3 > graphs.hidden_host_s
    assert eager.hidden_host_s > graphs.hidden_host_s == pytest.approx(1e-3 + 1e-5)


def test_a_synchronous_host_hides_nothing():
    shape = decode_shape(32, 1000)
    ahead, waits = (step_s(EngineSpec(async_scheduling=flag), shape) for flag in (True, False))
    assert waits.duration_s - ahead.duration_s == pytest.approx(1e-3 + 32 * 1e-5)  # the device was the longer one


@pytest.mark.parametrize("tokens", [512, 513])
@pytest.mark.parametrize("layer_s", [1e-4, 2e-3])  # 3 ms of launches in all, or 64, beside some 20 of the device
def test_prompts_beyond_the_captured_size_are_launched_one_by_one_beside_the_device(tokens, layer_s):
    host = HOST.model_copy(update={"hidden_prompt_step_s": 4e-3, "hidden_prompt_layer_s": layer_s})
    graph = build_graph(load_model("llama-3.1-8b"))
    profile = PROFILE.model_copy(update={"host": host})
    time = OperatorTimer(H100, profile.applied_to(load_calibration(H100, "vllm")))
    estimate = estimate_step(graph, time, prompt(tokens))
    launched = tokens > 512
    hidden_s = 1e-3 + 1e-5 + launched * (4e-3 + 32 * layer_s)
    assert estimate.hidden_host_s == pytest.approx(hidden_s)
    serial_s = 2e-4 + launched * 5e-3
    assert estimate.duration_s == pytest.approx(serial_s + max(hidden_s, estimate.device_s))
    assert GraphCostModel(StepTables(graph, time)).duration_ps(prompt(tokens)) / 1e12 == pytest.approx(
        estimate.duration_s, rel=1e-3
    )


def test_launches_queue_up_however_steps_are_planned():
    """Without asynchronous scheduling what the host plans shows, and what it launches hides as before."""
    graph = build_graph(load_model("llama-3.1-8b"), EngineSpec(async_scheduling=False))
    host = host_fit(graph, timer())
    assert (host.serial_step_s, host.hidden_step_s) == (pytest.approx(2e-4 + 1e-3), 0.0)
    assert host.launches_s(*graph.launched_layers) == pytest.approx(32 * 1e-4)


def test_layers_of_experts_add_their_own():
    model = load_model("mixtral-8x7b")
    graph = build_graph(model)
    assert graph.launched_layers == (32, 32, 0)
    assert build_graph(load_model("llama-3.1-8b")).launched_layers == (32, 0, 0)
    assert host_fit(graph, timer()).launches_s(*graph.launched_layers) == pytest.approx(32 * 3e-4)


def test_layers_of_latent_attention_add_their_own():
    """DeepSeek-V3: 61 layers of MLA, the first three of them dense; what its cut on eight stages launches adds up."""
    model = load_model("deepseek-v3")
    graph = build_graph(model)
    assert graph.launched_layers == (61, 58, 61)
    fit = HostFit(hidden_prompt_step_s=1e-2, hidden_prompt_layer_s=1e-4, hidden_prompt_latent_layer_s=1e-3)
    assert fit.launches_s(*graph.launched_layers) == pytest.approx(1e-2 + 61 * 1.1e-3)
    stages = build_graph(model, EngineSpec(pipeline_parallel_size=8)).stages
    assert tuple(map(sum, zip(*(stage.launched_layers for stage in stages), strict=True))) == graph.launched_layers


def test_a_layer_whose_experts_are_one_operator_is_launched_as_any_other():
    """gpt-oss in MXFP4: Triton kernels from Python on an H100, one operator of TensorRT-LLM's library on a B200."""
    model = load_model("gpt-oss-120b")
    for name, launched in (("h100-sxm-80gb", model.num_layers), ("b200-sxm", 0)):
        for engine in ("vllm", "trtllm"):
            graph = build_graph(model, EngineSpec(profile=engine), hardware=load_hardware(name))
            assert graph.launched_layers.experts == launched


def test_a_graph_replays_kernels_that_were_timed_one_by_one_for_what_the_profile_says():
    fit = GroupedExpertsFit(launch_s=6e-5)
    tables = Calibration(device="x", engine="vllm", families={"moe/bf16": fit, "moe/mxfp4_wo": fit})
    replayed = PROFILE.applied_to(tables).families
    assert replayed["moe/bf16"] == fit  # timed as a graph replays them
    assert replayed["moe/mxfp4_wo"].replayed(5).launch_s == pytest.approx(5 * 2e-6)
    assert replayed["moe/mxfp4_wo"].replayed(100).launch_s == 6e-5  # never more than was measured
    assert PROFILE.applied_to(tables, is_eager=True).families == tables.families


def test_check_bits_in_the_same_memory_take_a_seventeenth():
    l40s, rtx = load_hardware("l40s"), load_hardware("rtx-4090")
    assert l40s.data_bandwidth == pytest.approx(l40s.memory_bandwidth * 16 / 17)
    assert rtx.data_bandwidth == rtx.memory_bandwidth


def test_inputs_that_come_quantized_are_not_quantized_again():
    model, shape = load_model("llama-3.1-8b"), decode_shape(8, 100)
    own, before = (
        build_graph(model, EngineSpec(quantization="fp8", profile=profile), sampling="greedy")
        for profile in ("vllm", "trtllm")
    )
    launches = [sum(n.count * n.work(shape).num_kernels for n in graph.nodes) for graph in (own, before)]
    assert launches[0] - launches[1] == 4 * model.num_layers
    time = OperatorTimer(H100, load_calibration(H100, "trtllm"))
    assert estimate_step(before, time, shape).device_s < estimate_step(own, time, shape).device_s

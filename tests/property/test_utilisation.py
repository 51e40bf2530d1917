"""No step or operator computes, reads or draws more than the declared peaks: utilization is in [0, 1].

An operator may read from the last-level cache, and no file declares its bandwidth. So only the bytes beyond that cache
count for an operator. A whole step reads its weights and its KV cache from memory, so all of its bytes count.
"""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import load_scenario
from perfmodel.cost.power import device_power_w
from perfmodel.cost.steps.step_costs import step_costs
from perfmodel.errors import PerfmodelError
from perfmodel.files.device_tables import device_names
from perfmodel.models.number_formats import METHODS
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.specs import load_hardware

ENGINES = ("vllm", "sglang", "trtllm", "llamacpp", "mlx", "datasheet")
# All kinds of layers: dense, experts, latent attention, windows, state spaces, the delta rule.
MODELS = (
    "llama-3.2-1b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "gemma-3-4b",
    "nemotron-nano-9b-v2",
    "qwen3-next-80b-a3b",
)
SHAPES = {
    "a prompt": BatchShape(num_tokens=512, num_samples=1, prefills=((512, 0),)),
    "a long prompt": BatchShape(num_tokens=2000, num_samples=1, prefills=((2000, 0),)),
    "one sequence": (1, 512),
    "eight sequences": (8, 512),
    "many sequences": (256, 2000),
}
ROUNDING = 1 + 1e-9


@cache
def devices():
    return {name: load_hardware(name) for name in device_names()}


def has_slow_fp16(device):
    """Whether FP32 is faster, as on consumer Pascal: then engines multiply in another format than weights have."""
    rates = device.declared.peak_flops_per_s
    return rates.get("fp16", rates.get("bf16", 1e30)) < rates.get("fp32", 0)


def generations():
    """One device of every generation."""
    by_size = sorted(devices().items(), key=lambda item: item[1].memory_bytes)
    return sorted(
        {
            (device.kind, device.maker, device.declared.architecture, has_slow_fp16(device)): name
            for name, device in by_size
        }.values()
    )


def num_checked_steps(name, engine, model, quantization, shapes):
    """Number of checked steps: 0 if the device or the engine does not support the format."""
    changes = [f"hardware={name}", f"engine.profile={engine}", f"model={model}", f"engine.quantization={quantization}"]
    try:
        scenario = load_scenario("llama-3.1-8b-a100", [*changes, "engine.max_model_len=4096"])
        costs = step_costs(scenario)
    except PerfmodelError:
        return 0
    for shape in shapes:
        size = SHAPES[shape]
        step = size if isinstance(size, BatchShape) else decode_shape(*size, scenario.model.attention_spans)
        assert_within_peaks(scenario.hardware, costs.timer, costs.estimate(step), (changes, shape))
    return len(shapes)


def assert_within_peaks(device, timer, estimate, label):
    assert 0 <= estimate.mfu <= 1, (label, estimate.mfu)
    assert 0 <= estimate.mbu <= 1, (label, estimate.mbu)
    power = device_power_w(device, estimate.mfu, estimate.mbu)
    assert 0 < power <= timer.device.tdp_w, (label, power)
    cached = max((level.capacity_bytes for level in device.declared.memory[1:]), default=0) + timer.device.l2_bytes
    for row in estimate.rows:
        duration = row.time.duration_s * ROUNDING
        if not duration:  # within another operator's measured time
            continue
        compute = timer.at_peak_s(row.work, timer.fit(row.work))
        memory = (row.work.hbm_bytes - 2 * cached) / device.memory_bandwidth
        assert compute <= duration, (label, row.name, compute / duration)
        assert memory <= duration, (label, row.name, memory / duration)


@pytest.mark.parametrize("name", generations())
def test_every_generation_stays_within_its_peaks(name):
    shapes = ("a prompt", "one sequence", "eight sequences")
    if not sum(
        num_checked_steps(name, engine, "llama-3.2-1b", quantization, shapes)
        for engine in ("vllm", "llamacpp")
        for quantization in ("null", "fp8", "w4a16", "q4_k_m")
    ):
        pytest.skip(f"{name} has no kernels for any of these formats")


@settings(deadline=None)
@given(
    st.sampled_from(sorted(device_names())),
    st.sampled_from(ENGINES),
    st.sampled_from(MODELS),
    st.sampled_from(["null", *sorted(METHODS)]),
    st.sampled_from(sorted(SHAPES)),
)
def test_every_operator_stays_within_the_peaks_of_every_device(name, engine, model, quantization, shape):
    num_checked_steps(name, engine, model, quantization, [shape])

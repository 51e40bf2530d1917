"""Nothing computes or reads faster than the declared peaks: a step's MFU and MBU are in [0, 1] on every generation."""

import pytest

from perfmodel import load_scenario
from perfmodel.errors import PerfmodelError
from perfmodel.files.device_tables import device_names
from perfmodel.planning.sweeps.step_report import estimate_choice
from perfmodel.specs import load_hardware

DEVICES = {name: load_hardware(name) for name in device_names()}


def has_slow_fp16(device):
    """Whether FP32 is faster, as on consumer Pascal: then engines multiply in another format than weights have."""
    rates = device.declared.peak_flops_per_s
    return rates.get("fp16", rates.get("bf16", 1e30)) < rates.get("fp32", 0)


GENERATIONS = {
    (device.kind, device.maker, device.declared.architecture, has_slow_fp16(device)): name
    for name, device in sorted(DEVICES.items(), key=lambda each: each[1].memory_bytes)
}


@pytest.mark.parametrize("name", sorted(GENERATIONS.values()))
def test_no_ratio_of_a_peak_is_above_one(name: str) -> None:
    num_estimated = 0  # what a device or an engine does not run is left out
    for profile in ("vllm", "llamacpp"):
        for quantization in ("null", "fp8", "w4a16", "q4_k_m"):
            changes = [f"hardware={name}", f"engine.profile={profile}", f"engine.quantization={quantization}"]
            try:
                scenario = load_scenario("llama-3.1-8b-a100", [*changes, "engine.max_model_len=2048"])
                steps = [estimate_choice(scenario, prefill=512), estimate_choice(scenario, batch=8, context=512)]
            except PerfmodelError:
                continue
            num_estimated += 1
            for step in steps:
                found = (step.estimate.mfu, step.estimate.mbu)
                assert all(0 <= share <= 1 for share in found), (changes, found)
    if not num_estimated:
        pytest.skip(f"{name} has no kernels for any of these formats, or no memory for the model")

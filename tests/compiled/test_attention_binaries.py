"""The attention kernels' binaries: SRAM by the law that filters tiles, no spills in any format of pages."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel.errors import DoesNotFitError  # noqa: E402
from perfmodel.specs import load_hardware  # noqa: E402
from perfmodel_executors.compiled.build import compile_launch, compile_problem, device_limits  # noqa: E402
from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels.attention_prefill import AttentionRule  # noqa: E402
from perfmodel_executors.kernels.launch import recording  # noqa: E402
from perfmodel_executors.kernels.problem import Inputs, problems_of  # noqa: E402
from perfmodel_executors.kernels.tiles import DeviceLimits, TileConfig, targeting  # noqa: E402
from perfmodel_executors.kernels.triton.attention_decode import shared_bytes as decode_bytes  # noqa: E402
from perfmodel_executors.kernels.triton.attention_latent import (  # noqa: E402
    expanded_shared_bytes as expanded_bytes,
)
from perfmodel_executors.kernels.triton.attention_prefill import shared_bytes as prefill_bytes  # noqa: E402

BF16 = 2


def serving(operator, **sizes):
    return next(p for p in problems_of(operator) if all(p.sizes[name] == size for name, size in sizes.items()))


def config_of(kernel, *names):
    return TileConfig({name: kernel.launch.constants[name] for name in names}, kernel.launch.options)


@pytest.mark.parametrize(("device", "capability"), [("a100-sxm-80gb", 80), ("h100-sxm-80gb", 90)])
@pytest.mark.parametrize("kv", ["bf16", "fp8", "int8"])
def test_decoding_takes_the_sram_of_its_law(device, capability, kv):
    """A long context of one sequence: split, and combined by a second kernel."""
    problem = serving("attention_decode", batch_size=1, kv_cache_dtype=kv)
    kernel, combine = compile_problem(problem, load_hardware(device))
    assert combine.launch.name == "combine_kernel"
    stored = BF16 if kv == "bf16" else 1
    law = decode_bytes(config_of(kernel, "TILE"), capability, (128, 128), kernel.launch.constants["ROWS"], BF16, stored)
    assert kernel.facts.shared_bytes <= law <= 1.2 * kernel.facts.shared_bytes
    assert kernel.facts.spills == combine.facts.spills == 0
    assert kernel.facts.async_copies
    assert kernel.facts.tensor_instructions
    # Two blocks a unit keep two buffers of 32 kB each in flight (half with quantised pages): Hopper needs some 30 kB.
    assert kernel.occupancy.blocks >= 2


@pytest.mark.parametrize(
    ("device", "capability", "sizes"),
    [
        ("h100-sxm-80gb", 90, {"isl": 8192, "head_dim": 128, "window_size": 0}),
        ("h100-sxm-80gb", 90, {"kv_cache_dtype": "int8"}),
        ("a100-sxm-80gb", 80, {"isl": 8192, "head_dim": 128, "window_size": 0}),
        ("a100-sxm-80gb", 80, {"tree": "yes"}),
    ],
    ids=str,
)
def test_prefill_takes_the_sram_of_its_law(device, capability, sizes):
    problem = serving("attention_prefill", **sizes)
    (kernel,) = compile_problem(problem, load_hardware(device))
    stored = 1 if "kv_cache_dtype" in sizes else BF16
    law = prefill_bytes(config_of(kernel, "ROWS", "KEYS"), capability, (128, 128), BF16, stored)
    assert kernel.facts.shared_bytes <= law <= 1.7 * kernel.facts.shared_bytes
    assert kernel.facts.spills == kernel.facts.unsettled == 0
    assert kernel.facts.async_copies
    if capability == 90:  # instructions of whole warp groups, 64 rows by 128 keys: a sixteenth of what Ampere issues
        assert 0 < kernel.facts.tensor_instructions < 64


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm"])
@pytest.mark.parametrize("operator", ["attention_sinks_decode", "attention_sinks_prefill", "capacity_experts"])
def test_windows_with_sinks_and_full_experts_neither_spill_nor_leave_the_tensor_cores(operator, device):
    """Nor does a window with sinks take one launch more than a window: the split decode, and what combines it."""
    hardware = load_hardware(device)
    for problem in problems_of(operator):
        kernels = compile_problem(problem, hardware)
        assert all(kernel.facts.spills == kernel.facts.unsettled == 0 for kernel in kernels)
        assert any(kernel.facts.tensor_instructions for kernel in kernels)
        if operator != "capacity_experts":
            assert len(kernels) <= 2
            assert kernels[0].facts.async_copies


@pytest.mark.parametrize("operator", ["attention_decode", "attention_prefill", "attention_standard"])
def test_a_device_whose_sram_holds_no_tile_is_refused_with_a_sentence(operator):
    problem = problems_of(operator)[0]
    with targeting(DeviceLimits("tiny", 80, 4096)), recording(), pytest.raises(DoesNotFitError, match="tiny has 4096"):
        getattr(load_kernels("triton"), operator)(*problem.make(Inputs("meta")))


@pytest.mark.parametrize("operator", ["attention_decode", "attention_prefill"])
def test_caps_and_sinks_neither_spill_nor_leave_the_tensor_cores(operator):
    problem, hardware = problems_of(operator)[0], load_hardware("h200-sxm")
    sinks = torch.empty(problem.sizes["num_heads"], dtype=torch.bfloat16, device="meta")
    with targeting(device_limits(hardware)), recording() as launches:
        *args, _ = problem.make(Inputs("meta"))
        getattr(load_kernels("triton"), operator)(*args, AttentionRule(cap=50.0, sinks_N=sinks))
    facts = compile_launch(launches[0], hardware).facts
    assert facts.spills == facts.serialised == 0
    assert facts.tensor_instructions


@pytest.mark.parametrize(("device", "capability"), [("a100-sxm-80gb", 80), ("h200-sxm", 90)])
def test_prompts_over_latents_take_the_sram_of_their_law(device, capability):
    """Expanded by one kernel, attended to by another; on Hopper the copy engine brings its keys and values."""
    expand, attend = compile_problem(problems_of("attention_latent_prefill")[0], load_hardware(device))
    config = config_of(attend, "ROWS", "KEYS", "DESCRIPTORS")
    assert config.sizes["DESCRIPTORS"] == (capability == 90)
    assert attend.facts.shared_bytes <= expanded_bytes(config, capability, (128, 64, 128), BF16)
    assert attend.facts.async_copies
    assert expand.facts.async_copies

"""Binaries of grouped experts: tensor cores, SRAM by its law, and bytes in flight where bandwidth is what counts."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel.errors import DoesNotFitError, PerfmodelError  # noqa: E402
from perfmodel.specs import load_hardware  # noqa: E402
from perfmodel_executors.compiled.build import compile_problem, device_limits  # noqa: E402
from perfmodel_executors.kernels.launch import Options, recording  # noqa: E402
from perfmodel_executors.kernels.problem import Inputs, problems_of  # noqa: E402
from perfmodel_executors.kernels.tiles import TileConfig, targeting  # noqa: E402
from perfmodel_executors.kernels.triton.moe import grouped_experts  # noqa: E402
from perfmodel_executors.kernels.triton.moe_tiles import shared_bytes  # noqa: E402
from perfmodel_executors.kernels.triton.operand import operand_of  # noqa: E402
from perfmodel_executors.kernels.triton.swapped_product import shared_bytes as stored_bytes  # noqa: E402

CODES = ("fp8", "fp8_block")  # formats whose activations are quantised, too
LATENCY_S = 0.8e-6  # of a load from HBM on a busy GPU


def problem(tokens, num_experts=128, form="bfloat16"):
    wanted = {"num_tokens": tokens, "num_experts": num_experts, "moe_dtype": form}
    return next(p for p in problems_of("grouped_experts") if wanted.items() <= p.sizes.items())


@pytest.mark.parametrize("tokens", [16, 4096])
@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm"])
def test_products_use_tensor_cores_and_the_sram_that_the_law_says(device, tokens):
    hardware = load_hardware(device)
    built = {kernel.launch.name: kernel for kernel in compile_problem(problem(tokens), hardware)}
    assert set(built) == {"up_kernel", "down_kernel", "combine_kernel"} | ({"sort_kernel"} if tokens > 16 else set())
    for name, gates in (("up_kernel", 2), ("down_kernel", 1)):
        kernel = built[name]
        sizes = {size: kernel.launch.constants[size] for size in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
        config = TileConfig(sizes, kernel.launch.options)
        assert kernel.facts.shared_bytes == shared_bytes(gates, 2)(config, device_limits(hardware).capability)
        assert kernel.facts.tensor_instructions
        assert kernel.facts.async_copies
        assert all(kernel.facts.spills == kernel.facts.unsettled == 0 for kernel in built.values())
        if tokens == 16:
            weights = (config.options.num_stages - 2) * gates * sizes["BLOCK_N"] * sizes["BLOCK_K"] * 2
            in_flight = kernel.occupancy.blocks * weights * hardware.declared.compute_units
            assert in_flight >= hardware.memory_bandwidth * LATENCY_S


def test_a_few_launches_and_none_that_waits_for_the_host():
    hardware = load_hardware("h100-sxm-80gb")
    for tokens, num_experts, launches in ((1, 128, 2), (16, 128, 3), (64, 128, 4), (8, 8, 3), (16, 8, 4)):
        with targeting(device_limits(hardware)), recording() as made:
            grouped_experts(*problem(tokens, num_experts).make(Inputs("meta")))
        assert len(made) == launches


def test_a_tile_that_does_not_fit_is_refused_before_it_is_compiled():
    too_large = TileConfig({"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128}, Options(8, 4))
    limits = device_limits(load_hardware("h100-sxm-80gb"))
    with targeting(limits), recording(), pytest.raises(DoesNotFitError, match="655360 bytes of SRAM"):
        grouped_experts(*problem(64).make(Inputs("meta")), config=too_large)


@pytest.mark.parametrize("form", ["int8_wo", "int4_wo", "fp8", "fp8_block", "w4a16_mxfp4"])
@pytest.mark.parametrize(
    ("device", "tokens"),
    [
        ("a100-sxm-80gb", 1024),
        *(("h100-sxm-80gb", n) for n in (1, 16, 1024)),
        ("b200-sxm", 1024),
    ],
)
def test_stored_experts_use_tensor_cores_and_the_sram_that_the_law_says(device, form, tokens):
    """... at the tile that is trusted, without spills; one that an A100 cannot convert is refused."""
    hardware, asked = load_hardware(device), problem(tokens, form=form)
    if form in CODES and device == "a100-sxm-80gb":
        with pytest.raises(PerfmodelError, match="e4m3 weights need sm_89 or newer"):
            compile_problem(asked, hardware)
        return
    built = {kernel.launch.name: kernel for kernel in compile_problem(asked, hardware)}
    layer = asked.make(Inputs("meta"))[3]
    assert ("quantize_tokens_kernel" in built) == (form in CODES)
    assert ("sort_kernel" in built) == (tokens > 16)
    for name, weight in (("up_stored_kernel", layer.up_EFC), ("down_stored_kernel", layer.down_ECI)):
        kernel = built[name]
        sizes = {size: kernel.launch.constants[size] for size in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
        config = TileConfig(sizes, kernel.launch.options)
        expected = stored_bytes(operand_of(weight.stacked), 2, config, device_limits(hardware).capability)
        slack = 4 * sizes["BLOCK_N"] + 8 * sizes["BLOCK_M"] if form == "fp8_block" else 0  # what the law has at most
        assert expected - slack <= kernel.facts.shared_bytes <= expected
        assert kernel.facts.tensor_instructions
        assert kernel.facts.async_copies
        assert kernel.facts.spills == kernel.facts.unsettled == 0
        assert kernel.occupancy.blocks >= (2 if tokens <= 16 else 1)


def test_stored_experts_take_a_launch_more_for_each_quantised_input():
    hardware = load_hardware("h100-sxm-80gb")
    for tokens, weight_only in ((1, 3), (16, 3), (64, 4)):
        for form, launches in (("w4a16_mxfp4", weight_only), ("int4_wo", weight_only), ("fp8", weight_only + 2)):
            with targeting(device_limits(hardware)), recording() as made:
                grouped_experts(*problem(tokens, form=form).make(Inputs("meta")))
            assert len(made) == launches

"""Linear layers' binaries: the law that drops tiles is what the compiler takes, and the fast instructions are used."""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel.errors import DoesNotFitError, PerfmodelError  # noqa: E402
from perfmodel.specs import load_hardware  # noqa: E402
from perfmodel_executors.compiled import binary  # noqa: E402
from perfmodel_executors.compiled.binary import serialised_products, unsettled_products  # noqa: E402
from perfmodel_executors.compiled.build import compile_launch, device_limits  # noqa: E402
from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels.launch import Options, recording  # noqa: E402
from perfmodel_executors.kernels.problem import Inputs, problems_of  # noqa: E402
from perfmodel_executors.kernels.tiles import TileConfig, fitting, targeting  # noqa: E402
from perfmodel_executors.kernels.triton.many_tokens import many_tokens_shared_bytes  # noqa: E402
from perfmodel_executors.kernels.triton.operand import operand_of  # noqa: E402
from perfmodel_executors.kernels.triton.swapped_product import shared_bytes  # noqa: E402
from perfmodel_executors.kernels.weight_formats import BlockFp8Weight, Fp4Weight, Fp8Weight, Int4Weight, Int8Weight  # noqa: E402

N, K = 4096, 4096
DEVICES = {"a100-sxm-80gb": 80, "h100-sxm-80gb": 90, "b200-sxm": 100}


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def weight_of(operator):
    if operator == "linear_w4a16 fp4":
        return Fp4Weight(empty(N, K // 2, dtype=torch.uint8), empty(K // 32, N, dtype=torch.uint8))
    if operator == "linear_fp8_block":
        blocks = empty(N // 128, K // 128, dtype=torch.float32)
        return BlockFp8Weight(empty(N, K, dtype=torch.float8_e4m3fn), blocks)
    if operator == "linear_w4a16":
        return Int4Weight(empty(N, K // 2, dtype=torch.uint8), empty(K // 128, N), None, 128)
    if operator == "linear_fp8":
        return Fp8Weight(empty(N, K, dtype=torch.float8_e4m3fn), empty(N, dtype=torch.float32))
    if operator == "linear":
        return empty(N, K)
    return Int8Weight(empty(N, K, dtype=torch.int8), empty(N, dtype=torch.float32), operator == "linear_w8a8")


def law(operator, config, capability):
    if "DESCRIPTORS" in config.sizes:
        return many_tokens_shared_bytes(operand_of(weight_of(operator)), config, capability)
    return shared_bytes(operand_of(weight_of(operator)), 2, config, capability)


def tile(warps, stages, **sizes):
    return TileConfig({**sizes, "SPLIT_K": 1}, Options(warps, stages))


CASES = [
    ("linear", tile(8, 3, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, DESCRIPTORS=0), 4096),
    ("linear", tile(8, 3, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, DESCRIPTORS=1), 4096),
    ("linear", tile(4, 4, BLOCK_M=16, BLOCK_N=64, BLOCK_K=128), 16),
    ("linear", tile(4, 4, BLOCK_M=16, BLOCK_N=32, BLOCK_K=256), 16),
    ("linear_w8a16", tile(4, 4, BLOCK_M=8, BLOCK_N=64, BLOCK_K=256), 8),
    ("linear_w8a16", tile(4, 4, BLOCK_M=16, BLOCK_N=128, BLOCK_K=128), 16),
    ("linear_w4a16", tile(4, 4, BLOCK_M=8, BLOCK_N=64, BLOCK_K=256), 8),
    ("linear_w4a16", tile(4, 4, BLOCK_M=16, BLOCK_N=128, BLOCK_K=128), 16),
    ("linear_w4a16 fp4", tile(4, 4, BLOCK_M=8, BLOCK_N=64, BLOCK_K=256), 8),
    ("linear_w4a16 fp4", tile(4, 4, BLOCK_M=16, BLOCK_N=64, BLOCK_K=256), 16),
    ("linear_fp8_block", tile(4, 5, BLOCK_M=16, BLOCK_N=64, BLOCK_K=128), 16),
    ("linear_w8a8", tile(8, 3, BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, DESCRIPTORS=1), 4096),
    ("linear_w8a8", tile(4, 3, BLOCK_M=64, BLOCK_N=128, BLOCK_K=128, DESCRIPTORS=0), 4096),
    ("linear_fp8", tile(8, 3, BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, DESCRIPTORS=1), 4096),
    ("linear_fp8_block", tile(8, 4, BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, DESCRIPTORS=1), 4096),
    ("linear_fp8", tile(4, 4, BLOCK_M=16, BLOCK_N=64, BLOCK_K=256), 16),
    ("linear", tile(4, 1, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, DESCRIPTORS=1, STAGES=4), 4096),
    ("linear_fp8", tile(4, 1, BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, DESCRIPTORS=1, STAGES=6), 4096),
    ("linear_w8a8", tile(4, 1, BLOCK_M=192, BLOCK_N=128, BLOCK_K=128, DESCRIPTORS=1, STAGES=5), 4096),
    ("linear_fp8_block", tile(4, 1, BLOCK_M=192, BLOCK_N=128, BLOCK_K=128, DESCRIPTORS=1, STAGES=5), 4096),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("operator", "config", "rows"), CASES, ids=lambda value: str(value))
def test_shared_memory_is_what_the_law_says(operator, config, rows, device):
    """... and no matrix product spills or misses the tensor cores; what the device lacks is refused."""
    hardware = load_hardware(device)
    expected = law(operator, config, DEVICES[device])
    if expected > 1 << 20:  # no copy engine
        return
    product = getattr(load_kernels("triton"), operator.split()[0])
    with targeting(device_limits(hardware)), recording() as launches:
        if operator.startswith("linear_fp8") and device == "a100-sxm-80gb":
            with pytest.raises(PerfmodelError, match="sm_89"):
                product(empty(rows, K), weight_of(operator), None, config=config)
            return
        product(empty(rows, K), weight_of(operator), None, config=config)
    compiled = compile_launch(launches[-1], hardware)
    slack = 4 * 64 + 8 * 16 if operator == "linear_fp8_block" else 0  # where scales pass through SRAM is the compiler's
    slack += 32 if "STAGES" in config.sizes else 0  # what groups of warps are told
    assert expected - slack <= compiled.facts.shared_bytes <= expected
    assert compiled.facts.spills == compiled.facts.unsettled == 0
    assert compiled.facts.tensor_instructions
    assert compiled.facts.async_copies


@pytest.mark.parametrize(
    "operator", ["linear", "linear_w8a16", "linear_w4a16", "linear_w8a8", "linear_fp8", "linear_fp8_block"]
)
def test_what_runs_before_anything_is_tuned_neither_spills_nor_waits_for_each_product(operator):
    """Of each size that serving has, on Hopper. Slices of K are one binary for this, however many there are."""
    hardware, distinct = load_hardware("h200-sxm"), {}
    for problem in problems_of(operator):
        with targeting(device_limits(hardware)), recording() as launches:
            getattr(load_kernels("triton"), operator)(*problem.make(Inputs("meta")))
        for launch in launches:
            constants = launch.constants | {"SPLIT_K": launch.constants.get("SPLIT_K", 1) > 1}
            if "SLICES" not in constants:
                distinct[launch.name, str(constants), launch.options] = launch
    for launch in distinct.values():
        kernel = compile_launch(launch, hardware)
        assert kernel.facts.spills == 0, str(kernel)
        assert kernel.facts.serialised == kernel.facts.unsettled == 0, f"{kernel} {launch.constants}"


def test_serialised_products_are_what_the_assembler_says(monkeypatch):
    """Its words where it serialises, and nothing where there are none of Hopper's products."""
    said = (
        "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in the function 'k'"
    )
    monkeypatch.setattr(binary, "_tool", lambda *arguments: said)
    assert serialised_products("wgmma.mma_async.sync") == 1
    assert serialised_products("mma.sync") == 0


def test_products_from_registers_are_unsettled_where_a_wait_leaves_some():
    """As Triton 3.6 wrote them where codes were widened for the next product: {sums}, {left operand}, right one."""
    product = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%%r1, %%r2}, %s, %%rd3;"
    wait = "wgmma.wait_group.sync.aligned %d;"
    assert unsettled_products(product % "{%r3, %r4}" + wait % 3 + wait % 0) == 1
    assert unsettled_products(product % "{%r3, %r4}" + wait % 0) == 0
    assert unsettled_products(product % "%rd1" + wait % 3) == 0


def test_tiles_that_no_device_holds_are_refused_with_a_sentence():
    limits = device_limits(load_hardware("a100-sxm-80gb"))
    config = tile(8, 8, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, DESCRIPTORS=0)
    with pytest.raises(DoesNotFitError, match="needs 344064 bytes of SRAM a thread block"):
        fitting([config], partial(law, "linear"), limits, "linear")


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
def test_activations_compile_without_spills(activation):
    with recording() as launches:
        load_kernels("triton").activate(empty(64, 28672), activation, True)
    facts = compile_launch(launches[0], load_hardware("h100-sxm-80gb")).facts
    assert facts.spills == 0
    assert facts.registers <= 64

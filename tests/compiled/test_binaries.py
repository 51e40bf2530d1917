"""Every Triton kernel, compiled for A100, H100 and B200 from the calls that serving makes."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.specs import load_hardware  # noqa: E402
from perfmodel_executors.compiled.binary import shared_limit_bytes  # noqa: E402
from perfmodel_executors.compiled.build import compile_problem  # noqa: E402
from perfmodel_executors.kernels import KERNELS  # noqa: E402
from perfmodel_executors.kernels.problem import problems_of  # noqa: E402

DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm")
# Operators whose work is matrix products: these must reach the tensor cores.
PRODUCTS = frozenset(
    {
        *("attention_prefill", "attention_decode", "attention_latent_decode", "attention_latent_prefill"),
        *("attention_softmax_decode", "attention_softmax_prefill", "grouped_experts", "linear", "scan_prefill"),
    }
)
# What a device lacks, and the words that say so.
REFUSED = {(each, "a100-sxm-80gb"): "sm_89 or newer" for each in ("linear_fp8", "linear_fp8_block")}
# Those of block-sparse attention are the kernels of plain attention, over other tables.
OPERATORS = [
    each for each, backends in KERNELS.items() if "triton" in backends and not each.startswith("attention_sparse")
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_kernel_fits_the_device_and_does_not_spill(operator, device):
    """One problem of each distinct binary is enough; occupancy says that at least one block runs."""
    hardware = load_hardware(device)
    problem = problems_of(operator)[0]
    if (operator, device) in REFUSED:
        with pytest.raises(PerfmodelError, match=REFUSED[operator, device]):
            compile_problem(problem, hardware)
        return
    kernels = compile_problem(problem, hardware)
    assert kernels
    for kernel in kernels:
        assert kernel.facts.shared_bytes <= shared_limit_bytes(hardware)
        assert kernel.facts.registers <= 255
        assert kernel.facts.spills == 0, str(kernel)
        assert kernel.facts.serialised == kernel.facts.unsettled == 0, str(kernel)
        assert kernel.occupancy.blocks >= 1
    if operator in PRODUCTS or operator.startswith("linear_"):
        assert any(kernel.facts.tensor_instructions for kernel in kernels)

"""Kernels without a table of their own: which relation stands for them."""

import pytest

from perfmodel.cost import Calibration, OperatorTimer, load_calibration
from perfmodel.cost.calibrations.files import with_unmeasured
from perfmodel.cost.kernel_models.gemm import TiledGemmFit
from perfmodel.cost.kernel_models.roofline import FamilyFit
from perfmodel.models.number_formats import with_quantization
from perfmodel.ops.formats import linear_format, served_model
from perfmodel.ops.linear import gemm
from perfmodel.specs import EngineSpec, load_hardware, load_model

STATIC = TiledGemmFit(launch_s=2e-6)
MODEL = with_quantization(load_model("llama-3.1-8b"), "nvfp4")


def seconds(engine: str, quantization: str) -> float:
    """Of a small multiplication on a Blackwell device."""
    hardware = load_hardware("b200-sxm")
    spec = EngineSpec(profile=engine, quantization=quantization)
    form = linear_format(served_model(load_model("llama-3.1-8b"), spec), "dense_ffn")
    timer = OperatorTimer(hardware, load_calibration(hardware, engine))
    return timer.time(gemm("x", 1, 1024, 1024, form)).duration_s


@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_a_small_nvfp4_multiplication_costs_no_more_than_one_in_fp8(engine: str) -> None:
    assert seconds(engine, "nvfp4") <= seconds(engine, "fp8") + 2.5e-6  # of a kernel that quantizes


def test_nvfp4_takes_fp8_with_known_scales_for_its_like() -> None:
    found = with_unmeasured(Calibration(device="x", engine="y", families={"gemm/fp8_static": STATIC}))
    assert found.fit("gemm", "fp4", format="nvfp4_static") == STATIC
    quantizing = found.fit("gemm", "fp4", format="nvfp4")
    assert isinstance(quantizing, TiledGemmFit)
    assert quantizing.launch_s == STATIC.launch_s + found.default.overhead_s


def test_one_quantizing_kernel_takes_half_of_what_two_take_and_no_less_than_any_kernel() -> None:
    """FP8 that looks for its scales starts 10 us later, for two kernels: NVFP4's one takes 5 us. 1 us later: a kernel
    takes the 2 us of any all the same.
    """
    for later_s, kernel_s in ((10e-6, 5e-6), (1e-6, 2e-6)):
        families = {"gemm/fp8_static": STATIC, "gemm/fp8": TiledGemmFit(launch_s=STATIC.launch_s + later_s)}
        plain = Calibration(device="x", engine="y", families=families, default=FamilyFit(overhead_s=2e-6))
        quantizing = with_unmeasured(plain).fit("gemm", "fp4", format="nvfp4")
        assert isinstance(quantizing, TiledGemmFit)
        assert quantizing.launch_s - STATIC.launch_s == pytest.approx(kernel_s)


def test_what_was_measured_stays() -> None:
    own = TiledGemmFit(launch_s=5e-6)
    calibration = Calibration(device="x", engine="y", families={"gemm/fp8_static": STATIC, "gemm/nvfp4": own})
    assert with_unmeasured(calibration).families["gemm/nvfp4"] == own
    empty = Calibration(device="x", engine="y")
    assert with_unmeasured(empty) is empty


def test_tensorrt_llm_quantizes_nvfp4_before_the_multiplication() -> None:
    for engine, quantizes in (("trtllm", False), ("sglang", True)):
        form = linear_format(served_model(MODEL, EngineSpec(profile=engine)), "dense_ffn")
        assert form.quantizes_input is quantizes

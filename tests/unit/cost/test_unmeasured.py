"""Products of 4-bit operands on Blackwell, and what engines do before them."""

import pytest

from perfmodel.cost import OperatorTimer, load_calibration
from perfmodel.models.number_formats import with_quantization
from perfmodel.ops.formats import linear_format, served_model
from perfmodel.ops.linear import gemm
from perfmodel.specs import EngineSpec, load_hardware, load_model

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


def test_tensorrt_llm_quantizes_nvfp4_before_the_multiplication() -> None:
    for engine, quantizes in (("trtllm", False), ("sglang", True)):
        form = linear_format(served_model(MODEL, EngineSpec(profile=engine)), "dense_ffn")
        assert form.quantizes_input is quantizes

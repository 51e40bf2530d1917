"""TF32: FP32 in memory, the tensor units' peak in linear layers, and no units without a declared peak."""

import pytest

from perfmodel.cost import step_costs
from perfmodel.errors import SpecError
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.specs import load_scenario

FP32 = ["engine.dtype=float32"]
TF32 = [*FP32, "engine.float32_matmul_precision=high"]
PROMPT = BatchShape(num_tokens=2048, num_samples=1, prefills=((2048, 0),))


def rows(overrides, shape, hardware="a100-sxm-80gb", profile="datasheet"):
    scenario = load_scenario("llama-3.1-8b-a100", [*overrides, f"hardware={hardware}", f"engine.profile={profile}"])
    return {row.name: row for row in step_costs(scenario).estimate(shape).rows}


@pytest.mark.parametrize(("hardware", "ratio"), [("a100-sxm-80gb", 156 / 19.5), ("h100-sxm-80gb", 494.5 / 67)])
def test_large_products_gain_what_the_datasheets_peaks_say(hardware, ratio):
    """Compute-bound at both rates: 2048 tokens are 1024 FLOP/B, ridges 76 and 147 FLOP/B at TF32."""
    before, after = rows(FP32, PROMPT, hardware), rows(TF32, PROMPT, hardware)
    gains = before["qkv_proj"].time.compute_s / after["qkv_proj"].time.compute_s
    assert gains == pytest.approx(ratio)
    assert after["attention_prefill"].duration_s == before["attention_prefill"].duration_s


def test_bytes_are_those_of_fp32():
    shape = decode_shape(4, 1024)
    before, after = rows(FP32, shape), rows(TF32, shape)
    assert {name: row.hbm_bytes for name, row in before.items()} == {name: row.hbm_bytes for name, row in after.items()}


def test_a_calibrated_device_is_between_fp32_and_bf16():
    """TF32 has half the tensor rate of 16 bits and twice their bytes."""
    fp32, tf32, bf16 = (rows(over, PROMPT, profile="vllm")["gate_up_proj"] for over in (FP32, TF32, []))
    assert fp32.duration_s > tf32.duration_s > bf16.duration_s
    assert tf32.duration_s == pytest.approx(2 * bf16.duration_s, rel=0.15)


@pytest.mark.parametrize("hardware", ["a100-sxm-80gb", "h100-sxm-80gb"])
def test_one_sequence_in_fp32_waits_for_twice_the_bytes(hardware):
    """0.5 FLOP/B, ridges 10 and 20 FLOP/B: bound by weights in either format, as cuBLAS's GEMV is."""
    shape = decode_shape(1, 512)
    fp32, bf16 = (rows(over, shape, hardware, "vllm")["gate_up_proj"].duration_s for over in (FP32, []))
    assert fp32 == pytest.approx(2 * bf16, rel=0.2)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([*TF32, "hardware=t4"], "t4, which has no TF32 units"),
        ([*TF32, "hardware=cpu"], "cpu, which has no TF32 units"),
        (["engine.float32_matmul_precision=high"], "engine.dtype=bfloat16"),
    ],
)
def test_without_units_or_fp32_it_is_refused(overrides, says):
    with pytest.raises(SpecError, match=says):
        load_scenario("llama-3.1-8b-a100", overrides)


def test_sums_in_fp16_are_twice_as_fast_where_sums_in_fp32_are_halved():
    """RTX 4090: 330.3 and 165.2 TFLOP/s (Ada whitepaper); an A100 multiplies as fast with either."""
    fp16 = ["engine.dtype=float16"]
    sums = [*fp16, "engine.allow_fp16_accumulation=true"]
    before, after = (rows(over, PROMPT, "rtx-4090")["qkv_proj"].time.compute_s for over in (fp16, sums))
    assert before / after == pytest.approx(330.3 / 165.2)
    assert rows(sums, PROMPT)["qkv_proj"].duration_s == rows(fp16, PROMPT)["qkv_proj"].duration_s


def test_sums_in_fp16_are_of_fp16():
    with pytest.raises(SpecError, match=r"allow_fp16_accumulation .*set engine\.dtype to float16"):
        load_scenario("llama-3.1-8b-a100", ["engine.allow_fp16_accumulation=true"])

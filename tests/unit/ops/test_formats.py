"""Number formats as the operators see them."""

import pytest

from perfmodel.errors import SpecError
from perfmodel.models.cards import load_model
from perfmodel.ops.formats import LinearFormat, linear_format, served_model
from perfmodel.ops.linear import gemm, linear_nodes
from perfmodel.ops.work import BatchShape
from perfmodel.specs.engine.spec import EngineSpec


def served(**engine):
    return served_model(load_model("llama-3.1-8b"), EngineSpec(**engine))


def test_default_engine_changes_nothing():
    model = load_model("llama-3.1-8b")
    assert served_model(model, EngineSpec()) is model


def test_fp8_multiplies_at_its_rate_and_quantizes_activations():
    form = linear_format(served(quantization="fp8"), "attention")
    assert form == LinearFormat("fp8", 1.0, 1.0, 2.0, True)
    assert linear_format(served(quantization="fp8"), "lm_head") == LinearFormat("bf16", 2.0, 2.0, 2.0)


def test_weight_only_formats_multiply_at_the_dtype():
    form = linear_format(served(quantization="awq"), "dense_ffn")
    assert (form.rate, form.input_bytes, form.quantizes_input) == ("bf16", 2.0, False)
    assert form.weight_bytes == pytest.approx(0.5 + 2 / 128)


def test_quantizing_reads_two_bytes_and_writes_one():
    form = linear_format(served(quantization="fp8"), "attention")
    work = gemm("o_proj", 64, 4096, 4096, form)
    assert work.weight_bytes == 4096 * 4096
    assert work.activation_bytes == 64 * 4096 * (1 + 2 + 2 + 1)
    assert work.num_kernels == 2


def test_kv_cache_dtype_is_applied():
    assert served(kv_cache_dtype="fp8_e4m3").quantization.kv_cache == "fp8"


@pytest.mark.parametrize("engine", [{"quantization": "fp9"}, {"kv_cache_dtype": "fp9"}])
def test_unknown_formats_are_named_with_their_neighbours(engine):
    with pytest.raises(SpecError, match="fp8"):
        served(**engine)


@pytest.mark.parametrize(
    ("quantization", "rate", "name"),
    [
        ("fp8", "fp8", ""),
        ("fp8_block", "fp8", "fp8_block"),
        ("awq", "bf16", "int4_wo"),
        ("w8a16", "bf16", "int8_wo"),
        ("w8a8", "int8", ""),
        ("mxfp4", "bf16", "mxfp4_wo"),
        ("nvfp4", "fp4", "nvfp4"),
        ("w4a8", "fp8", "w4afp8"),
    ],
)
def test_formats_that_run_their_own_kernels_have_a_name(quantization, rate, name):
    form = linear_format(served(quantization=quantization), "dense_ffn")
    assert (form.rate, form.name) == (rate, name)
    assert gemm("up_proj", 1, 128, 128, form).format == name


def test_tf32_multiplies_what_is_stored_as_fp32():
    fp32, tf32 = served(dtype="float32"), served(dtype="float32", float32_matmul_precision="high")
    for component in ("attention", "dense_ffn", "lm_head"):
        before, after = linear_format(fp32, component), linear_format(tf32, component)
        assert before.rate == "fp32"
        assert after == before._replace(rate="tf32")
    assert linear_format(served(float32_matmul_precision="high"), "attention").rate == "bf16"
    assert linear_format(
        served(dtype="float32", float32_matmul_precision="high", quantization="w8a16"), "attention"
    ) == (LinearFormat("tf32", 1.0, 4.0, 4.0, name="int8_wo"))


@pytest.mark.parametrize(("group", "bits"), [(32, 4.5), (64, 4.25), (128, 4.125), (-1, 4.0), (None, 4.125)])
def test_groups_cost_a_scale_of_16_bits_each(group, bits):
    for method in ("w4a16", "gptq", "awq"):
        model = served(quantization=method, quantization_group_size=group)
        assert 8 * linear_format(model, "attention").weight_bytes == bits
        assert served_model(model, EngineSpec(quantization=method, quantization_group_size=group)) is model


@pytest.mark.parametrize("method", ["fp8", "nvfp4", "fp8_block", "q4_k_m", "ternary"])
def test_fixed_scales_are_not_regrouped(method):
    with pytest.raises(SpecError, match="quantization_group_size: got 64"):
        served(quantization=method, quantization_group_size=64)


def test_groups_of_nothing_are_refused():
    with pytest.raises(ValueError, match="without quantization"):
        EngineSpec(quantization_group_size=64)


def test_outliers_cost_products_and_passes_of_their_own():
    """LLM.int8() of a layer of 4096 x 1024 on 16 tokens: 5 of its 4096 inputs are outliers; the weights are INT8."""
    form = linear_format(served(quantization="llm_int8"), "attention")
    assert form.weight_bytes == linear_format(served(quantization="w8a8_int8"), "attention").weight_bytes
    shape = BatchShape(num_tokens=16, num_samples=1)
    work = {node.name: node.work(shape) for node in linear_nodes({"o_proj": 1024}, 4096, form)}
    assert work["o_proj"].rate == "int8"
    apart = work["o_proj_outliers"]
    assert (apart.rate, apart.flops, apart.weight_bytes) == ("bf16", 2 * 16 * 1024 * 5, 5 * 1024)
    assert work["o_proj_find"].hbm_bytes == 16 * 4096 * 2
    assert work["o_proj_dequantize"].hbm_bytes == 16 * 1024 * (4 + 4)
    assert work["o_proj_add"].hbm_bytes == 16 * 1024 * 3 * 2
    plain = linear_nodes({"o_proj": 4096}, 4096, linear_format(served(quantization="w8a8_int8"), "attention"))
    assert [node.name for node in plain] == ["o_proj"]

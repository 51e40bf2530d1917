"""Formats by layer: the same as one for all where they say the same, between the two where they do not."""

import pytest

from perfmodel.cost import plan_memory, step_costs
from perfmodel.errors import SpecError
from perfmodel.models.layer_formats import bits_per_weight
from perfmodel.models.params import weight_bytes
from perfmodel.ops.formats import served_model
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.specs import load_scenario

DECODE = decode_shape(8, 1024)
PROMPT = BatchShape(num_tokens=1024, num_samples=1, prefills=((1024, 0),))


def scenario(*overrides, base="llama-3.1-8b-a100"):
    return load_scenario(base, overrides)


def seconds(*overrides, shape=DECODE, **given):
    return step_costs(scenario(*overrides, **given)).estimate(shape).device_s


def held(found):
    return plan_memory(found.model, found.hardware, found.engine).weight_bytes


@pytest.mark.parametrize("shape", [DECODE, PROMPT], ids=["decode", "prompt"])
@pytest.mark.parametrize("name", ["w8a16", "w4a16", "w8a8_int8", "fp8"])
@pytest.mark.parametrize("engine", [("vllm", "a100-sxm-80gb"), ("trtllm", "h100-sxm-80gb")], ids=["vllm", "trtllm"])
def test_a_rule_for_all_layers_is_the_engines_quantization(name, shape, engine):
    served = (f"engine.profile={engine[0]}", f"hardware={engine[1]}")
    uniform = (f"engine.quantization={name}", *served)
    by_layer = (f"engine.quantization_by_layer=[{{quantization: {name}}}]", *served)
    assert seconds(*by_layer, shape=shape) == pytest.approx(seconds(*uniform, shape=shape), rel=1e-12)
    assert held(scenario(*by_layer)) == pytest.approx(held(scenario(*uniform)), rel=1e-12)


def test_half_the_layers_cost_half_of_each():
    """Layers run one after another: a step's time and its weights are means over them."""
    half = f"engine.quantization_by_layer=[{{layers: {list(range(16))}, quantization: w4a16}}]"
    for measure in (lambda *o: seconds(*o), lambda *o: held(scenario(*o))):
        plain, four = measure(), measure("engine.quantization=w4a16")
        assert measure(half) == pytest.approx((plain + four) / 2, rel=1e-6)


def test_which_layers_does_not_matter_to_time():
    rule = "engine.quantization_by_layer=[{layers: %s, quantization: w8a16}]"
    assert seconds(rule % [0, 1]) == pytest.approx(seconds(rule % [7, -1]), rel=1e-12)


def test_the_later_rule_holds_and_blocks_are_told_apart():
    both = scenario(
        "engine.quantization_by_layer=[{quantization: w4a16}, {components: [attention], quantization: none}]"
    )
    one = scenario("engine.quantization_by_layer=[{components: [dense_ffn], quantization: w4a16}]")
    assert held(both) == held(one)
    served = served_model(one.model, one.engine)
    assert len(served.layers) == 1
    attention, ffn = 4096 * (4096 + 2 * 1024) + 4096 * 4096, 3 * 4096 * 14336
    assert bits_per_weight(served) == pytest.approx((16 * attention + 4.125 * ffn) / (attention + ffn))


def test_experts_have_formats_too():
    base = "mixtral-8x7b-a100-tp2"
    uniform, ruled = (
        scenario("engine.quantization=w8a16", base=base),
        scenario("engine.quantization_by_layer=[{components: [attention, experts], quantization: w8a16}]", base=base),
    )
    assert held(ruled) == pytest.approx(held(uniform))
    assert sum(weight_bytes(served_model(ruled.model, ruled.engine)).values()) == pytest.approx(
        sum(weight_bytes(uniform.model).values())
    )


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("[{layers: [32], quantization: w8a16}]", "got layer 32, but llama-3.1-8b has layers 0 to 31"),
        ("[{layers: [-33], quantization: w8a16}]", "got layer -33"),
        ("[{quantization: w8a17}]", "w8a16"),
        ("[{components: [lm_head], quantization: w8a16}]", "attention"),
    ],
)
def test_what_is_not_there_is_refused(rule, says):
    with pytest.raises(SpecError, match=says):
        scenario(f"engine.quantization_by_layer={rule}")


def test_shared_layers_have_one_format():
    with pytest.raises(SpecError, match="share the weights"):
        scenario("model_changes.share_layers=1", "engine.quantization_by_layer=[{quantization: w8a16}]")


def test_negative_layer_numbers_count_from_the_last():
    quantized = scenario("engine.quantization_by_layer=[{layers: [-1, -3, 2], quantization: w4a16}]")
    layers = served_model(quantized.model, quantized.engine).iter_layers()
    assert [index for index, layer in enumerate(layers) if layer.formats] == [2, 29, 31]

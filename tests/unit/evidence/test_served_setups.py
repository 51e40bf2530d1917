"""Published results as setups: names, layouts, and mean steps that say what the simulator says."""

from dataclasses import replace

import pytest

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Observation
from perfmodel.evidence.predict.results import MeanSteps, predict_row
from perfmodel.evidence.sources.local import DeviceTable
from perfmodel.evidence.sources.setups import (
    Setup,
    engine_of,
    layouts,
    quantization_of,
    scenario_of,
    served_device,
    served_model,
)
from perfmodel.sim import simulate
from perfmodel.specs import load_model

LLAMA = Setup(
    device="h100-sxm-80gb",
    device_class="gpu",
    num_devices=1,
    engine="vllm",
    version="0.10.0",
    model="meta-llama/Llama-3.1-8B",
    precision="bf16",
    kv_dtype="auto",
    load="saturated",
    prompt=512,
    answer=128,
    tp=1,
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    is_in_process=True,
)


def steps_of(setup, tmp_path):
    scenario, _ = scenario_of("x", setup, DeviceTable(tmp_path), setup.tp or 1)
    return MeanSteps(setup, scenario)


def test_a_saturated_engine_serves_what_the_simulator_serves(tmp_path):
    """Answers of unequal lengths, which are not computed in waves: those that end while the queue is long."""
    steps = steps_of(replace(LLAMA, is_varied=True), tmp_path)
    scenario = steps.scenario
    traffic = scenario.traffic.model_copy(update={"num_requests": 512})
    requests = simulate(scenario.model_copy(update={"traffic": traffic}), profile=steps.profile).requests
    order = requests.finished_s.argsort()[64:448]
    span = requests.finished_s[order[-1]] - requests.finished_s[order[0]]
    assert steps.saturated() == pytest.approx(requests.num_output_tokens[order].sum() / span, rel=0.12)


def test_one_batch_takes_what_the_simulator_takes(tmp_path):
    setup = replace(LLAMA, load="burst", num_requests=32, concurrency=32)
    steps = steps_of(setup, tmp_path)
    assert steps.is_one_batch
    requests = simulate(steps.scenario, profile=steps.profile).requests
    whole = requests.finished_s.max() - requests.arrival_s.min()
    assert steps.batch(1)["output_tokens_per_s"] == pytest.approx(32 * 128 / whole, rel=0.06)


def test_steps_lengthen_with_the_rate_and_limits_bind(tmp_path):
    setup = replace(LLAMA, load="open", rate=1.0, tpot_limit_s=0.02, ttft_limit_s=2.0)
    steps = steps_of(setup, tmp_path)
    most = steps.rate_at_limits()
    assert steps.open(0.1 * most) < steps.open(most) <= 0.02
    loose = steps_of(replace(setup, tpot_limit_s=0.1), tmp_path).rate_at_limits()
    assert loose >= most
    assert loose <= steps.saturated() / setup.answer * 1.001


def test_a_rate_far_below_what_limits_allow_is_taken_to_be_at_them(tmp_path):
    setup = replace(LLAMA, load="open", rate=1.0, tpot_limit_s=0.02, ttft_limit_s=2.0)
    steps = steps_of(setup, tmp_path)
    most = steps.rate_at_limits()
    assert steps.offered(0.9 * most) == pytest.approx(most)
    assert steps.offered(2.3 * most) == pytest.approx(2 * most)  # capacity is known to within 15 %
    assert steps_of(replace(setup, tpot_limit_s=0.0), tmp_path).offered(1.5) == 1.5


def test_an_error_of_programming_is_no_reason_why_a_row_is_not_covered(tmp_path, monkeypatch):
    def broken(*_):
        raise TypeError("unsupported operand")

    monkeypatch.setattr("perfmodel.evidence.predict.results.MeanSteps", broken)
    with pytest.raises(TypeError):
        predict_row(Observation("a", LLAMA, {"tokens_per_s": 1.0}), tmp_path)


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("vLLM 0.9.0.2.dev108+g71faa1880.d20250730.rocm641, Pytorch 2.7.0", ("vllm", "0.9.0.2")),
        ("TensorRT 10.11, CUDA 12.9", ("trtllm", "10.11")),
        ("SGLang v0.4.9", ("sglang", "0.4.9")),
        ("lemonade llama-server", ("llamacpp", "")),
        ("an engine of tomorrow", ("vllm", "")),
    ],
)
def test_engines_by_what_results_call_them(text, engine):
    assert engine_of(text) == engine


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("llama2-70b-99.9", "llama-2-70b"),
        ("llama3.1-405b", "llama-3.1-405b"),
        ("gptj-99", "gpt-j-6b"),
        ("gptj-99-fp8", "gpt-j-6b"),
        ("deepseek-r1-fp8", "deepseek-r1"),
        ("llama3_1-70b-fp8_dyn", "llama-3.1-70b"),
        ("mixtral-8x7b-99", "mixtral-8x7b"),
        ("deepseek-r1", "deepseek-r1"),
        ("amd/Llama-3.1-405B-Instruct-FP8-KV", "llama-3.1-405b"),
    ],
)
def test_models_by_what_results_call_them(name, card):
    model = served_model(name, "fp8")
    assert model.is_known
    assert model.spec.layers == load_model(card).layers


def test_a_model_without_a_card_is_a_decoder_of_its_size():
    model = served_model("unheard-of-12B-it-AWQ-INT4", "awq-int4")
    assert not model.is_known
    assert model.spec.quantization.weights == "int4"
    mixture = served_model("unheard-of-35B-A3B", "bf16").spec
    assert mixture.layers[0][0].ffn.num_experts > 8
    with pytest.raises(SpecError, match="no card"):
        served_model("unheard-of", "bf16")


@pytest.mark.parametrize(
    ("text", "is_nvidia", "wanted"),
    [
        ("fp4", True, "nvfp4"),
        ("fp4", False, "mxfp4"),
        ("INT8", True, "int8"),
        ("autoround-int4", True, "int4"),
        ("bfp8/bfp4 mixed", True, "fp8"),
        ("not stated", True, None),
        ("fp16", True, None),
    ],
)
def test_number_formats_by_what_results_call_them(text, is_nvidia, wanted):
    assert quantization_of(text, is_nvidia) == wanted


def test_devices_by_less_and_less_of_their_names(tmp_path):
    table = DeviceTable(tmp_path)
    assert served_device(replace(LLAMA, device="h200-sxm-141gb"), table).name == "h200-sxm"
    assert served_device(replace(LLAMA, device="b300-sxm-270gb"), table).name == "b300-sxm"
    gaudi = served_device(replace(LLAMA, device="gaudi-3-128gb", device_class="accelerator"), table)
    assert gaudi.kind == "npu"
    with pytest.raises(SpecError, match="unheard-of"):
        served_device(replace(LLAMA, device="unheard-of"), table)


def test_layouts_are_powers_of_two_within_a_node(tmp_path):
    hardware = served_device(LLAMA, DeviceTable(tmp_path))
    assert layouts(replace(LLAMA, tp=0, num_devices=8), hardware) == [1, 2, 4, 8]
    assert layouts(replace(LLAMA, tp=0, num_devices=6), hardware) == [1, 2, 4]
    assert layouts(replace(LLAMA, tp=0, num_devices=72), hardware) == [1, 2, 4, 8]  # of one node
    assert layouts(LLAMA, hardware) == [1]


def test_what_does_not_fit_is_spread_over_more_devices(tmp_path):
    """405 GB of FP8 weights need five H200 at least (141 GB, nine tenths of them): eight, of powers of two."""
    setup = replace(LLAMA, device="h200-sxm", tp=0, num_devices=8, model="llama-3.1-405b", precision="fp8")
    pair = predict_row(Observation("a", setup, {"tokens_per_s": 1.0}), tmp_path)
    assert pair.scenario.engine.tensor_parallel_size in (4, 8)
    alone = predict_row(Observation("a", replace(setup, num_devices=1), {"tokens_per_s": 1.0}), tmp_path)
    assert "tensor_parallel_size" in alone.reason


def test_what_fits_in_8_bits_only_was_served_so(tmp_path):
    """Weights of 70e9 parameters in 16 bits fill an H200; its result says nothing of 8 bits."""
    setup = replace(LLAMA, device="h200-sxm", model="llama-2-70b", precision="fp16")
    pair = predict_row(Observation("a", setup, {"tokens_per_s": 1.0}), tmp_path)
    assert not pair.reason
    assert pair.scenario.model.quantization.weights == "fp8"

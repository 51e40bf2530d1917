"""Published results as setups: names, layouts, and mean steps that say what the simulator says."""

from dataclasses import replace

import pytest

from perfmodel.cost import Residuals
from perfmodel.cost.calibrations.whole_runs import WholeRunFits
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


def test_a_sequence_has_half_of_its_answer_behind_it_and_takes_a_step_for_each_token_but_the_first(tmp_path):
    """512 tokens of prompt and, on average, 64 of 128 of the answer; 127 steps after the first token."""
    steps = steps_of(replace(LLAMA, beams=4, load="open", rate=1.0), tmp_path)
    latencies = steps.latencies(1.0)
    assert latencies["e2el_mean"] == pytest.approx(latencies["ttft_mean"] + 127 * latencies["tpot_mean"])
    assert steps_of(LLAMA, tmp_path)._context == 512 + 64


OPEN = replace(LLAMA, load="open", num_requests=400, tpot_limit_s=0.02)


def at_rate(rate, tmp_path, **changes):
    """The prediction of a submission at `rate` requests/s."""
    return predict_row(Observation("a", replace(OPEN, rate=rate, **changes), {}), tmp_path)


def capacity(tmp_path):
    """Requests/s."""
    return steps_of(LLAMA, tmp_path).saturated() / LLAMA.answer


def test_a_submission_is_predicted_at_the_rate_that_was_submitted(tmp_path):
    """Far below what the limits allow, steps are as short as they are there, and not as at the limits."""
    slow, fast = (at_rate(share * capacity(tmp_path), tmp_path).metrics["tpot_mean"] for share in (0.2, 0.9))
    assert slow < 0.6 * fast
    alone = steps_of(replace(OPEN, rate=1.0), tmp_path).step_at(0.01)
    assert 1e3 * alone <= slow <= 1.6e3 * alone


def test_mean_steps_at_a_rate_are_what_the_simulator_takes(tmp_path):
    steps = steps_of(replace(OPEN, rate=1.0), tmp_path)
    for share in (0.3, 0.7):
        rate = share * capacity(tmp_path)
        assert 1e3 * steps.step_at(rate) == pytest.approx(at_rate(rate, tmp_path).metrics["tpot_mean"], rel=0.1)


def test_errors_of_the_capacity_widen_intervals_near_it(tmp_path):
    """Both ends hold the prediction; near the capacity they are further apart, and beyond it requests wait."""
    low, near, beyond = (at_rate(share * capacity(tmp_path), tmp_path) for share in (0.2, 0.8, 1.3))
    widths = []
    for pair in (low, near):
        least, most = pair.intervals["tpot_mean"]
        assert least < 1 < most
        widths.append(most / least)
    assert widths[1] > 1.2 * widths[0]
    assert beyond.metrics["ttft_mean"] > 10 * near.metrics["ttft_mean"]


def test_a_layout_keeps_the_limit_at_the_stated_rate(tmp_path):
    """Llama 3.1 8B decodes in some 6 ms on one H100, which serves most; no single device undercuts that."""
    spread = {"tp": 0, "num_devices": 8}
    sizes = [
        at_rate(1.0, tmp_path, tpot_limit_s=limit_s, **spread).scenario.engine.tensor_parallel_size
        for limit_s in (0.05, 0.004)
    ]
    assert sizes[0] == 1
    assert sizes[1] > 1


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


def test_a_format_is_never_rewritten_until_the_setup_fits(tmp_path):
    """Weights of 70e9 parameters in 16 bits fill an H200; whatever was served, it was not what the result says."""
    setup = replace(LLAMA, device="h200-sxm", model="llama-2-70b", precision="fp16")
    pair = predict_row(Observation("a", setup, {"tokens_per_s": 1.0}), tmp_path)
    assert "the weights need 138.0 GB" in pair.reason


def test_a_capacity_that_may_be_lower_lengthens_the_steps_and_one_that_may_be_higher_shortens_them(tmp_path):
    """Of rates of other devices some were 40 % below their prediction and hardly one above it."""
    widths = {"tokens_per_s": Residuals(num_rows=9, p10=-0.5, p50=0.0, p90=0.0)}
    setup = replace(OPEN, rate=0.6 * capacity(tmp_path))
    pair = predict_row(Observation("a", setup, {}), tmp_path, WholeRunFits(widths=widths))
    least, most = pair.intervals["tpot_mean"]
    assert most > 1.5
    assert 0.9 < least < 1

"""Plain PyTorch modules, launched one by one from Python: laws of the steps of `enforce_eager` with unfused kernels."""

import pytest

from perfmodel.cost import OperatorTimer, StepEstimate, estimate_step, host_fit
from perfmodel.cost.calibrations.calibration import EAGER_OPERATOR_S
from perfmodel.cost.calibrations.files import load_calibration
from perfmodel.ops import BatchShape, build_graph, decode_shape
from perfmodel.specs import EngineSpec, list_models, load_hardware, load_model

A100 = load_hardware("a100-sxm-80gb")
TIMERS = {"datasheet": OperatorTimer(A100), "calibrated": OperatorTimer(A100, load_calibration(A100, "perfmodel"))}
PLAIN = {"enforce_eager": True, "fused_kernels": False}


def step(model: str, shape: BatchShape, timer: OperatorTimer = TIMERS["calibrated"], **engine: object) -> StepEstimate:
    spec, each = load_model(model), shape.decode_context // max(shape.num_decodes, 1)
    spans = tuple(shape.num_decodes * min(each, span) for span in spec.attention_spans)
    graph = build_graph(spec, EngineSpec(**engine), sampling="greedy")  # type: ignore[arg-type]
    return estimate_step(graph, timer, shape._replace(decode_windowed=spans))


@pytest.mark.release
@pytest.mark.parametrize("timer", TIMERS.values(), ids=TIMERS)
@pytest.mark.parametrize("model", list_models())
def test_plain_modules_are_never_faster_than_fused_kernels(model, timer):
    for shape in (decode_shape(1, 500), decode_shape(32, 1000), BatchShape(1024, 1, ((1024, 0),))):
        plain, unfused, fused = (step(model, shape, timer, **each) for each in (PLAIN, {"fused_kernels": False}, {}))
        assert plain.duration_s >= unfused.duration_s >= fused.duration_s
        assert plain.hbm_bytes >= unfused.hbm_bytes > fused.hbm_bytes


def test_one_sequence_waits_for_python_and_a_long_prompt_does_not():
    decode, prompt = decode_shape(1, 500), BatchShape(4096, 1, ((4096, 0),))
    one, long = (step("llama-3.1-8b", shape, attention="standard", **PLAIN) for shape in (decode, prompt))
    assert one.hidden_host_s > one.device_s
    assert long.hidden_host_s < long.device_s
    assert one.hidden_host_s == pytest.approx(EAGER_OPERATOR_S * one.num_kernels)


def test_with_graphs_the_host_goes_and_the_bytes_of_operators_stay():
    shape = decode_shape(4, 500)
    graphs, fused = (step("llama-3.1-8b", shape, fused_kernels=each) for each in (False, True))
    assert graphs.hidden_host_s == fused.hidden_host_s == 0
    assert graphs.hbm_bytes > fused.hbm_bytes
    assert graphs.num_kernels > 2 * fused.num_kernels


def test_a_cpu_launches_nothing():
    cpu = load_hardware("cpu")
    timer = OperatorTimer(cpu, load_calibration(A100, "perfmodel"))
    graph = build_graph(load_model("llama-3.1-8b"), EngineSpec(enforce_eager=True, fused_kernels=False))
    assert host_fit(graph, timer).hidden_step_s == 0


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-120b"])
def test_a_cache_that_grows_is_read_and_written_anew(model):
    """Twice the cache beside attention's own reading; a reserved one gets the new token only."""
    shape, longer = decode_shape(2, 1000), decode_shape(2, 2000)

    def growth(**engine: object) -> float:
        short, long = (
            sum(row.count * row.work.kv_bytes for row in step(model, each, **engine).rows) for each in (shape, longer)
        )
        return long - short

    reserved = growth(kv_cache="contiguous", reserve_output=True, **PLAIN)
    assert growth(**PLAIN) == pytest.approx(3 * reserved)
    assert growth(fused_kernels=False) == pytest.approx(reserved)  # graphs hold tensors of one size


def test_layer_norms_are_one_kernel_of_pytorch():
    norms = {
        model: next(row.work for row in step(model, decode_shape(1, 10), **PLAIN).rows if row.name == "final_norm")
        for model in ("opt-13b", "llama-2-13b")
    }
    assert norms["opt-13b"].num_kernels == 1
    assert norms["llama-2-13b"].num_kernels == 8

"""What-ifs on the datasheet's roofline, against closed forms.

With times of max(FLOPs / peak, bytes / bandwidth) + kernels x overhead, a step's time is homogeneous of degree one in
(1 / peaks, 1 / bandwidth, overheads): everything twice as fast takes half the time, so that by Euler's theorem the
elasticities of time to all resources add up to -1.
"""

import pytest

from perfmodel.cost.kernel_models.device import peak_flops_per_s
from perfmodel.planning.axes import axis_of, bound_changes
from perfmodel.planning.points import Point
from perfmodel.planning.typical_step import StepSpec
from perfmodel.planning.whatif import WhatIf, answer
from perfmodel.specs import load_scenario

NAME = "llama-3.1-8b-a100"
DATASHEET = ("engine.profile=datasheet",)


def elasticities(step: StepSpec, *paths: str, more: tuple[str, ...] = ()) -> list[float]:
    base = Point(NAME, ("step_ms",), (*DATASHEET, *more), (), step)
    scenario = load_scenario(NAME, base.overrides)
    axes = tuple(axis_of(f"{path}=0.5x..2x:2", scenario, step) for path in paths)
    found = [each.elasticity for each in answer(WhatIf(base, axes), workers=1).sensitivities]
    assert None not in found
    return [value for value in found if value is not None]


def test_a_memory_bound_decode_step_follows_the_bandwidth_and_not_the_flops():
    step = StepSpec(batch=8, context=1024)
    bandwidth, flops = elasticities(
        step, "hardware.hbm.bandwidth", "hardware.peak_flops", more=("overheads.kernels=0",)
    )
    assert bandwidth == pytest.approx(-1, abs=0.01)
    assert flops == pytest.approx(0, abs=0.01)


def test_a_long_prefill_follows_the_flops():
    step = StepSpec(prefill=8192)
    bandwidth, flops = elasticities(
        step, "hardware.hbm.bandwidth", "hardware.peak_flops", more=("overheads.kernels=0",)
    )
    assert flops < -0.9
    assert bandwidth == pytest.approx(-1 - flops, abs=0.01)


@pytest.mark.parametrize(
    "step", [StepSpec(batch=1, context=512), StepSpec(batch=200, context=256), StepSpec(prefill=700)]
)
def test_elasticities_of_all_resources_add_up_to_minus_one(step: StepSpec):
    """Overheads are times, not rates: theirs counts the other way round."""
    bandwidth, flops, overheads = elasticities(
        step, "hardware.hbm.bandwidth", "hardware.peak_flops", "overheads.kernels"
    )
    assert bandwidth + flops - overheads == pytest.approx(-1, abs=0.005)
    assert overheads > 0


def test_the_batch_at_which_a_matrix_turns_compute_bound_is_the_ridge_points():
    """Y = X W with W of K x N in 2 bytes and B rows takes 2 B K N / peak or (2 K N + 2 B (K + N)) / bandwidth; equal at

        B = K N / (bandwidth K N / peak - (K + N))

    which is the ridge point (153 for an A100) where W is large against X and Y."""
    step = StepSpec(batch=1, context=16)
    base = Point(NAME, ("step_ms",), DATASHEET, (), step)
    scenario = load_scenario(NAME, DATASHEET)
    axis = axis_of("step.batch=1..4096:4", scenario, step)
    found = {change.what: change for change in bound_changes(base, axis, with_operators=True)}
    peak, bandwidth = peak_flops_per_s(scenario.hardware, "bf16"), scenario.hardware.memory_bandwidth
    for name, k, n in (("gate_up_proj", 4096, 2 * 14336), ("down_proj", 14336, 4096), ("qkv_proj", 4096, 6144)):
        closed_form = k * n / (bandwidth * k * n / peak - (k + n))
        assert (found[name].before, found[name].after) == ("memory", "compute")
        assert closed_form <= found[name].at <= closed_form + 1, name
    assert found.get("attention_decode") is None or found["attention_decode"].after != "compute"


@pytest.mark.parametrize(
    ("matrix", "k", "n"),
    [("qkv_proj", 8192, 10240 // 4), ("gate_up_proj", 8192, 2 * 28672 // 4), ("down_proj", 28672 // 4, 8192)],
)
def test_a_quarter_of_a_matrix_turns_compute_bound_later(matrix: str, k: int, n: int):
    """Llama-3.1-70B over four H100 (989 TFLOP/s, 3.35 TB/s: a ridge of 295): the same equation for a quarter of each
    matrix, by hand 348, 313 and 320, where whole ones turn at 308 to 316."""
    name = "llama-3.1-70b-h100-tp4"
    found = _turns(name, "step.batch=1..4096:4")
    by_hand = {"qkv_proj": 348, "gate_up_proj": 313, "down_proj": 320}[matrix]
    assert k * n / (3.35 * k * n / 989 - (k + n)) == pytest.approx(by_hand, abs=2)
    assert found[matrix] == pytest.approx(by_hand, abs=2)


def test_experts_turn_compute_bound_where_each_has_a_ridge_of_tokens_and_carries_its_activations():
    """Qwen3-30B-A3B on an H100: 128 experts of 3 x 2048 x 768 weights, 8 of them for each token.

    FLOPs: 6 x 8 x 2048 x 768 a token. Bytes: 6 x 128 x 2048 x 768 of weights; for each token and expert 2 x (2048 and
    1536 in and out of the first product, 1536 and 768 of the activation, 768 and 2048 of the second, 2048 and 2048 / 8
    to sum up). Without activations the turn would be at 295 x 128 / 8 = 4,724 sequences; with them it is at 15,174."""
    weights, per_token = 6 * 2048 * 768, 8 * 2 * (2048 + 1536 + 1536 + 768 + 768 + 2048 + 2048 + 256)
    by_hand = 128 * weights / (3.35 / 989 * 8 * weights - per_token)
    assert by_hand == pytest.approx(15174, rel=2e-3)
    assert _turns("qwen3-30b-a3b-h100", "step.batch=1..65536:6")["experts"] == pytest.approx(by_hand, rel=2e-3)


def _turns(name: str, axis_text: str) -> dict[str, float]:
    """Where operators turn from memory- to compute-bound on the datasheet."""
    step = StepSpec(batch=1, context=16)
    axis = axis_of(axis_text, load_scenario(name, DATASHEET), step)
    changes = bound_changes(Point(name, ("step_ms",), DATASHEET, (), step), axis, with_operators=True)
    return {change.what: change.at for change in changes if (change.before, change.after) == ("memory", "compute")}


def test_the_rate_at_which_a_matrix_turns_memory_bound_is_found_between_grid_points():
    """The same equation, solved for the bandwidth: peak (K N + B (K + N)) / (B K N)."""
    step = StepSpec(batch=64, context=16)
    base = Point(NAME, ("step_ms",), DATASHEET, (), step)
    scenario = load_scenario(NAME, DATASHEET)
    axis = axis_of("hardware.hbm.bandwidth=0.5x..8x:2", scenario, step)
    changes = {change.what: change for change in bound_changes(base, axis, with_operators=True)}
    peak, bandwidth = peak_flops_per_s(scenario.hardware, "bf16"), scenario.hardware.memory_bandwidth
    k, n, rows = 4096, 2 * 14336, 64
    intensity = rows * k * n / (k * n + rows * (k + n))
    assert changes["gate_up_proj"].at == pytest.approx(peak / bandwidth / intensity, rel=1e-4)
    assert (changes["gate_up_proj"].before, changes["gate_up_proj"].after) == ("memory", "compute")

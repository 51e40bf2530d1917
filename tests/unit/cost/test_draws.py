"""Draws multiply what the cost model says, each factor where it belongs, and grow with what they stand for."""

from math import exp, log

import pytest

from perfmodel.cost import (
    Calibration,
    EngineProfile,
    FamilyFit,
    GraphCostModel,
    HostFit,
    OperatorTimer,
    Residuals,
    StepTables,
)
from perfmodel.cost.calibrations.draws import NUM_SCORES, Draw, LogNormal, Uncertainty
from perfmodel.cost.calibrations.engine_profile import ServerFit
from perfmodel.cost.calibrations.for_all import load_kernel_errors
from perfmodel.cost.steps.host import Host
from perfmodel.ops import BatchShape, build_graph, decode_shape
from perfmodel.specs import load_hardware, load_model

EXACT = Residuals(num_rows=9)
GRAPH = build_graph(load_model("llama-3.1-8b"))
TABLES = StepTables(
    GRAPH,
    OperatorTimer(
        load_hardware("h100-sxm-80gb"), Calibration(device="x", engine="test", default=FamilyFit(residuals=EXACT))
    ),
)
DECODES = BatchShape(32, 32, (), 32, 32_000)
PROMPTS = BatchShape(1032, 33, ((1000, 0),), 32, 32_000)


def draw(step: float = 1.0, prompt: float = 1.0, scores: tuple[float, ...] = (0.0,) * NUM_SCORES) -> Draw:
    return Draw(step, prompt, 1.0, scores, 1.0, False)


def spread_out(width: float) -> Residuals:
    return Residuals(num_rows=9, p10=-width, p90=width)


def test_a_draw_of_ones_changes_nothing() -> None:
    plain, drawn = GraphCostModel(TABLES), GraphCostModel(TABLES, draw())
    for shape in (DECODES, PROMPTS):
        assert drawn.duration_ps(shape) == pytest.approx(plain.duration_ps(shape), rel=1e-9)
    shape = decode_shape(8, 1000)
    run = drawn.run(shape, (), 100)
    assert run.duration(100) == pytest.approx(plain.run(shape, (), 100).duration(100), rel=1e-9)


def test_twice_the_time_of_every_step_is_twice_the_time() -> None:
    plain, drawn = GraphCostModel(TABLES), GraphCostModel(TABLES, draw(step=2.0))
    for shape in (DECODES, PROMPTS):
        assert drawn.duration_ps(shape) == pytest.approx(2 * plain.duration_ps(shape), rel=1e-9)


def test_the_factor_on_prompts_leaves_decodes_alone_and_acts_on_what_prompts_add() -> None:
    plain, drawn = GraphCostModel(TABLES), GraphCostModel(TABLES, draw(prompt=1.5))
    assert drawn.duration_ps(DECODES) == plain.duration_ps(DECODES)
    added = plain.duration_ps(PROMPTS) - plain.duration_ps(DECODES)
    assert drawn.duration_ps(PROMPTS) - plain.duration_ps(PROMPTS) == pytest.approx(
        0.5 * added, rel=0.02
    )  # but for one sample
    cached = BatchShape(33, 33, ((2, 1000),), 31, 31_000)  # all but two tokens of the prompt lie in the cache
    assert drawn.duration_ps(cached) == pytest.approx(plain.duration_ps(cached), rel=0.02)


def test_kernels_of_a_family_move_together_and_the_others_stay() -> None:
    """A step takes longer by what the factor adds to the family's part of it."""
    scores = tuple(float(i == 2) for i in range(NUM_SCORES))  # of matrix multiplications
    fits = {"gemm": FamilyFit(residuals=spread_out(0.5))}
    calibration = Calibration(device="x", engine="test", families=fits, default=FamilyFit(residuals=EXACT))
    tables = StepTables(GRAPH, OperatorTimer(load_hardware("h100-sxm-80gb"), calibration))
    factor = draw(scores=scores).kernel("gemm", fits["gemm"].residuals)
    assert factor > 1
    assert draw(scores=scores).kernel("attention_decode", spread_out(0.5)) == 1
    added = 1e-12 * (
        GraphCostModel(tables, draw(scores=scores)).duration_ps(DECODES) - GraphCostModel(tables).duration_ps(DECODES)
    )
    costs = [tables.cost(group, group.key(DECODES)) for group in tables.groups]
    of_gemm = sum(s for cost in costs for n, s in cost.parts if tables.fits[n][0] == "gemm")
    assert added == pytest.approx((factor - 1) * of_gemm, rel=1e-6)


@pytest.mark.parametrize("spread", [1.0, 1.5, 3.0])
def test_fits_that_have_come_far_are_less_sure_in_proportion(spread: float) -> None:
    calibration = Calibration(device="x", engine="test", spread=spread)
    profile = EngineProfile(engine="test", latency_residuals=spread_out(0.1))
    near, far = (Uncertainty.of(c, profile) for c in (calibration.model_copy(update={"spread": 1.0}), calibration))
    assert (far.step.up, far.step.down) == pytest.approx((spread * near.step.up, spread * near.step.down))
    ones = (1.0,) * NUM_SCORES
    of_near, of_far = (u.draw(ones).kernel("gemm", spread_out(0.2)) for u in (near, far))
    assert log(of_far) == pytest.approx(spread * log(of_near))


def test_loads_at_a_fixed_concurrency_have_residuals_of_their_own() -> None:
    calibration = Calibration(device="x", engine="test")
    profile = EngineProfile(engine="test", latency_residuals=spread_out(0.1), tpot_residuals=spread_out(0.3))
    open_loop, closed_loop = (Uncertainty.of(calibration, profile, closed) for closed in (False, True))
    assert closed_loop.step.up == pytest.approx(3 * open_loop.step.up)


def test_what_ttft_leaves_beyond_tpot_is_the_prompts() -> None:
    """Variances of independent factors add up."""
    calibration = Calibration(device="x", engine="test")
    profile = EngineProfile(engine="test", tpot_residuals=spread_out(0.3), ttft_residuals=spread_out(0.5))
    found = Uncertainty.of(calibration, profile, is_closed_loop=True)
    assert (found.prompt.up, found.prompt.down) == pytest.approx((0.4 / 1.2816, 0.4 / 1.2816), rel=1e-3)
    alike = profile.model_copy(update={"ttft_residuals": spread_out(0.3)})
    assert Uncertainty.of(calibration, alike).prompt == LogNormal()


def test_devices_that_no_run_was_on_are_less_sure() -> None:
    """By what fits left of whole devices; with one device recorded, by twice what they left of its cells."""
    calibration = Calibration(device="x", engine="test")
    near = EngineProfile(engine="test", tpot_residuals=spread_out(0.1), ttft_residuals=spread_out(0.2), devices=("x",))
    known = {"tpot_residuals_elsewhere": spread_out(0.3), "ttft_residuals_elsewhere": spread_out(0.5)}
    far = near.model_copy(update={"devices": ("y", "z")} | known)
    one = near.model_copy(update={"devices": ("y",)})
    ups = [Uncertainty.of(calibration, profile, True).step.up for profile in (near, one, far)]
    assert ups == pytest.approx([ups[0], 2 * ups[0], 3 * ups[0]])
    assert Uncertainty.of(calibration, near.model_copy(update=known), True).step.up == ups[0]


def test_prompts_on_engines_of_their_own_are_less_sure() -> None:
    """In proportion; steps are as sure as before."""
    calibration = Calibration(device="x", engine="test")
    profile = EngineProfile(engine="test", tpot_residuals=spread_out(0.3), ttft_residuals=spread_out(0.5))
    beside, apart = (Uncertainty.of(calibration, profile, True, alone) for alone in (False, True))
    assert apart.prompt.up / beside.prompt.up == pytest.approx(apart.prompt.down / beside.prompt.down)
    assert apart.prompt.up > beside.prompt.up
    assert apart.step == beside.step


def test_a_datasheet_is_expected_to_be_too_fast() -> None:
    calibration = Calibration(device="x", engine="datasheet", origin="datasheet")
    middle = Uncertainty.of(calibration, EngineProfile(engine="datasheet")).draw((0.0,) * NUM_SCORES)
    assert 1 < middle.step * middle.kernel("gemm", Residuals()) < middle.prompt


def test_a_front_end_is_slower_in_all_it_does() -> None:
    server = ServerFit(in_s=1e-3, out_s=2e-3, out_per_sequence_s=1e-5)
    slower = Draw(1.0, 1.0, exp(0.5), (0.0,) * NUM_SCORES, 1.0, False).of_server(server)
    assert (slower.in_s, slower.out_s) == pytest.approx((exp(0.5) * 1e-3, exp(0.5) * 2e-3))
    assert Draw(1.0, 1.0, 99.0, (), 1.0, False).of_server(ServerFit(in_s=0.09)).in_s > 1


def test_drawn_percentiles_match_the_residuals_around_their_median() -> None:
    """A score of 1.2816 is the 90th percentile. The fit already includes the median, so kernels draw around it."""
    skewed = Residuals(num_rows=9, p10=-0.4, p50=0.1, p90=0.3)
    for score, end in ((1.2816, 0.3), (-1.2816, -0.4), (0.0, 0.1)):
        assert log(LogNormal.of(skewed).at(score)) == pytest.approx(end)
        common = load_kernel_errors().of("gemm")
        factor = draw(scores=(score,) * NUM_SCORES).kernel("gemm", skewed)
        assert log(factor) == pytest.approx(common * (end - 0.1))


def test_removing_an_independent_error_component() -> None:
    """5 = sqrt(3^2 + 4^2), 13 = sqrt(5^2 + 12^2); centres add up."""
    left = LogNormal(0.3, 0.05, 0.13).beyond(LogNormal(0.1, 0.03, 0.05))
    assert left == pytest.approx((0.2, 0.04, 0.12))
    assert LogNormal(0.0, 0.05, 0.05).beyond(LogNormal(0.0, 0.06, 0.06)) == (0.0, 0.0, 0.0)


def test_host_factors_apply_to_seconds_and_ticks_alike() -> None:
    """2 ms per step and 5 ms more with a prompt: a step factor of 2 on both, a prompt factor of 1.5 on the 5 ms."""
    host = HostFit(serial_step_s=2e-3, prompt_step_s=5e-3, captured_tokens=512)
    timer = OperatorTimer(load_hardware("h100-sxm-80gb"), Calibration(device="x", engine="test", host=host))
    drawn = Host(GRAPH, timer, draw(step=2.0, prompt=1.5))
    for shape, serial_s in ((DECODES, 4e-3), (PROMPTS, 4e-3 + 15e-3)):
        assert drawn.seconds(shape)[0] == pytest.approx(serial_s)
        assert drawn.ticks(shape)[0] == pytest.approx(serial_s * 1e12)

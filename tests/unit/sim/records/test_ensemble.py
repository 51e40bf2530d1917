"""Prediction intervals: widths that can be worked out by hand, and coverage of runs whose truth is known."""

from math import exp, log
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfmodel.cost import Calibration, EngineProfile, FamilyFit, Residuals, ServerFit
from perfmodel.cost.calibrations.draws import NUM_SCORES
from perfmodel.cost.calibrations.for_all import load_kernel_errors
from perfmodel.sim import simulate
from perfmodel.sim.records.ensemble import Ensemble, _backlog_s, design, interval_of, mean_latencies
from perfmodel.specs import Scenario, load_scenario

CLOSED = ("traffic.arrivals={process: closed_loop, concurrency: 8}", "traffic.num_requests=32")
OPEN = ("traffic.num_requests=120", "traffic.arrivals.rate=8")
METRICS = ("ttft", "tpot", "itl", "e2el")
SIGMA = 0.1


def scenario(*overrides: str) -> Scenario:
    return load_scenario("llama-3.1-8b-h100-2048-256", list(overrides))


def residuals(sigma: float) -> Residuals:
    return Residuals(num_rows=100, p10=-1.2816 * sigma, p90=1.2816 * sigma)


def calibration(kernels: float = 0.0, spread: float = 1.0) -> Calibration:
    fit = FamilyFit(compute_fraction=0.6, memory_fraction=0.8, overhead_s=4e-6, residuals=residuals(kernels))
    return Calibration(device="h100-sxm-80gb", engine="test", default=fit, spread=spread)


def profile(steps: float = 0.0, prompts: float = 0.0, server: ServerFit | None = None) -> EngineProfile:
    return EngineProfile(
        engine="test",
        server=server or ServerFit(),
        latency_residuals=residuals(steps),
        tpot_residuals=residuals(steps),
        ttft_residuals=residuals(np.hypot(steps, prompts)),
    )


def ends(found: Scenario, fits: Calibration, engine: EngineProfile) -> dict[str, tuple[float, float]]:
    """Logarithms of the intervals' ends over the means."""
    summary = simulate(found, calibration=fits, profile=engine, intervals=True).summary
    pairs = {metric: summary["interval"][f"mean_{metric}_ms"] for metric in METRICS}
    return {
        m: (log(low / summary[f"mean_{m}_ms"]), log(high / summary[f"mean_{m}_ms"])) for m, (low, high) in pairs.items()
    }


def test_no_residuals_no_width() -> None:
    for low, high in ends(scenario(*OPEN), calibration(), profile()).values():
        assert (low, high) == pytest.approx((0.0, 0.0), abs=1e-6)


@pytest.mark.parametrize("spread", [1.0, 2.0])
def test_a_closed_loop_without_think_time_takes_as_many_times_as_long_as_its_steps(spread: float) -> None:
    """Every time is a multiple of the step's factor, so the interval is the factor's: exp(+- 1.2816 spread sigma)."""
    for low, high in ends(scenario(*CLOSED), calibration(spread=spread), profile(SIGMA)).values():
        assert (low, high) == pytest.approx((-1.2816 * spread * SIGMA, 1.2816 * spread * SIGMA), rel=1e-3)


@pytest.mark.parametrize("iterations", [1, 3])
def test_so_do_iterations_of_rollouts(iterations: int) -> None:
    rollouts = f"traffic.rollouts={{iterations: {iterations}}}"
    burst = ("traffic.arrivals={process: burst}", "traffic.num_requests=32", rollouts)
    for low, high in ends(scenario(*burst), calibration(), profile(SIGMA)).values():
        assert (low, high) == pytest.approx((-1.2816 * SIGMA, 1.2816 * SIGMA), rel=1e-3)


def test_a_draw_of_conversations_has_all_users_at_once() -> None:
    """Eight users, of conversations of six turns: a draw of 1.5 turns each would have two users, and no queue."""
    talk = "traffic.conversations={turns: {distribution: fixed, value: 6}}"
    lengths = [f"traffic.{name}={{distribution: fixed, value: 50}}" for name in ("input_tokens", "output_tokens")]
    found = scenario(*CLOSED, talk, *lengths, "traffic.num_requests=96", "engine.max_num_seqs=2")
    ensemble = simulate(found, intervals=True).ensemble
    assert isinstance(ensemble, Ensemble)
    assert np.isclose(ensemble.base.e2el_s.mean(), ensemble.whole.e2el_s.mean(), rtol=0.15)


def test_prompts_are_in_doubt_where_there_are_any() -> None:
    """A factor on prompts alone moves TTFT most, TPOT by the steps that prompts share with decodes."""
    found = ends(scenario(*OPEN, "traffic.arrivals.rate=1"), calibration(), profile(prompts=0.3))
    assert found["ttft"][1] == pytest.approx(1.2816 * 0.3, rel=0.35)
    assert found["tpot"][1] < 0.5 * found["ttft"][1]


def test_cached_prompts_leave_only_the_front_end_in_doubt() -> None:
    cached = "traffic.prefix={num_groups: 1, shared_tokens: 1024, num_prompts_per_group: 1}"
    fresh = ends(scenario(*OPEN), calibration(), profile(prompts=0.3))["ttft"]
    warm = ends(scenario(*OPEN, cached), calibration(), profile(prompts=0.3))["ttft"]
    assert warm[1] < 0.25 * fresh[1]
    behind_server = profile(server=ServerFit(in_s=0.05))
    found = ends(scenario(*OPEN), calibration(), behind_server)
    assert found["ttft"][1] > 0.1
    assert found["tpot"][1] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("kernels", [0.1, 0.4])
def test_intervals_widen_with_the_distance_that_fits_have_come(kernels: float) -> None:
    widths = [
        {m: high - low for m, (low, high) in ends(scenario(*OPEN), calibration(kernels, spread), profile()).items()}
        for spread in (1.0, 1.5, 2.5)
    ]
    for metric in METRICS:
        assert widths[0][metric] < widths[1][metric] < widths[2][metric]


def test_saturation_is_wide_upward_and_finite() -> None:
    """Near the capacity a device that is slower by a tenth has a queue without end."""
    near = scenario("traffic.num_requests=1000", "traffic.arrivals.rate=4.6", "engine.max_num_seqs=16")
    low, high = ends(near, calibration(), profile(SIGMA))["ttft"]
    assert high > -low
    assert high > 5 * 1.2816 * SIGMA
    assert np.isfinite([low, high]).all()


def test_the_datasheet_has_an_interval_that_says_it_is_optimistic() -> None:
    found = simulate(scenario(*OPEN, "engine.profile=datasheet"), intervals=True).summary
    low, high = found["interval"]["mean_tpot_ms"]
    assert found["origin"] == "datasheet"
    assert low <= found["mean_tpot_ms"] < high
    assert high / found["mean_tpot_ms"] > found["mean_tpot_ms"] / low


def test_an_ensemble_changes_nothing_else_and_is_the_same_again() -> None:
    one, again = (simulate(scenario(*OPEN), intervals=True).summary for _ in range(2))
    plain = simulate(scenario(*OPEN)).summary
    assert one == again
    assert plain == one | {"interval": {}}


def test_draws_are_orthogonal_and_no_draw_is_extreme() -> None:
    """So sums over scores get their variance exactly; all factors on one side are not among the draws."""
    draws = np.array(design())
    assert np.array_equal(draws.T @ draws, len(draws) * np.eye(NUM_SCORES))
    assert np.abs(draws.sum(axis=1)).max() < NUM_SCORES


def test_the_interval_covers_four_in_five_of_runs_whose_truth_is_drawn() -> None:
    """'Measured' runs of a device whose kernels and steps differ from the fits by as much as the residuals say.

    The truth is another calibration, not a draw: achieved fractions and launches of each family, and a factor on all.
    Of 40 independent runs, 32 are expected; 26 to 38 is more than two standard deviations either way.
    """
    kernels, steps = 0.5, 0.06
    families = {name: calibration(kernels).default for name in ("gemm", "attention_decode", "attention_prefill")}
    fits = calibration().model_copy(update={"families": families})
    traffic = scenario("traffic.num_requests=60", "traffic.arrivals.rate=6")
    summary = simulate(traffic, calibration=fits, profile=profile(steps), intervals=True).summary
    rng, common = np.random.default_rng(7), load_kernel_errors()
    covered = dict.fromkeys(METRICS, 0)
    for _ in range(40):
        whole = rng.normal(0, steps)
        truth = {name: slowed(fit, rng.normal(0, common.of(name) * kernels) + whole) for name, fit in families.items()}
        other = fits.model_copy(update={"families": truth, "default": slowed(fits.default, whole)})
        measured = simulate(traffic, calibration=other, profile=profile()).summary
        for metric in METRICS:
            low, high = summary["interval"][f"mean_{metric}_ms"]
            covered[metric] += low <= measured[f"mean_{metric}_ms"] <= high
    assert all(26 <= count <= 38 for count in covered.values()), covered


def slowed(fit: FamilyFit, log_factor: float) -> FamilyFit:
    """`fit` with every time exp(log_factor) times as long."""
    factor = exp(log_factor)
    update = {"compute_fraction": fit.compute_fraction / factor, "memory_fraction": fit.memory_fraction / factor}
    return fit.model_copy(update=update | {"overhead_s": fit.overhead_s * factor})


def test_the_shortened_run_of_a_short_run_is_that_run() -> None:
    """Simulating it again without factors would give the same requests, so it is not done."""
    found = simulate(scenario("traffic.num_requests=40"), intervals=True).ensemble
    assert found is not None
    again = simulate(scenario("traffic.num_requests=40")).requests
    assert again is not None
    assert found.base is found.whole
    assert found.base.finished_s.tolist() == again.finished_s.tolist()


@pytest.mark.parametrize(("spare_s", "grows"), [(-0.5, True), (0.5, False)])
def test_a_queue_that_grows_waits_longer_in_a_longer_run_by_as_much_as_it_grows(spare_s: float, grows: bool) -> None:
    """A request each second to a server that needs half a second more, or less: the n-th waits n / 2 s, or not at all.
    In a run of three times as many the mean wait is three times as long; what is extrapolated is the other two."""
    arrival = np.arange(600.0)
    waits = arrival / 2 if grows else np.zeros(600)
    assert _backlog_s(arrival, arrival + waits, 1.0) == 0.0
    expected = 2 * waits.mean() if grows else 0.0
    assert _backlog_s(arrival, arrival + waits, 3.0) == pytest.approx(expected, rel=0.01)


def test_latencies_are_weighted_by_request_and_itl_by_the_number_of_gaps() -> None:
    """Requests of one token, of 5 (4 gaps of 0.5 s) and of 3 (2 gaps of 2 s); the last has a weight of three."""
    columns: Any = SimpleNamespace(
        num_output_tokens=np.array([1, 5, 3]), ttft_s=np.array([1.0, 2.0, 4.0]), e2el_s=np.array([1.0, 4.0, 8.0])
    )
    means = mean_latencies(columns, np.array([1.0, 1.0, 3.0]))
    assert means["ttft"] == pytest.approx((1 + 2 + 3 * 4) / 5)
    assert means["e2el"] == pytest.approx((1 + 4 + 3 * 8) / 5)
    assert means["tpot"] == pytest.approx((0.5 + 3 * 2) / 4)
    assert means["itl"] == pytest.approx((4 * 0.5 + 3 * 2 * 2) / (4 + 3 * 2))


def test_an_interval_covers_eighty_per_cent_and_contains_the_prediction() -> None:
    low, high = interval_of(np.array([[0.1, -0.1]] * 8))
    assert NormalDist().cdf(log(high) / 0.1) - NormalDist().cdf(log(low) / 0.1) == pytest.approx(0.8, abs=1e-3)
    assert interval_of(np.array([[0.8, 0.6]] * 8))[0] == 1.0
    assert interval_of(np.array([[-0.8, -0.6]] * 8))[1] == 1.0


def test_requests_of_a_shortened_run_stand_for_all_of_the_long_one() -> None:
    """Early requests count once, the others for all the rest: weights add up to the requests of the long run."""
    ensemble = simulate(scenario("traffic.num_requests=700", "traffic.arrivals.rate=8"), intervals=True).ensemble
    assert isinstance(ensemble, Ensemble)
    assert 0 < ensemble.num_early < len(ensemble.base) < 700
    num_late = len(ensemble.base) - ensemble.num_early
    assert ensemble.num_early + ensemble.rest_weight * num_late == pytest.approx(700)

"""Prediction intervals of clusters whose replicas come and go: closed forms, and eight whole runs beside two."""

from math import exp, log

import numpy as np
import pytest

from perfmodel.cost import Calibration, EngineProfile, FamilyFit, Residuals, ServerFit
from perfmodel.cost.calibrations.for_all import load_kernel_errors
from perfmodel.sim import simulate
from perfmodel.sim.records.ensemble import MOST, Ensemble
from perfmodel.sim.records.result import RunResult
from perfmodel.sim.records.whole_runs import WholeRuns, _settled
from perfmodel.specs import Scenario, load_scenario

Z80 = 1.2816
SIGMA = 0.1
IDLE = "autoscaling: {target: 10000, min_replicas: 2, max_replicas: 4, scale_down_delay_s: 100000}"
CLOSED = "traffic.arrivals={process: closed_loop, concurrency: 8}"
# One request at a time, of one token: a server with a constant service time.
ONE_BY_ONE = (
    "engine.max_num_seqs=1",
    "engine.async_scheduling=false",
    "engine.max_num_batched_tokens=4096",
    "traffic.input_tokens={distribution: fixed, value: 2048}",
    "traffic.output_tokens={distribution: fixed, value: 1}",
)


def scenario(*overrides: str) -> Scenario:
    return load_scenario("llama-3.1-8b-h100-2048-256", list(overrides))


def residuals(sigma: float) -> Residuals:
    return Residuals(num_rows=100, p10=-Z80 * sigma, p90=Z80 * sigma)


def calibration(kernels: float = 0.0) -> Calibration:
    fit = FamilyFit(compute_fraction=0.6, memory_fraction=0.8, overhead_s=4e-6, residuals=residuals(kernels))
    return Calibration(device="h100-sxm-80gb", engine="test", default=fit)


def profile(steps: float) -> EngineProfile:
    left = residuals(steps)
    return EngineProfile(
        engine="test", server=ServerFit(), latency_residuals=left, tpot_residuals=left, ttft_residuals=left
    )


def run(found: Scenario, steps: float = SIGMA, kernels: float = 0.0) -> RunResult:
    """Simulated with residuals of known size of steps and of kernels, and of nothing else."""
    return simulate(found, calibration=calibration(kernels), profile=profile(steps), intervals=True)


def ends(result: RunResult, metric: str) -> tuple[float, float]:
    """Logarithms of the interval's ends over the mean."""
    assert result.ensemble is not None
    low, high = result.ensemble.factors()[metric]
    return log(low), log(high)


@pytest.mark.parametrize(
    "cluster",
    [
        f"cluster={{{IDLE}, replicas: 2}}",
        "cluster={replicas: 2, failures: {events: [{at_s: 100000}]}}",
        "cluster={pools: [{share: 0.5}, {share: 0.5}]}",
        f"cluster={{pools: [{{share: 0.5, replicas: 2, {IDLE}}}, {{share: 0.5}}]}}",
    ],
)
@pytest.mark.parametrize("count", [32, 400])
@pytest.mark.parametrize("sigma", [0.05, 0.2])
def test_a_closed_loop_takes_as_many_times_as_long_as_its_steps(cluster: str, count: int, sigma: float) -> None:
    """Whatever the cluster might do and does not: every time is a multiple of the step's factor."""
    result = run(scenario(cluster, CLOSED, f"traffic.num_requests={count}"), sigma)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert ends(result, metric) == pytest.approx((-Z80 * sigma, Z80 * sigma), rel=2e-3)


def test_an_idle_autoscaler_leaves_the_interval_of_the_fleet_that_stays() -> None:
    few = ("traffic.num_requests=150", "traffic.arrivals.rate=8")
    elastic = run(scenario(f"cluster={{{IDLE}, replicas: 2}}", *few))
    constant = run(scenario("cluster={replicas: 2}", *few))
    assert elastic.summary["interval"] == constant.summary["interval"]
    assert elastic.summary["interval"]


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_md1_queues_behind_an_idle_autoscaler(load: float) -> None:
    """Random splitting makes each replica M/D/1: T(x) = D e^x + r D e^x / (2 (1 - r)), r = load e^x (Pollaczek and
    Khinchine). The interval's ends are those of T at one standard deviation, 1.2816 times as far."""
    base = (*ONE_BY_ONE, "cluster={router: random, replicas: 2, " + IDLE + "}", "traffic.num_requests=3000")
    alone = run(scenario(*ONE_BY_ONE, "traffic.arrivals.rate=0.001", "traffic.num_requests=3"))
    service_s = alone.summary["mean_e2el_ms"] / 1e3
    result = run(scenario(*base, f"traffic.arrivals.rate={2 * load / service_s}"))
    assert isinstance(result.ensemble, WholeRuns)

    def sojourn(x: float) -> float:
        return exp(x) * (1 + load * exp(x) / (2 * (1 - load * exp(x))))

    logs = [log(sojourn(x) / sojourn(0)) for x in (SIGMA, -SIGMA)]
    centre = sum(logs) / 2
    expected = centre + Z80 * (logs[1] - centre), centre + Z80 * (logs[0] - centre)
    assert ends(result, "e2el") == pytest.approx(expected, rel=0.08)


def test_what_steps_do_not_decide_is_not_in_doubt() -> None:
    """Requests that wait for a cold start of 30 s: 30 s + s e^x, whatever is in doubt about s."""
    one = (*ONE_BY_ONE, "traffic.num_requests=5", "traffic.arrivals={process: constant, rate: 0.005}")
    asleep = "{target: 1, min_replicas: 0, max_replicas: 1, cold_start_s: 30, interval_s: 5, scale_down_delay_s: 10}"
    result = run(scenario(*one, f"cluster={{replicas: 0, autoscaling: {asleep}}}"), 0.2)
    total_s = result.summary["mean_ttft_ms"] / 1e3
    assert total_s > 30
    expected = [log((30 + (total_s - 30) * exp(x)) / total_s) * Z80 for x in (-0.2, 0.2)]
    low, high = ends(result, "ttft")
    assert high == pytest.approx(expected[1], rel=0.05)
    assert low == pytest.approx(expected[0], rel=0.05)


@pytest.mark.release
def test_two_lives_are_as_wide_as_eight() -> None:
    """With kernels and steps in doubt, behind an autoscaler that follows a load which rises and falls."""
    stages = (
        "traffic.arrivals.stages=[{rate: 4, duration_s: 20}, {rate: 24, duration_s: 30}, {rate: 4, duration_s: 20}]"
    )
    scaling = "{target: 12, min_replicas: 1, max_replicas: 6, cold_start_s: 5, interval_s: 5, scale_down_delay_s: 10}"
    result = run(scenario(stages, f"cluster={{autoscaling: {scaling}}}"), 0.06, 0.3)
    assert isinstance(result.ensemble, WholeRuns)
    assert len(result.ensemble.whole) > MOST
    assert np.linalg.norm(result.ensemble.direction) == pytest.approx(1)
    eight = whole_lives(result, 0.06, 0.3)
    for metric in ("tpot", "e2el"):
        low, high = ends(result, metric)
        there = [log(end) for end in eight.factors()[metric]]
        assert high - low == pytest.approx(there[1] - there[0], rel=0.25)


def whole_lives(result: RunResult, steps: float, kernels: float) -> Ensemble:
    """The ensemble of eight whole runs, none of them shortened."""
    from perfmodel.sim.records import whole_runs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_runs, "MOST", 10**9)
        found = run(result.scenario, steps, kernels).ensemble
    assert isinstance(found, Ensemble)
    return found


@pytest.mark.release
def test_the_interval_covers_four_in_five_of_lives_whose_truth_is_drawn() -> None:
    """'Measured' runs of devices that differ from the fits by as much as the residuals say: their own kernels and
    steps, and so their own starts and stops of replicas. Of 30, 24 are expected; 18 to 29 is 2.5 deviations."""
    steps, kernels = 0.06, 0.4
    stages = (
        "traffic.arrivals.stages=[{rate: 4, duration_s: 10}, {rate: 24, duration_s: 15}, {rate: 4, duration_s: 10}]"
    )
    scaling = "{target: 12, min_replicas: 1, max_replicas: 6, cold_start_s: 5, interval_s: 5, scale_down_delay_s: 10}"
    found = scenario(stages, f"cluster={{autoscaling: {scaling}}}")
    families = {name: calibration(kernels).default for name in ("gemm", "attention_decode", "attention_prefill")}
    fits = calibration().model_copy(update={"families": families})
    engine = profile(steps)
    predicted = simulate(found, calibration=fits, profile=engine, intervals=True)
    assert isinstance(predicted.ensemble, WholeRuns)
    rng, common = np.random.default_rng(11), load_kernel_errors()
    covered = dict.fromkeys(("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"), 0)
    for _ in range(30):
        whole = rng.normal(0, steps)
        truth = {name: slowed(fit, rng.normal(0, common.of(name) * kernels) + whole) for name, fit in families.items()}
        other = fits.model_copy(update={"families": truth, "default": slowed(fits.default, whole)})
        measured = simulate(found, calibration=other, profile=profile(0.0), keep_steps=False).summary
        for metric in covered:
            low, high = predicted.summary["interval"][metric]
            covered[metric] += low <= measured[metric] <= high
    assert all(18 <= count <= 29 for count in covered.values()), covered


def slowed(fit: FamilyFit, log_factor: float) -> FamilyFit:
    """`fit` with every time exp(log_factor) times as long."""
    factor = exp(log_factor)
    update = {"compute_fraction": fit.compute_fraction / factor, "memory_fraction": fit.memory_fraction / factor}
    return fit.model_copy(update=update | {"overhead_s": fit.overhead_s * factor})


def test_intervals_change_nothing_else() -> None:
    found = scenario(f"cluster={{{IDLE}, replicas: 2}}", "traffic.num_requests=300", "traffic.arrivals.rate=8")
    plain = simulate(found).summary
    with_intervals = simulate(found, intervals=True).summary
    assert with_intervals["interval"].keys() >= {"mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms"}
    assert plain == with_intervals | {"interval": {}}


def test_a_life_too_long_to_be_lived_twice_more_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.sim.driver._MAX_REPEATED", 50)
    elastic = scenario("traffic.num_requests=60", f"cluster={{replicas: 2, {IDLE}}}")
    result = simulate(elastic, intervals=True)
    assert result.ensemble is None
    assert "interval" not in result.summary or not result.summary["interval"]
    assert any(note.startswith("No intervals") for note in result.notes)
    assert not any("No intervals" in note for note in simulate(elastic).notes)


def test_the_twin_has_pools_of_their_average_sizes() -> None:
    """Of three pools the first had 3 replicas on average; the others stay as they are. Nothing scales or fails."""
    scales = "autoscaling: {target: 4, max_replicas: 5}"
    pools = f"[{{share: 0.4, {scales}}}, {{share: 0.3, replicas: 2, {scales}}}, {{share: 0.3}}]"
    found = scenario(f"cluster={{failures: {{events: [{{at_s: 5}}]}}, pools: {pools}}}")
    twin = _settled(found, {0: 3}).cluster
    assert [pool.replicas for pool in twin.pools] == [3, 2, 1]
    assert [pool.autoscaling for pool in twin.pools] == [None] * 3
    assert twin.failures is None
    alone = _settled(scenario(f"cluster={{replicas: 1, {scales}}}"), {0: 4}).cluster
    assert (alone.replicas, alone.autoscaling) == (4, None)


def test_the_twin_of_a_slice_has_its_share_of_the_whole_cluster() -> None:
    """One of two slices of 4 replicas serves its traffic, and has its intervals, as a cluster of 2 replicas."""
    scaling = "autoscaling: {{target: 10000, min_replicas: {0}, max_replicas: {0}}}, replicas: {0}"
    loaded = ("traffic.num_requests=300", "traffic.arrivals.rate=16")
    twins = []
    for num_replicas, one_of in ((4, 2), (2, 1)):
        cluster = f"cluster={{{scaling.format(num_replicas)}}}"
        result = simulate(scenario(cluster, *loaded), intervals=True, one_of=one_of)
        assert isinstance(result.ensemble, WholeRuns)
        twins.append(result.ensemble.twin.base.e2el_s.tolist())
    assert twins[0] == twins[1]

"""Replicas that come and go: failures, autoscaling, traffic split between models, shadows."""

import pytest

from perfmodel.errors import SpecError, WorkloadError
from perfmodel.sim.driver import simulate
from perfmodel.sim.fleet import autoscalers, dynamic
from perfmodel.sim.records.result import RunResult
from perfmodel.specs import load_scenario

BASE = "llama-3.1-8b-h100-2048-256"
SHORT = ("traffic.num_requests=400", "traffic.input_tokens={distribution: fixed, value: 500}")


def run(*settings: str) -> RunResult:
    return simulate(load_scenario(BASE, (*SHORT, *settings)))


def ends(result: RunResult) -> dict[str, int]:
    return {name: result.summary[name] for name in ("completed", "failed", "timed_out")}


def test_a_gateway_that_limits_nothing_changes_nothing() -> None:
    plain, handle_errors = run("cluster.replicas=2").summary, run("cluster.replicas=2", "cluster.gateway={}").summary
    assert handle_errors == plain


def test_what_a_failed_replica_had_fails_and_retries_save_it() -> None:
    """Dead from 10 s to 25 s: requests that it had then are lost, once; later ones go to the other replica."""
    failure = "cluster.failures={events: [{at_s: 10, replica: 0, down_s: 10}], start_s: 5}"
    lost = run("cluster.replicas=2", "traffic.arrivals.rate=10", failure)
    assert sum(ends(lost).values()) == 400
    assert 0 < lost.summary["failed"] < 60
    assert lost.summary["pools"][0]["failures"] == lost.summary["pools"][0]["starts"] == 1
    requests = lost.requests
    assert requests is not None
    during = (requests.arrival_s > 10) & (requests.arrival_s < 25)
    assert set(requests.replica[during]) == {1}
    assert set(requests.replica[requests.arrival_s > 25]) == {0, 1}
    used = 2 * lost.summary["duration"] - 10  # seconds; while it is repaired nobody pays for it
    assert lost.summary["gpu_hours"] == pytest.approx(used / 3600)
    retried = run("cluster.replicas=2", "traffic.arrivals.rate=10", failure, "cluster.gateway={retries: {}}")
    assert ends(retried) == {"completed": 400, "failed": 0, "timed_out": 0}
    assert retried.summary["retries"] == lost.summary["failed"]


def test_requests_wait_at_the_gateway_while_no_replica_is_up() -> None:
    failure = "cluster.failures={events: [{at_s: 20, down_s: 30}], start_s: 5}"
    result = run("cluster.replicas=1", failure, "cluster.gateway={retries: {backoff_s: 0}}")
    assert ends(result)["completed"] == 400
    requests = result.requests
    assert requests is not None
    during = (requests.arrival_s > 20) & (requests.arrival_s < 55)
    assert during.any()
    assert (requests.first_scheduled_s[during] >= 55).all()


def test_availability_is_what_mtbf_and_repair_make_it() -> None:
    """Alternating renewal: up mtbf / (mtbf + repair + start) of the time; paid for while up or starting."""
    result = run(
        "cluster.replicas=40",
        "traffic.num_requests=2000",
        "traffic.arrivals.rate=5",
        "cluster.failures={mtbf_s: 50, repair_s: 30, start_s: 20}",
        "cluster.gateway={retries: {max: 10, backoff_s: 0}}",
    )
    assert ends(result)["completed"] == 2000
    paid = result.summary["gpu_hours"] * 3600 / result.summary["duration"] / 40
    assert paid == pytest.approx((50 + 20) / (50 + 20 + 30), rel=0.05)


def test_until_a_failure_is_noticed_requests_are_sent_to_the_dead_replica_and_wait() -> None:
    """Dead at 10 s, noticed at 14: every other request in between waits until then, and is sent again."""
    failure = "cluster.failures={events: [{at_s: 10, replica: 0, down_s: 30}], detection_s: 4}"
    result = run("cluster.replicas=2", "traffic.arrivals.rate=10", failure, "cluster.gateway={retries: {backoff_s: 0}}")
    assert ends(result) == {"completed": 400, "failed": 0, "timed_out": 0}
    requests = result.requests
    assert requests is not None
    during = (requests.arrival_s > 10) & (requests.arrival_s < 14)
    waited = requests.first_token_s[during] > 14
    assert waited.mean() == pytest.approx(0.5, abs=0.02)
    assert (requests.ttft_s[during][~waited] < 0.5).all()
    assert requests.replica[requests.finished_s > 10][:20].tolist() == [1] * 20


def test_requests_are_lost_to_replicas_that_are_dead_and_not_known_to_be() -> None:
    """Of the replicas that a router knows, detection / (mtbf + detection) are dead: so many requests are lost at
    random, but for those that a replica had when it died, an answer's time / mtbf."""
    result = run(
        "cluster.replicas=20",
        "cluster.router=random",
        "engine.num_gpu_blocks_override=1000",
        "traffic.num_requests=15000",
        "traffic.arrivals.rate=10",
        "traffic.output_tokens={distribution: fixed, value: 2}",
        "cluster.failures={mtbf_s: 5, repair_s: 3, start_s: 1, detection_s: 2.5}",
    )
    assert result.summary["failed"] / 15_000 == pytest.approx(2.5 / (5 + 2.5), rel=0.03)


@pytest.mark.parametrize("engine", ["max_num_seqs=64", "pipeline_parallel_size=2", "data_parallel_size=2"])
def test_a_replica_that_is_slower_by_a_factor_stretches_time_by_it(engine: str) -> None:
    """With requests as much rarer as steps are longer all latencies are as much longer, to a tick a step."""
    constant = ("traffic.arrivals.process=constant", "engine.profile=datasheet", f"engine.{engine}")
    slow = "cluster.failures={slowdowns: [{factor: 2}]}"
    stretched = run(*constant, "traffic.arrivals.rate=10", slow).requests
    plain = run(*constant, "traffic.arrivals.rate=20").requests
    assert stretched is not None
    assert plain is not None
    assert (stretched.request_id == plain.request_id).all()
    for name in ("ttft_s", "e2el_s"):
        assert getattr(stretched, name) == pytest.approx(2 * getattr(plain, name), rel=1e-9)


def test_a_straggler_is_slow_for_its_time_only_and_a_router_that_looks_avoids_it() -> None:
    """From 10 s to 20 s the first of two replicas is four times slower."""
    slow = "cluster.failures={slowdowns: [{factor: 4, at_s: 10, for_s: 10}]}"
    tpot, share = {}, {}
    for router in ("round_robin", "least_outstanding"):
        result = run("cluster.replicas=2", "traffic.arrivals.rate=10", slow, f"cluster.router={router}").requests
        assert result is not None
        during = (result.arrival_s > 10) & (result.arrival_s < 16)
        later = result.arrival_s > 22
        first = result.replica == 0
        tpot[router] = [result.tpot_s[some & first].mean() for some in (during, later)]
        share[router] = first[during].mean()
    assert tpot["round_robin"][0] > 3 * tpot["round_robin"][1]
    assert share["round_robin"] == pytest.approx(0.5, abs=0.02)
    assert share["least_outstanding"] < 0.4


SCALED = (
    "cluster.autoscaling={target: 8, min_replicas: 0, max_replicas: 6, interval_s: 5, scale_down_delay_s: 20, "
    "cold_start_s: 10}"
)


def test_a_cluster_scales_from_zero_with_the_load_and_costs_less() -> None:
    rates = ", ".join(f"{{rate: {rate}, duration_s: {seconds}}}" for rate, seconds in ((1, 60), (12, 60), (1, 120)))
    stages = f"traffic.arrivals={{process: poisson, stages: [{rates}]}}"
    scaled = run(stages, "traffic.num_requests=2000", "cluster.replicas=0", SCALED)
    fixed = run(stages, "traffic.num_requests=2000", "cluster.replicas=6")
    assert scaled.summary["completed"] == fixed.summary["completed"]
    assert 1 < scaled.summary["pools"][0]["replicas_peak"] <= 6
    assert scaled.summary["gpu_hours"] < 0.7 * fixed.summary["gpu_hours"]
    assert scaled.summary["energy_j"] < fixed.summary["energy_j"]
    requests = scaled.requests
    assert requests is not None
    first = requests.arrival_s.argmin()
    assert requests.first_scheduled_s[first] - requests.arrival_s[first] == pytest.approx(
        10, abs=0.02
    )  # and the way through the server


def test_a_cold_start_is_the_weights_over_the_link_and_the_engines_start() -> None:
    """16.06 GB of BF16 weights (8.03e9 parameters) at 2 GB/s and 4 s: 12 s."""
    start = "load_bandwidth_bytes_per_s: 2e9, engine_start_s: 4"
    scaled = f"cluster.autoscaling={{target: 8, min_replicas: 0, max_replicas: 1, {start}}}"
    requests = run("cluster.replicas=0", "traffic.num_requests=5", scaled).requests
    assert requests is not None
    assert requests.first_scheduled_s.min() - requests.arrival_s.min() == pytest.approx(8.03 + 4, abs=0.05)


def test_traffic_is_split_over_models_by_share() -> None:
    pools = "cluster.pools=[{name: stable, share: 0.9, replicas: 2}, {name: canary, share: 0.1, model: qwen3-8b}]"
    result = run(pools, "traffic.num_requests=1500", "traffic.arrivals.rate=10")
    stable, canary = result.summary["pools"]
    assert stable["completed"] + canary["completed"] == 1500
    assert canary["completed"] / 1500 == pytest.approx(0.1, abs=4 * (0.09 / 1500) ** 0.5)
    assert canary["model"] == "qwen3-8b"


def test_a_shadow_changes_nothing_but_the_bill() -> None:
    alone = run("cluster.replicas=2", "cluster.router=random").summary
    pools = "cluster.pools=[{replicas: 2, router: random}, {shadow: true, share: 0.2, engine: {quantization: fp8}}]"
    shadowed = run(pools).summary
    same = [name for name in alone if name.endswith("_ms") or name == "completed"]
    assert {name: shadowed[name] for name in same} == {name: alone[name] for name in same}
    assert shadowed["pools"][1]["completed"] == pytest.approx(80, abs=32)
    assert shadowed["energy_j"] > alone["energy_j"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("cluster.pools=[{share: 0.5}, {share: 0.4}]", "shares that add up to 0.9"),
        ("cluster.pools=[{shadow: true, share: 0.5}]", "shadow pools only"),
        ("cluster.failures={events: [{at_s: 1, replica: 3}]}", "replica 3 in pool 0"),
        ("cluster.failures={repair_s: 3}", "needs `mtbf_s`, or `events`"),
        ("cluster.failures={slowdowns: [{factor: 2, pool: 1}]}", "a slowdown of replica 0 in pool 1"),
        ("cluster.replicas=0", "got 0 replicas"),
    ],
)
def test_what_makes_no_cluster_is_refused(settings: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_scenario(BASE, (settings,))


EVERYTHING = (
    "traffic.num_requests=300",
    "engine.max_num_seqs=8",
    "cluster.gateway={max_outstanding: 40, max_queue: 30, timeout_s: 12, retries: {max: 2, backoff_s: 0.5}}",
    "cluster.failures={mtbf_s: 8, repair_s: 2, start_s: 1}",
)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("metric", ["concurrency", "queue"])
def test_leaps_change_nothing_about_a_fleet_in_trouble(metric: str, ranks: int) -> None:
    """Replicas that die, scale and drain, clients that lose patience, tries that are refused: all at once."""
    scaling = f"{{metric: {metric}, target: 4, max_replicas: 3, interval_s: 1, scale_down_delay_s: 2, cold_start_s: 1}}"
    settings = (
        *EVERYTHING,
        f"cluster.autoscaling={scaling}",
        f"engine.data_parallel_size={ranks}",
        f"traffic.arrivals.rate={30 * ranks}",
    )
    scenario = load_scenario(BASE, (*SHORT, *settings))
    leapt, stepped = (simulate(scenario, can_leap=can_leap).summary for can_leap in (True, False))
    assert leapt["completed"] + leapt["failed"] + leapt["timed_out"] == 300
    assert all(leapt[name] for name in ("completed", "failed", "rejected", "retries"))
    assert leapt["timed_out"] or ranks > 1
    assert leapt["pools"][0]["failures"]
    exact = ["completed", "failed", "timed_out", "rejected", "retries", "mean_ttft_ms", "p99_e2el_ms", "gpu_hours"]
    assert {name: leapt[name] for name in exact} == {name: stepped[name] for name in exact}


def test_a_gateway_that_lets_nothing_through_is_a_sentence_and_one_that_answers_nobody_is_a_result() -> None:
    with pytest.raises(WorkloadError, match="no step ran: 0 requests failed and 400 timed out"):
        run("cluster.gateway={timeout_s: 1 ns}")
    hasty = run("cluster.gateway={timeout_s: 50 ms}").summary
    assert (hasty["completed"], hasty["timed_out"]) == (0, 400)
    assert hasty["mean_ttft_ms"] is None
    assert hasty["energy_j"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("cluster.autoscaling={target: 4, max_replicas: 2, interval_s: 0.001}", "has looked at the load 50 times"),
        ("cluster.failures={mtbf_s: 0.01, repair_s: 0, start_s: 0}", "replicas have failed 50 times"),
    ],
)
def test_what_happens_a_million_times_is_a_sentence(
    settings: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interval that is a slip of the unit looks for years at a cluster in which nothing happens."""
    for module in (autoscalers, dynamic):
        monkeypatch.setattr(module, "MAX_EVENTS", 50)
    retries = "cluster.gateway={retries: {max: 100}}"
    with pytest.raises(WorkloadError, match=message):
        run(settings, retries)

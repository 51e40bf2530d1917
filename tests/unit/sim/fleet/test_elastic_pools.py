"""Prefill and decode replicas that come and go, and disaggregated deployments beside others."""

import pytest

from perfmodel.sim.driver import simulate
from perfmodel.sim.records.result import RunResult
from perfmodel.specs import load_scenario

BASE = "llama-3.1-8b-h100-2048-256"
SHORT = (
    "traffic.num_requests=400",
    "traffic.arrivals.rate=10",
    "traffic.input_tokens={distribution: fixed, value: 500}",
)
PAIR = "{role: prefill, replicas: 2}, {role: decode, replicas: 2}"
RETRIES = "cluster.gateway={retries: {backoff_s: 0}}"


def run(*settings: str) -> RunResult:
    return simulate(load_scenario(BASE, (*SHORT, *settings)))


def ends(result: RunResult) -> tuple[int, int, int]:
    summary = result.summary
    return summary["completed"], summary["failed"], summary["timed_out"]


@pytest.mark.parametrize("pool", [0, 1])
def test_what_a_failed_replica_had_fails_and_retries_save_it(pool: int) -> None:
    """Away from 10 s to 25 s: what it had then is lost, once; what comes goes to the other replica of its pool."""
    failure = f"cluster.failures={{events: [{{at_s: 10, pool: {pool}, replica: 0, down_s: 10}}], start_s: 5}}"
    lost = run(f"cluster.pools=[{PAIR}]", failure)
    completed, failed, timed_out = ends(lost)
    assert (completed + failed, timed_out) == (400, 0)
    assert failed <= 60
    assert failed or pool == 0  # a prompt takes 20 ms
    row = lost.summary["pools"][pool]
    assert row["failures"] == row["starts"] == 1
    assert row["gpu_hours"] == pytest.approx((2 * lost.summary["duration"] - 10) / 3600)
    retried = run(f"cluster.pools=[{PAIR}]", failure, RETRIES)
    assert ends(retried) == (400, 0, 0)
    assert retried.summary["retries"] == failed
    requests = retried.requests
    assert requests is not None
    if pool == 1:  # decode engines are 2 and 3
        assert set(requests.replica[(requests.arrival_s > 10) & (requests.arrival_s < 24)]) == {3}


@pytest.mark.parametrize(("pool", "metric"), [(0, "prefill"), (1, "decode")])
def test_requests_wait_while_a_stage_has_no_replica(pool: int, metric: str) -> None:
    """The only replica is away from 20 s to 35 s: who comes meanwhile has no token before it is back."""
    failure = f"cluster.failures={{events: [{{at_s: 20, pool: {pool}, down_s: 10}}], start_s: 5}}"
    result = run("cluster.pools=[{role: prefill}, {role: decode}]", failure, RETRIES)
    assert ends(result) == (400, 0, 0)
    requests = result.requests
    assert requests is not None
    during = (requests.arrival_s > 20) & (requests.arrival_s < 35)
    assert during.any()
    assert (requests.first_token_s[during] > 35).all()
    computed = requests.first_scheduled_s[during]
    assert (computed >= 35).all() if metric == "prefill" else (computed < 35).all()


def test_both_stages_start_from_nothing_one_after_the_other() -> None:
    """10 s for a prefill replica, and 20 s, once a prompt is computed, for one that decodes."""
    scaling = "autoscaling: {{target: 8, min_replicas: 0, max_replicas: 2, interval_s: 1, cold_start_s: {}}}"
    pools = f"{{role: prefill, replicas: 0, {scaling.format(10)}}}, {{role: decode, replicas: 0, {scaling.format(20)}}}"
    result = run(f"cluster.pools=[{pools}]")
    assert ends(result) == (400, 0, 0)
    requests = result.requests
    assert requests is not None
    assert requests.ttft_s[requests.arrival_s.argmin()] == pytest.approx(10 + 20, abs=0.2)


def test_pools_follow_the_load_each_on_its_own() -> None:
    """Long answers to short prompts: decode replicas come and go with the load, one prefill replica is enough."""
    rates = ", ".join(f"{{rate: {rate}, duration_s: {seconds}}}" for rate, seconds in ((1, 60), (12, 60), (1, 120)))
    traffic = (f"traffic.arrivals={{process: poisson, stages: [{rates}]}}", "traffic.num_requests=2000")
    of = "autoscaling: {{{}, max_replicas: 6, interval_s: 5, scale_down_delay_s: 20, cold_start_s: 5}}"
    metrics = "metric: queue, target: 4", "metric: kv_cache_usage, target: 0.3"
    pools = ", ".join(
        f"{{role: {role}, {of.format(m)}}}" for role, m in zip(("prefill", "decode"), metrics, strict=True)
    )
    result = run(f"cluster.pools=[{pools}]", *traffic, "engine.num_gpu_blocks_override=1500")
    prefill, decode = result.summary["pools"]
    assert prefill["replicas_peak"] == 1
    assert 2 <= decode["replicas_peak"] <= 6
    fixed = run("cluster.pools=[{role: prefill}, {role: decode, replicas: 6}]", *traffic)
    assert result.summary["completed"] == fixed.summary["completed"]
    assert result.summary["gpu_hours"] < 0.7 * fixed.summary["gpu_hours"]


def test_as_many_replicas_as_the_kv_in_flight_fills_to_their_target() -> None:
    """Of 64 requests in flight each holds 500 tokens of prompt and what it has of its answer. Answers are uniform up to
    600, so one that is met by chance is E[x^2] / (2 E[x]) = 200 long so far (inspection paradox): 64 x 44 blocks of
    16, which fill 2.8 decode replicas to a half of their 2,000."""
    closed = ("traffic.arrivals={process: closed_loop, concurrency: 64}", "traffic.num_requests=3000")
    lengths = (
        "traffic.output_tokens={distribution: uniform, low: 2, high: 600}",
        "engine.num_gpu_blocks_override=2000",
    )
    scaling = "metric: kv_cache_usage, target: 0.5, max_replicas: 8, interval_s: 2, cold_start_s: 1"
    decode = f"{{role: decode, replicas: 3, autoscaling: {{{scaling}, scale_down_delay_s: 0}}}}"
    summary = run(f"cluster.pools=[{{role: prefill, replicas: 4}}, {decode}]", *closed, *lengths).summary
    assert summary["pools"][1]["gpu_hours"] * 3600 / summary["duration"] == pytest.approx(3, rel=0.05)


def test_a_disaggregated_canary_leaves_the_others_alone() -> None:
    """What has 0.8 of the requests answers them as if the rest had a unified replica of their own, or none."""
    beside = "{share: 0.2, role: prefill}, {role: decode}", "{share: 0.2}"
    e2el = []
    for canary in beside:
        requests = run(f"cluster.pools=[{{share: 0.8, replicas: 2}}, {canary}]").requests
        assert requests is not None
        stable = requests.replica < 2
        assert 0.7 < stable.mean() < 0.9
        e2el.append(requests.e2el_s[stable][requests.request_id[stable].argsort()])
    assert (e2el[0] == e2el[1]).all()


def test_several_models_have_prefill_and_decode_pools_each() -> None:
    mine = "{{deployment: {0}, share: {1}, role: prefill{2}}}, {{deployment: {0}, role: decode}}"
    pools = f"{mine.format('a', 0.7, '')}, {mine.format('b', 0.3, ', model: qwen3-8b')}"
    result = run(f"cluster.pools=[{pools}]", "cluster.kv_transfer={shared: true}")
    assert ends(result) == (400, 0, 0)
    rows = result.summary["pools"]
    assert [(row["deployment"], row["role"], row["model"]) for row in rows] == [
        ("a", "prefill", "llama-3.1-8b"),
        ("a", "decode", "llama-3.1-8b"),
        ("b", "prefill", "qwen3-8b"),
        ("b", "decode", "qwen3-8b"),
    ]
    assert rows[1]["completed"] + rows[3]["completed"] == 400
    assert result.summary["kv_transfer"]["transfers"] == 400


def test_unified_pools_of_a_deployment_share_its_requests() -> None:
    """Half of the requests for one pool, half for two behind one router."""
    both = "{deployment: both, share: 0.5}, {deployment: both, engine: {max_num_seqs: 16}}"
    result = run(f"cluster.pools=[{{share: 0.5}}, {both}]")
    alone, first, second = (row["completed"] for row in result.summary["pools"])
    assert alone + first + second == 400
    assert alone == pytest.approx(200, abs=40)
    assert abs(first - second) <= 1  # in turn


def test_a_disaggregated_shadow_changes_nothing_but_the_bill() -> None:
    alone = run("cluster.replicas=2", "cluster.router=random").summary
    shadow = "{deployment: trial, shadow: true, share: 0.5, role: prefill}, {deployment: trial, role: decode}"
    shadowed = run(f"cluster.pools=[{{replicas: 2, router: random}}, {shadow}]").summary
    same = [name for name in alone if name.endswith("_ms") or name == "completed"]
    assert {name: shadowed[name] for name in same} == {name: alone[name] for name in same}
    assert shadowed["pools"][2]["completed"] == pytest.approx(200, abs=40)
    assert shadowed["energy_j"] > alone["energy_j"]


def test_sessions_stay_with_their_prefill_replica_as_others_come_and_go() -> None:
    """Prompts with the same beginning find it in one replica's cache, as often as if there were but one. The decode
    replica looks into its own cache, too, under either router, so that rates differ less than those of prefills."""
    prefixes = "traffic.prefix={num_groups: 40, shared_tokens: 400}"
    rates = {}
    for router in ("session_affinity", "random"):
        pools = f"{{role: prefill, replicas: 4, router: {router}}}, {{role: decode}}"
        rates[router] = run(f"cluster.pools=[{pools}]", prefixes).summary["prefix_cache_hit_rate"]
    assert rates["session_affinity"] > 1.1 * rates["random"]

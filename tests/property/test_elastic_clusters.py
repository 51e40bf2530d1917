"""Laws of clusters whose replicas come and go, prefill and decode ones among them: whatever happens to replicas,
transfers and clients, each request that is sent ends once, no KV block stays behind, and leaps change nothing."""

from functools import cache
from typing import Any

from engine_integrity import check_idle, check_integrity
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perfmodel.engine import Request
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.fleet.cluster import Cluster
from perfmodel.sim.fleet.gateway import LostRequest
from perfmodel.sim.fleet.pool import remembered_basis
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.clients import OpenLoopClient
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs import Scenario, load_scenario
from perfmodel.specs.cluster import ClusterSpec

NUM_REQUESTS = 60


@cache
def base() -> Scenario:
    """Engines small enough to run out of slots and blocks, and more load than one of them bears."""
    engine = ("engine.max_num_seqs=6", "engine.num_gpu_blocks_override=160", "engine.max_model_len=2048")
    lengths = ("traffic.input_tokens={distribution: uniform, low: 1, high: 1500}", "traffic.output_tokens.value=60")
    amount = (f"traffic.num_requests={NUM_REQUESTS}", "traffic.arrivals.rate=12", "cluster.router=least_outstanding")
    return load_scenario("llama-3.1-8b-h100-2048-256", (*engine, *lengths, *amount))


kubernetes = st.fixed_dictionaries(
    {
        "metric": st.sampled_from(["concurrency", "queue", "running", "kv_cache_usage"]),
        "target": st.sampled_from([0.3, 1.0]),
        "min_replicas": st.just(1),
        "max_replicas": st.just(3),
        "interval_s": st.just(0.5),
        "scrape_interval_s": st.sampled_from([0.3, 0.5]),
        "cold_start_s": st.sampled_from([0, 0.7]),
        "hpa": st.just({"behavior": {"scale_down": {"stabilization_window_seconds": 1}}}),
    }
)
keda = kubernetes.flatmap(
    lambda fields: st.fixed_dictionaries(
        {name: st.just(value) for name, value in fields.items()}
        | {
            "metric": st.sampled_from(["concurrency", "queue"]),
            "min_replicas": st.integers(0, 1),
            "keda": st.just({"polling_interval": 0.4, "cooldown_period": 1}),
        }
    )
)
dynamo = st.fixed_dictionaries(
    {
        "max_replicas": st.just(3),
        "cold_start_s": st.sampled_from([0, 0.7]),
        "dynamo": st.fixed_dictionaries(
            {
                "optimization_target": st.sampled_from(["throughput", "latency"]),
                "load_adjustment_interval_seconds": st.just(0.5),
            }
        ),
    }
)
plain = st.fixed_dictionaries(
    {
        "metric": st.sampled_from(["concurrency", "queue", "kv_cache_usage"]),
        "target": st.sampled_from([0.3, 1.0]),
        "min_replicas": st.integers(0, 1),
        "max_replicas": st.just(3),
        "interval_s": st.just(0.5),
        "scale_down_delay_s": st.sampled_from([0, 1]),
        "cold_start_s": st.sampled_from([0, 0.7]),
    }
)
scalings = st.none() | plain | kubernetes | keda | dynamo


slowdowns = st.fixed_dictionaries(
    {
        "factor": st.sampled_from([1.3, 4.0]),
        "pool": st.integers(0, 1),
        "at_s": st.sampled_from([0, 1]),
        "for_s": st.sampled_from([None, 0.5, 2]),
    }
)


@st.composite
def deployments(draw: st.DrawFn, roles: tuple[str, ...]) -> list[dict[str, Any]]:
    pools = []
    for role in roles:
        scaling = draw(scalings)
        pools.append({"role": role, "replicas": draw(st.integers(0 if scaling else 1, 2)), "autoscaling": scaling})
    return pools


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    """Prefill and decode pools, alone or beside other deployments; failures, impatience, links of all kinds."""
    pools = draw(deployments(("prefill", "decode")))
    beside = draw(st.sampled_from(["nothing", "nothing", "unified", "prefill and decode", "shadow"]))
    if beside != "nothing":
        more = draw(deployments(("unified",) if beside == "unified" else ("prefill", "decode")))
        shares = {"share": 0.3, "shadow": True} if beside == "shadow" else {"share": 0.5}
        mine = {} if beside == "shadow" else {"share": 0.5}
        pools = [pool | mine for pool in pools] + [pool | shares | {"deployment": "other"} for pool in more]
    failing = st.fixed_dictionaries(
        {
            "mtbf_s": st.sampled_from([0.5, 3.0]),
            "repair_s": st.sampled_from([0, 1]),
            "start_s": st.sampled_from([0, 1]),
            "detection_s": st.sampled_from([0, 0.3, 2]),
            "slowdowns": st.lists(slowdowns, max_size=2),
        }
    )
    transfer = {"layerwise": draw(st.booleans()), "shared": draw(st.booleans())}
    link = {"link": "ethernet", "bandwidth_bytes_per_s": draw(st.sampled_from([1e9, 1e10])), "latency_s": 0.001}
    gateway = {
        "timeout_s": draw(st.sampled_from([None, 0.8, 4])),
        "max_outstanding": draw(st.sampled_from([None, 10])),
        "max_queue": 20,
        "retries": draw(st.none() | st.just({"max": 2, "backoff_s": 0.1})),
    }
    return ClusterSpec.model_validate(
        {"pools": pools, "failures": draw(failing), "kv_transfer": transfer | link, "gateway": gateway}
    )


def serve(scenario: Scenario, can_leap: bool) -> list[tuple[Any, ...]]:
    """What became of each request, and when."""
    env, ends = TickEnvironment(), list[tuple[Any, ...]]()

    def on_finished(_: EngineRank, request: Request) -> None:
        ends.append((request.request_id, "completed", request.first_token_at, request.finished_at))

    def on_lost(lost: LostRequest) -> None:
        ends.append((lost.request.request_id, lost.fate, lost.at))

    basis_of = remembered_basis(None, None)
    cluster = Cluster(env, scenario, basis_of, on_finished, lambda *_: None, can_leap, on_lost=on_lost)
    client = OpenLoopClient(env, Workload(scenario).requests(), cluster.route)
    assert cluster.dynamic is not None
    cluster.dynamic.is_sent = lambda: client.is_done
    env.run()
    assert not cluster.dynamic.gateway.has_requests
    for server in cluster.servers:
        check_idle(server, ())
    for engine in cluster.engines:
        check_integrity(engine.loop.scheduler)
        assert engine.is_idle
        assert engine.num_outstanding == engine.num_prompt_blocks == 0
        assert engine.loop.scheduler.blocks.num_used == 0
    return sorted(ends)


def failing_between_plan_and_transfer() -> ClusterSpec:
    """A decode replica fails after a request got its blocks and before the transfer into them begins."""
    scaling = {"metric": "kv_cache_usage", "min_replicas": 0, "max_replicas": 3, "interval_s": 0.5, "target": 0.3}
    scaling |= {"scale_down_delay_s": 0, "cold_start_s": 0}
    pools = [
        {"role": "prefill", "replicas": 2, "share": 0.5, "autoscaling": scaling | {"cold_start_s": 0.7}},
        {"role": "decode", "replicas": 2, "share": 0.5, "autoscaling": scaling},
        {"role": "unified", "replicas": 0, "share": 0.5, "deployment": "other"},
    ]
    pools[2]["autoscaling"] = scaling | {"metric": "concurrency"}
    link = {"link": "ethernet", "bandwidth_bytes_per_s": 1e9, "latency_s": 0.001}
    gateway = {"max_outstanding": 10, "max_queue": 20, "retries": {"max": 2, "backoff_s": 0.1}}
    failures = {"mtbf_s": 0.5, "repair_s": 1, "start_s": 0, "detection_s": 0.3}
    return ClusterSpec.model_validate({"pools": pools, "failures": failures, "kv_transfer": link, "gateway": gateway})


@given(clusters())
@example(failing_between_plan_and_transfer())
@settings(max_examples=60, deadline=None)
def test_each_request_ends_once_no_block_stays_and_leaps_change_nothing(cluster: ClusterSpec) -> None:
    engine = base().engine
    pools = tuple(pool.model_copy(update={"engine": engine}) for pool in cluster.pools)
    scenario = base().model_copy(update={"cluster": cluster.model_copy(update={"pools": pools})})
    ends = serve(scenario, can_leap=True)
    assert [number for number, *_ in ends] == list(range(NUM_REQUESTS))
    assert serve(scenario, can_leap=False) == ends

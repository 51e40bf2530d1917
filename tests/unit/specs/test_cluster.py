"""Clusters of pools in scenario files: what a pool inherits, what is refused and how it is said."""

from collections.abc import Callable
from pathlib import Path

import pytest

from perfmodel.errors import SpecError
from perfmodel.specs import Scenario, load_scenario, scenario_schema
from perfmodel.specs.autoscaling import AutoscalingSpec

Write = Callable[..., Path]
POOLS = "cluster={pools: [{role: prefill, replicas: 2}, {role: decode, engine: {tensor_parallel_size: 2}}]}"


def load(write: Write, *changes: str) -> Scenario:
    return load_scenario(write(), changes)


def test_a_pool_takes_the_scenarios_engine_and_says_what_differs(scenario_file: Write) -> None:
    scenario = load(scenario_file, POOLS, "engine.max_num_seqs=48")
    prefill, decode = scenario.pools
    assert prefill.engine == scenario.engine
    assert (decode.engine.tensor_parallel_size, decode.engine.max_num_seqs) == (2, 48)
    assert decode.engine.max_model_len == scenario.model.max_position_embeddings
    assert scenario.num_devices == 2 * 1 + 1 * 2
    assert scenario.of_pool(decode).hardware is scenario.hardware


def test_a_pool_has_hardware_of_its_own(scenario_file: Write) -> None:
    scenario = load(scenario_file, "cluster={pools: [{hardware: h100}, {replicas: 2}]}")
    names = [scenario.of_pool(pool).hardware.name for pool in scenario.pools]
    assert names == ["h100-sxm-80gb", scenario.hardware.name]
    assert not scenario.cluster.is_disaggregated


def test_equal_replicas_are_one_unified_pool(scenario_file: Write) -> None:
    scenario = load(scenario_file, "cluster={replicas: 3}")
    (pool,) = scenario.pools
    assert (pool.role, pool.replicas, pool.engine) == ("unified", 3, scenario.engine)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("cluster={pools: [{role: decode}]}", "no pool has role prefill"),
        ("cluster={pools: [{role: decode}, {role: prefill}, {}]}", "unified pools beside prefill and decode"),
        ("cluster={pools: [{deployment: a, role: decode, share: 1}]}", "no pool has role prefill in deployment a"),
        ("cluster={pools: [{role: prefill, share: 0.5}, {role: decode, share: 0.4}]}", "more than one share"),
        ("cluster={pools: [{role: prefill, share: 0.5}, {role: decode}, {share: 0.4}]}", "add up to 0.9 in 2 of 2"),
        ("cluster={pools: [{shadow: true}]}", "shadow without share"),
        ("cluster={replicas: 2, pools: [{}]}", "each pool has its own `replicas`"),
        ("cluster={pools: [{}], kv_transfer: {latency_s: 1 ms}}", "kv_transfer without a prefill and a decode pool"),
        ("cluster={pools: [{role: prefil}]}", "Did you mean 'prefill'"),
        ("cluster={pools: [{hardware: h101}]}", "cluster.pools.0.hardware: unknown hardware 'h101'"),
        ("cluster={pools: [{engine: {max_num_seq: 3}}]}", "Did you mean 'max_num_seqs'"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(scenario_file: Write, change: str, sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        load(scenario_file, change)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("cluster.kv_transfer={link: nvlnk}", "no link nvlnk (its links: nvlink, pcie)"),
        ("cluster.pools.1.engine={quantization: fp8}", "set quantization once, under `engine`"),
    ],
)
def test_pools_that_cannot_exchange_kv_are_refused(scenario_file: Write, change: str, sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        load(scenario_file, POOLS, change)
    assert sentence in str(error.value)


def test_a_link_is_the_hardware_files_or_described_here(scenario_file: Write) -> None:
    scenario = load(scenario_file, POOLS, "cluster.kv_transfer={link: pcie, latency_s: 2 us}")
    link = scenario.cluster.kv_transfer.link_of(scenario.hardware)
    declared = scenario.hardware.link("pcie")
    assert declared is not None
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (declared.bandwidth_bytes_per_s, pytest.approx(2e-6))
    described = load(scenario_file, POOLS, "cluster.kv_transfer={link: infiniband, bandwidth_bytes_per_s: 50 GB/s}")
    assert described.cluster.kv_transfer.link_of(scenario.hardware).bandwidth_bytes_per_s == 50e9


def test_the_schema_knows_pools() -> None:
    fleet = {"name", "deployment", "model", "share", "shadow", "autoscaling"}
    assert {"role", "replicas", "engine", "hardware", "router"} | fleet == set(
        scenario_schema()["$defs"]["PoolSpec"]["properties"]
    )


def test_a_new_replica_loads_its_weights_and_then_starts() -> None:
    """16 GB at 2 GB/s and 4 s, unless the scenario gives a cold start."""
    given = {"target": 4.0, "max_replicas": 3, "load_bandwidth_bytes_per_s": 2e9, "engine_start_s": 4.0}
    assert AutoscalingSpec.model_validate(given).start_s(16e9) == 12.0
    assert AutoscalingSpec.model_validate(given | {"cold_start_s": 7.0}).start_s(16e9) == 7.0


@pytest.mark.parametrize(("replica", "exists"), [(0, True), (2, True), (3, False)])
def test_failures_name_existing_replicas(scenario_file: Write, replica: int, exists: bool) -> None:
    """Three replicas, counted from 0."""
    failure = f"cluster={{replicas: 3, failures: {{events: [{{at_s: 10, replica: {replica}}}]}}}}"
    if exists:
        assert load(scenario_file, failure).cluster.failures is not None
    else:
        with pytest.raises(SpecError, match="count from 0"):
            load(scenario_file, failure)


def test_a_start_is_the_sum_of_its_parts() -> None:
    """10 GB of image at 1 GB/s, 5 s, 7 s, 20 graphs of 0.5 s, and 16 GB of weights at 2 GB/s."""
    startup = {
        "image_bytes": 10e9,
        "image_bandwidth_bytes_per_s": 1e9,
        "processes_s": 5,
        "compile_s": 7,
        "graph_s": 0.5,
    }
    given = {"target": 4.0, "max_replicas": 3, "load_bandwidth_bytes_per_s": 2e9, "startup": startup}
    assert AutoscalingSpec.model_validate(given).start_s(16e9, num_graphs=20) == 10 + 5 + 7 + 10 + 8


def test_a_start_with_eager_steps_captures_no_graphs(scenario_file: Write) -> None:
    autoscaling = "cluster={autoscaling: {target: 4, max_replicas: 3, startup: {graph_s: 1}}}"
    starts = []
    for eager in ("true", "false"):
        engine = load(scenario_file, autoscaling, f"engine.enforce_eager={eager}").engine
        starts.append(engine.num_graphs)
    assert starts[0] == 0 < starts[1]
    assert load(scenario_file, autoscaling, "engine.profile=llamacpp").engine.num_graphs == 0  # it has none


def test_fields_of_kubernetes_may_be_written_as_there(scenario_file: Write) -> None:
    rules = "{stabilizationWindowSeconds: 60, policies: [{type: Pods, value: 2, periodSeconds: 30}], selectPolicy: Min}"
    own = (
        "{stabilization_window_seconds: 60, policies: [{type: Pods, value: 2, period_seconds: 30}], select_policy: Min}"
    )
    one, other = (
        load(scenario_file, f"cluster={{autoscaling: {{target: 4, max_replicas: 3, hpa: {{behavior: {text}}}}}}}")
        for text in (f"{{scaleUp: {rules}}}", f"{{scale_up: {own}}}")
    )
    assert one.cluster.autoscaling == other.cluster.autoscaling
    changed = load(scenario_file, HPA, "cluster.autoscaling.hpa.behavior.scaleDown.stabilizationWindowSeconds=60")
    assert changed.cluster.autoscaling.hpa.behavior.scale_down.stabilization_window_seconds == 60  # type: ignore[union-attr]


HPA = "cluster={autoscaling: {target: 4, max_replicas: 3, hpa: {}}}"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("target=null", "needs `target`, the load of one replica"),
        ("min_replicas=0", "use keda to scale to none"),
        ("dynamo={}", "got dynamo beside hpa or keda"),
        ("scale_down_delay_s=60", "got scale_down_delay_s with hpa"),
        ("hpa={behavior: {scaleDown: {stabilisationWindowSeconds: 3}}}", "Did you mean 'stabilization_window_seconds'"),
        ("hpa={behavior: {scaleDown: {}, scale_down: {}}}", "got scaleDown beside scale_down"),
        ("startup={}", None),
        ("{startup: {}, cold_start_s: 3, target: 1, max_replicas: 2}", "got startup beside cold_start_s"),
        ("{target: 1, max_replicas: 2, scrape_interval_s: 5}", "got scrape_interval_s with neither hpa nor keda"),
        ("{target: 1, max_replicas: 2, min_replicas: 0, metric: running, keda: {}}", "which nobody has then"),
        ("{target: 1, max_replicas: 2, dynamo: {}}", "got target with dynamo"),
        ("{max_replicas: 2, dynamo: {optimization_target: sla}}", "expected 'throughput' or 'latency'"),
    ],
)
def test_what_an_autoscaler_does_not_read_is_refused(scenario_file: Write, change: str, sentence: str | None) -> None:
    setting = f"cluster.autoscaling={change}" if change.startswith("{") else f"cluster.autoscaling.{change}"
    if sentence is None:
        assert load(scenario_file, HPA, setting).cluster.autoscaling is not None
        return
    with pytest.raises(SpecError) as error:
        load(scenario_file, HPA, setting)
    assert sentence in str(error.value)

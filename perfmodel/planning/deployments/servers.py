"""What the server of a pool's replica is started with: the arguments of `vllm serve`, on one node or across several."""

__all__ = ["nodes_of", "server_arguments"]

from math import ceil

from perfmodel.specs.cluster import PoolSpec
from perfmodel.specs.commands.server import engine_arguments
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario import Scenario

_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def nodes_of(scenario: Scenario, pool: PoolSpec) -> int:
    """Nodes that one replica of the pool takes."""
    return ceil(pool.engine.num_devices / (pool.hardware or scenario.hardware).devices_per_node)


def server_arguments(scenario: Scenario, pool: PoolSpec) -> list[str]:
    """What follows `vllm serve`: the model, its engine's arguments, what joins nodes and what hands KV on."""
    model = scenario.model
    arguments = [model.hf_id or model.name, *engine_arguments(pool.engine, model)]
    if nodes_of(scenario, pool) > 1:
        arguments += _across_nodes(pool.engine)
    if pool.role in _KV_ROLES:
        config = f'{{"kv_connector": "NixlConnector", "kv_role": "{_KV_ROLES[pool.role]}"}}'
        arguments += ["--kv-transfer-config", config]
    return arguments


def _across_nodes(engine: EngineSpec) -> list[str]:
    """What starts ranks on other nodes. Source: vLLM's documentation, "Parallelism and Scaling", "Data Parallel
    Deployment"."""
    arguments = ["--distributed-executor-backend", "ray"]
    return [*arguments, "--data-parallel-backend", "ray"] if engine.data_parallel_size > 1 else arguments

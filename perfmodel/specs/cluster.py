"""`ClusterSpec`: which engines serve the traffic together: equal replicas, or pools of them, and the link between.

A pool is a number of equal replicas with a role. `unified` ones compute prompts and decode; in a disaggregated cluster
`prefill` ones compute prompts and sample the first token, `decode` ones fetch the prompt's KV cache and go on.
"""

__all__ = ["ClusterSpec", "KvTransferSpec", "PoolSpec"]

from collections import Counter
from typing import Annotated, Literal

from pydantic import PositiveInt, model_validator

from perfmodel.specs.base import Spec
from perfmodel.specs.engine import EngineSpec
from perfmodel.specs.gateway import GatewaySpec
from perfmodel.specs.given_link import GivenLink
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.resolved import Resolved

RouterName = Literal[
    "round_robin",
    "random",
    "power_of_two",
    "least_outstanding",
    "least_kv",
    "prefix_affinity",
    "session_affinity",
]


class PoolSpec(Spec):
    """Equal replicas with one role.

    engine:   in a file, what differs from the scenario's `engine`; here, all of it
    hardware: the scenario's, unless given
    router:   how requests are shared out over the pool's replicas; the cluster's, unless given
    """

    role: Literal["unified", "prefill", "decode"] = "unified"
    replicas: PositiveInt = 1
    engine: EngineSpec = EngineSpec()
    hardware: (
        Annotated[HardwareSpec, Resolved("A name in hardware_specs, or a path; the scenario's unless given")] | None
    ) = None
    router: RouterName | None = None


class KvTransferSpec(GivenLink):
    """How KV blocks get from a prefill to a decode replica: every device over its own link, in and out.

    latency_s: handshake and descriptors included
    """


class ClusterSpec(Spec):
    """Equal replicas of the scenario's engine behind a router, or `pools` of engines that differ."""

    replicas: PositiveInt = 1
    router: RouterName = "round_robin"
    pools: tuple[PoolSpec, ...] = ()
    kv_transfer: KvTransferSpec = KvTransferSpec()
    gateway: GatewaySpec | None = None

    @model_validator(mode="after")
    def _pools_make_a_cluster(self) -> "ClusterSpec":
        roles = Counter(pool.role for pool in self.pools)
        if self.pools and "replicas" in self.model_fields_set:
            raise ValueError("found replicas beside pools; each pool has its own `replicas`, leave this one out")
        if bool(roles["prefill"]) != bool(roles["decode"]):
            missing = "decode" if roles["prefill"] else "prefill"
            raise ValueError(f"found no pool with role {missing}; prefill and decode pools need each other")
        if roles["unified"] and roles["prefill"]:
            raise ValueError("found unified pools beside prefill and decode ones; use one kind or the other")
        if "kv_transfer" in self.model_fields_set and not roles["prefill"]:
            raise ValueError("found kv_transfer without a prefill and a decode pool; only between these is KV moved")
        return self

    @property
    def is_disaggregated(self) -> bool:
        """Whether prompts are computed by other replicas than the ones that decode."""
        return any(pool.role == "prefill" for pool in self.pools)

"""`ClusterSpec`: which engines serve the traffic together: equal replicas, or pools of them, and the link between.

A pool is a number of equal replicas with a role. `unified` ones compute prompts and decode; in a disaggregated cluster
`prefill` ones compute prompts and sample the first token, `decode` ones fetch the prompt's KV cache and go on.
"""

__all__ = ["ClusterSpec", "KvTransferSpec", "PoolSpec"]

from collections import Counter
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, model_validator

from perfmodel.specs.autoscaling import AutoscalingSpec, FailuresSpec
from perfmodel.specs.base import Spec
from perfmodel.specs.engine import EngineSpec
from perfmodel.specs.gateway import GatewaySpec
from perfmodel.specs.given_link import GivenLink
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.model.spec import ModelSpec
from perfmodel.specs.resolved import Resolved
from perfmodel.specs.units import BytesPerSecond

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

    model:    another model, or another version of it, for a `share` of the requests; the scenario's unless given
    share:    of the requests, by a hash of their numbers; else the router chooses among all pools without one
    shadow:   its `share` are copies: nobody waits for the answers, and nothing but its costs is counted
    engine:   in a file, what differs from the scenario's `engine`; here, all of it
    hardware: the scenario's, unless given
    router:   how requests are shared out over the pool's replicas; the cluster's, unless given
    """

    name: str | None = None
    role: Literal["unified", "prefill", "decode"] = "unified"
    replicas: NonNegativeInt = 1
    engine: EngineSpec = EngineSpec()
    hardware: (
        Annotated[HardwareSpec, Resolved("A name in hardware_specs, or a path; the scenario's unless given")] | None
    ) = None
    router: RouterName | None = None
    model: (
        Annotated[ModelSpec, Resolved("A name in workloads/models, or a path; the scenario's unless given")] | None
    ) = None
    share: float | None = Field(default=None, gt=0, le=1)
    shadow: bool = False
    autoscaling: AutoscalingSpec | None = None

    @property
    def most_replicas(self) -> int:
        """Replicas that there are at most."""
        return max(self.replicas, self.autoscaling.max_replicas if self.autoscaling is not None else 0)

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> "PoolSpec":
        if not self.most_replicas:
            raise ValueError("found 0 replicas, and no autoscaling that would start any; give at least 1")
        if self.shadow and self.share is None:
            raise ValueError("found shadow without share; say of which share of the requests it gets copies")
        if self.role != "unified" and (self.autoscaling or self.share or self.model):
            raise ValueError(f"found autoscaling, share or model in a {self.role} pool; only unified pools have them")
        return self


class KvTransferSpec(GivenLink):
    """How KV blocks get from a prefill to a decode replica: every device over its own link, in and out.

    latency_s: handshake and descriptors included
    layerwise: each layer's KV leaves while the next is computed
    shared:    all links lead into one fabric of `fabric_bandwidth_bytes_per_s`, that of one link unless given
    """

    layerwise: bool = False
    shared: bool = False
    fabric_bandwidth_bytes_per_s: BytesPerSecond | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _has_a_fabric_for_its_bandwidth(self) -> "KvTransferSpec":
        if self.fabric_bandwidth_bytes_per_s is not None and not self.shared:
            raise ValueError("found fabric_bandwidth_bytes_per_s without shared: true; only a shared fabric has one")
        return self


class ClusterSpec(Spec):
    """Equal replicas of the scenario's engine behind a router, or `pools` of engines that differ."""

    replicas: NonNegativeInt = 1
    router: RouterName = "round_robin"
    pools: tuple[PoolSpec, ...] = ()
    kv_transfer: KvTransferSpec = KvTransferSpec()
    gateway: GatewaySpec | None = None
    autoscaling: AutoscalingSpec | None = None
    failures: FailuresSpec | None = None

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
        if self.pools and self.autoscaling is not None:
            raise ValueError("found autoscaling beside pools; each pool has its own `autoscaling`, move it there")
        if self.is_disaggregated and self.failures is not None:
            raise ValueError("found failures beside prefill and decode pools; only unified replicas can fail yet")
        self._check_shares()
        self._check_failures()
        return self

    def _check_shares(self) -> None:
        served = [pool for pool in self.pools if not pool.shadow]
        shares = [pool.share for pool in served if pool.share is not None]
        if self.pools and not served:
            raise ValueError("found shadow pools only; one pool at least has to answer the requests")
        if shares and (len(shares) < len(served) or abs(sum(shares) - 1) > 1e-6):
            raise ValueError(
                f"found shares that add up to {sum(shares):g} in {len(shares)} of {len(served)} pools; give every pool "
                f"a share (shadow ones aside), together 1"
            )
        if any(pool.model is not None and pool.share is None for pool in self.pools):
            raise ValueError("found a pool with a model of its own and no share; give its share of the requests")

    def _check_failures(self) -> None:
        pools = self.pools or (PoolSpec(replicas=self.replicas, autoscaling=self.autoscaling),)
        for event in self.failures.events if self.failures is not None else ():
            if event.pool >= len(pools) or event.replica >= pools[event.pool].most_replicas:
                raise ValueError(
                    f"found a failure of replica {event.replica} in pool {event.pool}; both count from 0, and there "
                    f"are {', '.join(str(pool.most_replicas) for pool in pools)} replicas"
                )
            if pools[event.pool].shadow:
                raise ValueError(f"found a failure in pool {event.pool}, a shadow; nobody waits for its answers")

    @property
    def is_dynamic(self) -> bool:
        """Whether a gateway has to watch over the requests, and not the router alone."""
        extras = (self.gateway, self.autoscaling, self.failures)
        return any(extra is not None for extra in extras) or any(pool.autoscaling or pool.share for pool in self.pools)

    @property
    def is_disaggregated(self) -> bool:
        """Whether prompts are computed by other replicas than the ones that decode."""
        return any(pool.role == "prefill" for pool in self.pools)

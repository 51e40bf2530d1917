"""`ClusterSpec`: replicas or pools of them, the router and gateway before them, KV between them."""

__all__ = ["ClusterSpec", "GatewaySpec", "KvTransferSpec", "RateLimit", "Retries"]

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from perfmodel.files.base import Spec
from perfmodel.files.units import BytesPerSecond, NonNegativeInt, PositiveFloat, PositiveInt, Seconds
from perfmodel.specs.networks import GivenLink, NetworkSpec
from perfmodel.specs.pools import AutoscalingSpec, FailuresSpec, PoolGroup, PoolSpec, RouterName, completed, deployments


class RateLimit(Spec):
    """A token bucket: `requests_per_s` on average, at most `burst` at once. What comes above it is refused."""

    requests_per_s: PositiveFloat
    burst: PositiveInt = 1


class Retries(Spec):
    """A request that was refused, or whose replica failed, is sent again at most `max` times.

    Before the n-th time it waits backoff_s x factor^(n-1) x (1 - jitter x u), u uniform in [0, 1): a jitter of 1 is
    what is called full jitter.
    """

    max: PositiveInt = 3
    backoff_s: Annotated[Seconds, Field(ge=0)] = 0.5
    factor: Annotated[float, Field(ge=1)] = 2.0
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.5


class GatewaySpec(Spec):
    """Limits and patience; each is without effect unless given.

    max_outstanding: requests that the replicas have in hand at most; what comes above it waits in the gateway, by
                     priority, if it still holds fewer than `max_queue`, and is refused if not
    timeout_s:       how long a client waits for the whole answer, retries included; what is left of it is aborted
    """

    rate_limit: RateLimit | None = None
    max_outstanding: PositiveInt | None = None
    max_queue: NonNegativeInt = 0
    timeout_s: Annotated[Seconds, Field(gt=0)] | None = None
    retries: Retries | None = None


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
    """Equal replicas of the scenario's engine behind a router, or `pools` of engines that differ.

    network: between the nodes of a replica that is larger than one; of all pools
    """

    replicas: NonNegativeInt = 1
    router: RouterName = "round_robin"
    pools: tuple[PoolSpec, ...] = ()
    kv_transfer: KvTransferSpec = KvTransferSpec()
    network: NetworkSpec | None = None
    gateway: GatewaySpec | None = None
    autoscaling: AutoscalingSpec | None = None
    failures: FailuresSpec | None = None

    @field_validator("pools", mode="before")
    @classmethod
    def _are_some(cls, pools: Any) -> Any:
        if isinstance(pools, list) and not pools:
            raise ValueError("found an empty list, allowed at least one pool, or nothing for equal `replicas`")
        return () if pools is None else pools

    @field_validator("pools")
    @classmethod
    def _say_what_their_deployments_do(cls, pools: tuple[PoolSpec, ...]) -> tuple[PoolSpec, ...]:
        return completed(pools)

    @model_validator(mode="after")
    def _pools_make_a_cluster(self) -> "ClusterSpec":
        if self.pools and "replicas" in self.model_fields_set:
            raise ValueError("found replicas beside pools; each pool has its own `replicas`, leave this one out")
        for deployment in self.deployments:
            deployment.check(self.pools)
        if "kv_transfer" in self.model_fields_set and not self.is_disaggregated:
            raise ValueError("found kv_transfer without a prefill and a decode pool; only between these is KV moved")
        if self.pools and self.autoscaling is not None:
            raise ValueError("found autoscaling beside pools; each pool has its own `autoscaling`, move it there")
        self._check_shares()
        self._check_failures()
        return self

    def _check_shares(self) -> None:
        served = [deployment for deployment in self.deployments if not deployment.is_shadow]
        shares = [deployment.share for deployment in served if deployment.share is not None]
        if self.pools and not served:
            raise ValueError("found shadow pools only; at least one pool must answer the requests")
        if shares and (len(shares) < len(served) or abs(sum(shares) - 1) > 1e-6):
            raise ValueError(
                f"found shares that add up to {sum(shares):g} in {len(shares)} of {len(served)} pools, or deployments "
                f"of pools; give each a share (shadow ones aside), together 1"
            )
        if any(pool.model is not None and pool.share is None for pool in self.pools):
            raise ValueError("found a pool with a model of its own and no share; give its share of the requests")

    def _check_failures(self) -> None:
        pools = self.pools or (PoolSpec(replicas=self.replicas, autoscaling=self.autoscaling),)
        failures = self.failures or FailuresSpec(mtbf_s=1.0)
        for what, event in [("failure", each) for each in failures.events] + [
            ("slowdown", each) for each in failures.slowdowns
        ]:
            if event.pool >= len(pools) or event.replica >= pools[event.pool].most_replicas:
                raise ValueError(
                    f"found a {what} of replica {event.replica} in pool {event.pool}; both count from 0, and there "
                    f"are {', '.join(str(pool.most_replicas) for pool in pools)} replicas"
                )
            if pools[event.pool].shadow:
                raise ValueError(f"found a {what} in pool {event.pool}, a shadow; its answers are discarded")

    @property
    def is_dynamic(self) -> bool:
        """Whether a gateway has to watch over the requests, and not the router alone."""
        extras = (self.gateway, self.autoscaling, self.failures)
        return any(extra is not None for extra in extras) or any(pool.autoscaling or pool.share for pool in self.pools)

    @property
    def deployments(self) -> tuple[PoolGroup, ...]:
        """Pools that serve the same requests, in the order of their first ones."""
        return deployments(self.pools)

    @property
    def is_disaggregated(self) -> bool:
        """Whether prompts are computed by other replicas than the ones that decode, for some of the requests."""
        return any(pool.role == "prefill" for pool in self.pools)

"""`ClusterSpec`: replicas or pools, autoscaling, failures, router, gateway and KV transfer."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator

from perfmodel.files.base import CheckedSpec, Resolved, Spec
from perfmodel.files.units import BytesPerSecond, NonNegativeInt, PositiveFloat, PositiveInt, Seconds
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.autoscaling import AutoscalingSpec
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import GivenLink, HardwareSpec, HostSpec, NetworkSpec

_Affinity = Literal["prefix_affinity", "session_affinity", "lora_affinity"]
RouterName = Literal["round_robin", "random", "power_of_two", "least_outstanding", "least_kv", _Affinity]


class FailureEvent(Spec):
    """The replica of this number in the pool of this number (from 0) dies at `at_s` and is away for `down_s`."""

    at_s: Annotated[Seconds, Field(ge=0)]
    pool: NonNegativeInt = 0
    replica: NonNegativeInt = 0
    down_s: Annotated[Seconds, Field(ge=0)] | None = None


class Slowdown(Spec):
    """Steps of this replica in this pool (from 0) take `factor` times as long from `at_s` on, for `for_s` or always."""

    factor: Annotated[float, Field(gt=1)]
    pool: NonNegativeInt = 0
    replica: NonNegativeInt = 0
    at_s: Annotated[Seconds, Field(ge=0)] = 0.0
    for_s: Annotated[Seconds, Field(gt=0)] | None = None


class FailuresSpec(CheckedSpec):
    """Replicas die, and what they had in hand and in their KV caches with them; `slowdowns` of some make stragglers.

    mtbf_s:      mean time between failures of one replica, exponentially distributed
    detection_s: until health checks notice that a replica is dead, at the latest when it may start again; requests are
                 sent to it until then, and wait with those that it had"""

    mtbf_s: Annotated[Seconds, Field(gt=0)] | None = None
    repair_s: Annotated[Seconds, Field(ge=0)] = 60.0  # until it may start again
    start_s: Annotated[Seconds, Field(ge=0)] = 60.0  # how long it then takes to start, where no autoscaling says so
    detection_s: Annotated[Seconds, Field(ge=0)] = 0.0
    events: tuple[FailureEvent, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()

    def _conflicts(self) -> Iterator[str]:
        if self.mtbf_s is None and not (self.events or self.slowdowns):
            yield "needs `mtbf_s`, or `events` with the times, or `slowdowns`"


class PoolSpec(CheckedSpec):
    """Equal replicas with one role.

    deployment: pools of one name serve the same requests together: behind one router, or as prefill and decode;
                without a name a unified pool with a share is a deployment of its own, all others are one
    model:    another model, or another version of it, for a `share` of the requests; the scenario's unless given
    share:    of the requests, by a hash of their numbers; else the router chooses among all pools without one
    hardware: the scenario's, unless given
    router:   how requests are shared out over the pool's replicas; the cluster's, unless given

    What one pool of a deployment says about its model, share and shadow goes for all of them."""

    name: str | None = None
    deployment: str | None = None
    role: Literal["unified", "prefill", "decode", "encode"] = "unified"
    replicas: NonNegativeInt = 1
    engine: EngineSpec = EngineSpec()  # in a file, what differs from the scenario's `engine`; here, all of it
    hardware: (
        Annotated[HardwareSpec, Resolved("A name in hardware_specs, or a path; the scenario's unless given")] | None
    ) = None
    router: RouterName | None = None
    model: (
        Annotated[ModelSpec, Resolved("A name in workloads/models, or a path; the scenario's unless given")] | None
    ) = None
    share: float | None = Field(default=None, gt=0, le=1)
    shadow: bool = False  # its `share` are copies: the answers are discarded, and nothing but its cost is counted
    autoscaling: AutoscalingSpec | None = None

    @property
    def most_replicas(self) -> int:
        """Maximum number of replicas."""
        return max(self.replicas, self.autoscaling.max_replicas if self.autoscaling is not None else 0)

    def _conflicts(self) -> Iterator[str]:
        if not self.most_replicas:
            yield "got 0 replicas, and no autoscaling that would start any; give at least 1"


class PoolGroup(NamedTuple):
    """`pools`: positions in the cluster; `share`: of the requests; None: all."""

    name: str | None
    pools: tuple[int, ...]
    share: float | None
    is_shadow: bool
    is_disaggregated: bool

    def conflicts(self, pools: Sequence[PoolSpec]) -> Iterator[str]:
        """A sentence per reason why `pools` of the cluster make no deployment."""
        roles = Counter(pools[number].role for number in self.pools)
        where = "" if self.name is None else f" in deployment {self.name}"
        if bool(roles["prefill"]) != bool(roles["decode"]):
            missing = "decode" if roles["prefill"] else "prefill"
            yield f"no pool has role {missing}{where}; prefill and decode pools need each other"
        if roles["unified"] and roles["prefill"]:
            yield (
                f"got unified pools beside prefill and decode ones{where}; give each kind a `share` of the requests, "
                f"and a `deployment` name where there are several of a kind"
            )
        if self.is_shadow and self.share is None:
            yield f"got shadow without share{where}; say of which share of the requests it gets copies"


def deployments(pools: Sequence[PoolSpec]) -> tuple[PoolGroup, ...]:
    """Deployments of `pools`, in order of their first pool."""
    return tuple(
        PoolGroup(
            name if isinstance(name, str) else None,
            tuple(numbers),
            pools[numbers[0]].share,
            pools[numbers[0]].shadow,
            any(pools[number].role == "prefill" for number in numbers),
        )
        for name, numbers in _grouped(pools).items()
    )


def completed(pools: Sequence[PoolSpec]) -> tuple[PoolSpec, ...]:
    """`pools` with model, share and shadow of their deployment. Raises ValueError where two disagree."""
    complete = list(pools)
    for numbers in _grouped(pools).values():
        common: dict[str, Any] = {}
        for field in ("model", "share", "shadow"):
            values = [value for number in numbers if (value := getattr(pools[number], field))]
            if any(value != values[0] for value in values):
                raise ValueError(f"got more than one {field} in the pools of a deployment; give it once for all")
            if values:
                common[field] = values[0]
        for number in numbers if len(numbers) > 1 and common else ():
            complete[number] = pools[number].model_copy(update=common)
    return tuple(complete)


def _grouped(pools: Sequence[PoolSpec]) -> dict[str | int | None, list[int]]:
    groups: dict[str | int | None, list[int]] = {}
    for number, pool in enumerate(pools):
        if pool.role == "encode":
            continue  # in front of the deployment
        is_alone = pool.deployment is None and pool.role == "unified" and pool.share is not None
        groups.setdefault(number if is_alone else pool.deployment, []).append(number)
    return groups


class RateLimit(Spec):
    """A token bucket: `requests_per_s` on average, at most `burst` at once. What comes above it is refused."""

    requests_per_s: PositiveFloat
    burst: PositiveInt = 1


class Retries(Spec):
    """A request that was refused, or whose replica failed, is sent again at most `max` times.

    Before the n-th time it waits backoff_s x factor^(n-1) x (1 - jitter x u), u uniform in [0, 1): a jitter of 1 is
    what is called full jitter."""

    max: PositiveInt = 3
    backoff_s: Annotated[Seconds, Field(ge=0)] = 0.5
    factor: Annotated[float, Field(ge=1)] = 2.0
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.5


class VtcSpec(Spec):
    """Fairness by virtual token counters; classes of traffic are the tenants.

    input_weight, output_weight: of a prompt and an output token in a tenant's service; 1 and 2 are the paper's"""

    input_weight: PositiveFloat = 1.0
    output_weight: PositiveFloat = 2.0


class GatewaySpec(CheckedSpec):
    """Limits and patience; each is without effect unless given.

    max_outstanding: requests that the replicas have in hand at most; what comes above it waits in the gateway, by
                     priority, if it still holds fewer than `max_queue`, and is refused if not
    scheduling_policy: whose turn it is there: priority, then arrival; vtc: the class with the least service for its
                     `weight`, of which each has a queue of `max_queue`
    timeout_s:       how long a client waits for the whole answer, retries included; what is left of it is aborted"""

    rate_limit: RateLimit | None = None
    max_outstanding: PositiveInt | None = None
    max_queue: NonNegativeInt = 0
    timeout_s: Annotated[Seconds, Field(gt=0)] | None = None
    retries: Retries | None = None
    scheduling_policy: Literal["priority", "vtc"] = "priority"
    vtc: VtcSpec = VtcSpec()

    def _conflicts(self) -> Iterator[str]:
        if self.scheduling_policy == "vtc" and not (self.max_outstanding and self.max_queue):
            yield "got scheduling_policy vtc without a queue; give max_outstanding and max_queue"
        if self.scheduling_policy != "vtc" and self.vtc != VtcSpec():
            yield f"got vtc with scheduling_policy {self.scheduling_policy}; set scheduling_policy: vtc"


class KvTransferSpec(GivenLink, CheckedSpec):
    """How KV blocks get from a prefill to a decode replica: every device over its own link, in and out.

    latency_s: handshake and descriptors included
    shared:    all links lead into one fabric of `fabric_bandwidth_bytes_per_s`, that of one link unless given"""

    layerwise: bool = False  # each layer's KV leaves while the next is computed
    shared: bool = False
    fabric_bandwidth_bytes_per_s: BytesPerSecond | None = Field(default=None, gt=0)

    def _conflicts(self) -> Iterator[str]:
        if self.fabric_bandwidth_bytes_per_s is not None and not self.shared:
            yield "got fabric_bandwidth_bytes_per_s without shared: true; only a shared fabric has one"


class ClusterSpec(CheckedSpec):
    """Equal replicas of the scenario's engine behind a router, or `pools` of engines that differ.

    front_ends: servers that share the requests in turn, each with a router of its own, which counts its own turns"""

    replicas: NonNegativeInt = 1
    router: RouterName = "round_robin"
    front_ends: PositiveInt = 1
    pools: tuple[PoolSpec, ...] = ()
    kv_transfer: KvTransferSpec = KvTransferSpec()
    network: NetworkSpec | None = None  # between the nodes of a replica that is larger than one; of all pools
    host: HostSpec | None = None  # of each replica, of all pools; else that of the hardware
    gateway: GatewaySpec | None = None
    autoscaling: AutoscalingSpec | None = None
    failures: FailuresSpec | None = None
    ec_transfer: GivenLink = GivenLink()  # from encode pools, what their encoders have made of images

    @field_validator("pools", mode="before")
    @classmethod
    def _are_some(cls, pools: Any) -> Any:
        if isinstance(pools, list) and not pools:
            raise ValueError("got an empty list; expected at least one pool, or nothing for equal `replicas`")
        return () if pools is None else pools

    _say_what_their_deployments_do = field_validator("pools")(completed)

    def _conflicts(self) -> Iterator[str]:
        if self.pools and "replicas" in self.model_fields_set:
            yield "got replicas beside pools; each pool has its own `replicas`, leave this one out"
        yield from self._conflicts_of_encoders()
        for deployment in self.deployments:
            yield from deployment.conflicts(self.pools)
        if "kv_transfer" in self.model_fields_set and not self.is_disaggregated:
            yield "got kv_transfer without a prefill and a decode pool; only between these is KV moved"
        if self.pools and self.autoscaling is not None:
            yield "got autoscaling beside pools; each pool has its own `autoscaling`, move it there"
        served = [deployment for deployment in self.deployments if not deployment.is_shadow]
        shares = [deployment.share for deployment in served if deployment.share is not None]
        if self.pools and not served and any(pool.shadow for pool in self.pools):
            yield "got shadow pools only; at least one pool must answer the requests"
        if shares and (len(shares) < len(served) or abs(sum(shares) - 1) > 1e-6):
            yield (
                f"got shares that add up to {sum(shares):g} in {len(shares)} of {len(served)} pools, or deployments "
                f"of pools; give each a share (shadow ones aside), together 1"
            )
        if any(pool.model is not None and pool.share is None for pool in self.pools):
            yield "got a pool with a model of its own and no share; give its share of the requests"
        pools = self.pools or (PoolSpec(replicas=self.replicas, autoscaling=self.autoscaling),)
        failures = self.failures or FailuresSpec(mtbf_s=1.0)
        events: tuple[FailureEvent | Slowdown, ...] = (*failures.events, *failures.slowdowns)
        for event in events:
            what = "failure" if isinstance(event, FailureEvent) else "slowdown"
            if event.pool >= len(pools) or event.replica >= pools[event.pool].most_replicas:
                yield (
                    f"got a {what} of replica {event.replica} in pool {event.pool}; both count from 0, and there "
                    f"are {', '.join(str(pool.most_replicas) for pool in pools)} replicas"
                )
            elif pools[event.pool].shadow:
                yield f"got a {what} in pool {event.pool}, a shadow; its answers are discarded"

    def _conflicts_of_encoders(self) -> Iterator[str]:
        encoders = [pool for pool in self.pools if pool.role == "encode"]
        if "ec_transfer" in self.model_fields_set and not encoders:
            yield "got ec_transfer without an encode pool; only from there are features moved"
        if encoders and len(encoders) == len(self.pools):
            yield "got encode pools alone; add unified pools, or prefill and decode ones, for the text"
        if encoders and self.is_dynamic:
            yield (
                "got an encode pool beside a gateway, autoscaling, failures or shares, which is not modelled together; "
                "leave out one of the two"
            )
        for engine in (pool.engine for pool in encoders):
            if engine.num_devices > engine.tensor_parallel_size:
                yield (
                    f"got an encode pool with {engine.num_devices} devices an engine at tensor_parallel_size="
                    f"{engine.tensor_parallel_size}; encoders have no other ranks: set the other sizes to 1, and raise "
                    f"`replicas`"
                )

    @property
    def is_dynamic(self) -> bool:
        """Whether a gateway has to track requests."""
        extras = (self.gateway, self.autoscaling, self.failures)
        return any(extra is not None for extra in extras) or any(pool.autoscaling or pool.share for pool in self.pools)

    @property
    def deployments(self) -> tuple[PoolGroup, ...]:
        """Deployments: pools that serve the same requests, in order of their first pool."""
        return deployments(self.pools)

    @property
    def is_disaggregated(self) -> bool:
        """Whether some requests prefill and decode on different replicas."""
        return any(pool.role == "prefill" for pool in self.pools)

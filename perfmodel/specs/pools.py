"""`PoolSpec`: equal replicas of one role, and the deployments that pools make together."""

__all__ = ["PoolGroup", "PoolSpec", "RouterName", "completed", "deployments"]

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from perfmodel.files.amounts import NonNegativeInt
from perfmodel.files.base import Resolved, Spec
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.autoscaling import AutoscalingSpec
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec

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

    deployment: pools of one name serve the same requests together: behind one router, or as prefill and decode;
                without a name a unified pool with a share is a deployment of its own, all others are one
    model:    another model, or another version of it, for a `share` of the requests; the scenario's unless given
    share:    of the requests, by a hash of their numbers; else the router chooses among all pools without one
    shadow:   its `share` are copies: the answers are discarded, and nothing but its cost is counted
    engine:   in a file, what differs from the scenario's `engine`; here, all of it
    hardware: the scenario's, unless given
    router:   how requests are shared out over the pool's replicas; the cluster's, unless given

    What one pool of a deployment says about its model, share and shadow goes for all of them.
    """

    name: str | None = None
    deployment: str | None = None
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
    def _has_replicas(self) -> "PoolSpec":
        if not self.most_replicas:
            raise ValueError("found 0 replicas, and no autoscaling that would start any; give at least 1")
        return self


class PoolGroup(NamedTuple):
    """`pools`: the positions of its pools in the cluster; `share`: of the requests, all unless there is one."""

    name: str | None
    pools: tuple[int, ...]
    share: float | None
    is_shadow: bool
    is_disaggregated: bool

    def check(self, pools: Sequence[PoolSpec]) -> None:
        """Raise ValueError unless its pools, of the cluster's `pools`, make a deployment."""
        roles = Counter(pools[number].role for number in self.pools)
        where = "" if self.name is None else f" in deployment {self.name}"
        if bool(roles["prefill"]) != bool(roles["decode"]):
            missing = "decode" if roles["prefill"] else "prefill"
            raise ValueError(f"found no pool with role {missing}{where}; prefill and decode pools need each other")
        if roles["unified"] and roles["prefill"]:
            raise ValueError(
                f"found unified pools beside prefill and decode ones{where}; give each kind a `share` of the requests, "
                f"and a `deployment` name where there are several of a kind"
            )
        if self.is_shadow and self.share is None:
            raise ValueError(f"found shadow without share{where}; say of which share of the requests it gets copies")


def deployments(pools: Sequence[PoolSpec]) -> tuple[PoolGroup, ...]:
    """The deployments that `pools` make, in the order of their first pools."""
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
    """`pools`, each with the model, share and shadow of its deployment. Raises ValueError where two disagree."""
    complete = list(pools)
    for numbers in _grouped(pools).values():
        common: dict[str, Any] = {}
        for field in ("model", "share", "shadow"):
            said = [value for number in numbers if (value := getattr(pools[number], field))]
            if any(value != said[0] for value in said):
                raise ValueError(f"found more than one {field} in the pools of a deployment; give it once for all")
            common |= {field: said[0]} if said else {}
        for number in numbers if len(numbers) > 1 and common else ():
            complete[number] = pools[number].model_copy(update=common)
    return tuple(complete)


def _grouped(pools: Sequence[PoolSpec]) -> dict[str | int | None, list[int]]:
    groups: dict[str | int | None, list[int]] = {}
    for number, pool in enumerate(pools):
        is_alone = pool.deployment is None and pool.role == "unified" and pool.share is not None
        groups.setdefault(number if is_alone else pool.deployment, []).append(number)
    return groups

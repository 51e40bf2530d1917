"""`PoolSpec`: a number of equal replicas with one role.

`unified` ones compute prompts and decode; in a disaggregated deployment `prefill` ones compute prompts and sample the
first token, `decode` ones fetch the prompt's KV cache and go on.
"""

__all__ = ["PoolSpec", "RouterName"]

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, model_validator

from perfmodel.specs.autoscaling import AutoscalingSpec
from perfmodel.specs.base import Spec
from perfmodel.specs.engine import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.model.spec import ModelSpec
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

    deployment: pools of one name serve the same requests together: behind one router, or as prefill and decode;
                without a name a unified pool with a share is a deployment of its own, all others are one
    model:    another model, or another version of it, for a `share` of the requests; the scenario's unless given
    share:    of the requests, by a hash of their numbers; else the router chooses among all pools without one
    shadow:   its `share` are copies: nobody waits for the answers, and nothing but its costs is counted
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

"""`ClusterSpec`: which engines serve the traffic together: equal replicas, or pools of them, and the link between.

A pool is a number of equal replicas with a role. `unified` ones compute prompts and decode; in a disaggregated cluster
`prefill` ones compute prompts and sample the first token, `decode` ones fetch the prompt's KV cache and go on.
"""

__all__ = ["ClusterSpec", "KvTransferSpec", "PoolSpec"]

from collections import Counter
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from perfmodel.specs.base import Spec
from perfmodel.specs.engine import EngineSpec
from perfmodel.specs.hardware import HardwareSpec, Link
from perfmodel.specs.resolved import Resolved
from perfmodel.specs.units import BytesPerSecond, Seconds

RouterName = Literal["round_robin", "least_outstanding", "prefix_affinity"]


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


class KvTransferSpec(Spec):
    """How KV blocks get from a prefill to a decode replica: every device over its own link, in and out.

    link:                  a link of the hardware file, the scale-up link unless given; another name needs a bandwidth
    bandwidth_bytes_per_s: one way, per device; the hardware file's unless given
    latency_s:             from request to first byte: handshake and descriptors; the link's own unless given
    """

    link: str | None = None
    bandwidth_bytes_per_s: BytesPerSecond | None = Field(default=None, gt=0)
    latency_s: Seconds | None = Field(default=None, ge=0)

    def link_of(self, hardware: HardwareSpec) -> Link:
        """The link as a device of `hardware` has it. Raises ValueError for one that nobody describes."""
        declared = hardware.scale_up_link if self.link is None else hardware.link(self.link)
        if declared is None and self.bandwidth_bytes_per_s is None:
            known = ", ".join(link.name for link in hardware.declared.links) or "none"
            raise ValueError(
                f"{hardware.name} has no link {self.link or 'at all'} (its links: {known}); name one of them, or give "
                f"bandwidth_bytes_per_s"
            )
        given = {
            "name": self.link,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "latency_s": self.latency_s,
        }
        update = {name: value for name, value in given.items() if value is not None}
        if declared is not None:
            return declared.model_copy(update=update)
        return Link.model_validate({"name": "link", **update})


class ClusterSpec(Spec):
    """Equal replicas of the scenario's engine behind a router, or `pools` of engines that differ."""

    replicas: PositiveInt = 1
    router: RouterName = "round_robin"
    pools: tuple[PoolSpec, ...] = ()
    kv_transfer: KvTransferSpec = KvTransferSpec()

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

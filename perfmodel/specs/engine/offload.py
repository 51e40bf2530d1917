"""`KvOffload`: where KV blocks go that the device has no room for, under the names of vLLM, LMCache and HiCache."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from perfmodel.files.base import CheckedSpec, Spec
from perfmodel.files.units import Bytes, BytesPerSecond, PositiveInt, Seconds
from perfmodel.specs.hardware import GivenLink


class SecondaryTier(Spec):
    """A store of KV blocks behind the host's memory: a local disk, or a remote store that replicas share.

    read_bandwidth_bytes_per_s, write_bandwidth_bytes_per_s: of the store; who reads at a time shares the former, who
    writes waits for who did before"""

    name: str = "disk"  # by which results name it, and pools share it
    capacity_bytes: Annotated[Bytes, Field(gt=0)] | None = None  # of the store; None: unlimited
    read_bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    write_bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)] | None = None  # that of reads unless given
    latency_s: Annotated[Seconds, Field(ge=0)] = 0.0  # of reading or writing up to 128 blocks, before their first byte
    shared: bool = False  # by all engines of the cluster; else every engine has such a store


class KvOffload(GivenLink, CheckedSpec):
    """A second tier for KV blocks, in the host's memory or on a disk, behind a link of each device.

    link, bandwidth_bytes_per_s, latency_s: the link to it; the latency is that of one block's copy
    rule:           KV of a preempted request, or of a prefix that left the device: copied back (restore), computed
                    again (recompute), or what the cost model says is quicker (faster)
    load:           blocks come for the step that admits their request (step), or beside steps while it waits (async:
                    vLLM's OffloadingConnector)
    write_policy:   blocks are copied when the device reuses them (write_back), when a prompt's step has computed them
                    (write_through), or after `store_threshold` prompts had them (write_through_selective)
    secondary_tiers: stores behind this tier, nearest first: what is copied here is copied on to all of them
    storage_prefetch_policy: they are read from a request's arrival on, which takes what has come by its turn
                    (best_effort) or waits for all (wait_complete); None: from its turn on, and it waits"""

    link: str | None = "pcie"
    capacity_bytes: Annotated[Bytes, Field(gt=0)]  # of the tier, per device
    rule: Literal["restore", "recompute", "faster"] = "faster"
    overlap: bool = True  # blocks come layer by layer while earlier layers compute; else the step waits for all of them
    load: Literal["step", "async"] = "step"
    write_policy: Literal["write_back", "write_through", "write_through_selective"] = "write_back"
    store_threshold: PositiveInt = 2  # prompts that had a block until it is copied, for write_through_selective
    secondary_tiers: tuple[SecondaryTier, ...] = ()
    storage_prefetch_policy: Literal["best_effort", "wait_complete"] | None = None

    @property
    def store_after(self) -> int:
        """Prompts that have a block until it is copied; 0: the device has to reuse it first."""
        return {"write_back": 0, "write_through": 1}.get(self.write_policy, self.store_threshold)

    @property
    def is_tiered(self) -> bool:
        """Whether it is more than blocks that leave the device and come back for a step."""
        return self.load == "async" or self.store_after > 0 or bool(self.secondary_tiers)

    def _conflicts(self) -> Iterator[str]:
        if self.load == "async" and "overlap" in self.model_fields_set:
            yield "got overlap with load=async, where no step waits for blocks; leave overlap out"
        if "store_threshold" in self.model_fields_set and self.write_policy != "write_through_selective":
            yield f"got store_threshold with write_policy={self.write_policy}; only write_through_selective counts"
        if self.storage_prefetch_policy is not None and not self.secondary_tiers:
            yield "got storage_prefetch_policy without secondary_tiers, which it reads; give one, or leave it out"
        names = [tier.name for tier in self.secondary_tiers]
        if len(set(names)) < len(names):
            yield f"got secondary_tiers with the names {', '.join(names)}; expected different ones"

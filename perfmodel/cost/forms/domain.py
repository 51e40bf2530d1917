"""`Domain`: which sizes a fit was made for, where an engine runs several kernels for one family and number format."""

__all__ = ["Domain", "distance"]

from collections.abc import Mapping
from math import log2
from typing import Any

from perfmodel.files.base import Spec

# What it costs to be out of a domain, in doublings of the head size: another kernel is worse than another size.
_OTHER_FORMAT = 4.0
_OTHER_GROUP = 8.0


class Domain(Spec):
    """What a library picks its kernel by; None is any.

    Attention: head size, KV format, group sizes (query heads per KV head). TensorRT-LLM decodes groups of 2 to 32 with
    one kernel, others with another. Experts: their gates (2 with one, else 1), and whether ranks share them out whole.
    """

    head_dim: int | None = None
    kv_element_bytes: float | None = None
    groups: tuple[tuple[int, int], ...] = ()  # inclusive ranges; none is any
    gates: int | None = None
    expert_parallel: bool | None = None

    def distance(self, extent: Mapping[str, Any]) -> float:
        """How far the sizes of a work are from this domain, 0 if inside or unknown."""
        far = 0.0
        head_dim, kv_bytes = extent.get("head_dim"), extent.get("kv_element_bytes")
        if self.head_dim and head_dim:
            far += abs(log2(head_dim / self.head_dim))
        if self.kv_element_bytes and kv_bytes:
            far += _OTHER_FORMAT * abs(log2(kv_bytes / self.kv_element_bytes))
        if self.groups and extent.get("kv_heads"):
            group = extent["heads"] / extent["kv_heads"]
            if not any(low <= group < high + 1 for low, high in self.groups):
                far += _OTHER_GROUP
        if self.gates is not None and "gates" in extent:
            far += _OTHER_GROUP * (self.gates != extent["gates"])
        if self.expert_parallel is not None and "local_experts" in extent:
            far += _OTHER_FORMAT * (self.expert_parallel != (extent["local_experts"] < extent["experts"]))
        return far


def distance(fit: Spec, extent: Mapping[str, Any]) -> float:
    """How far the sizes of a work are from the domain of a fit; a fit without one takes any."""
    domain = getattr(fit, "domain", None)
    return domain.distance(extent) if isinstance(domain, Domain) else 0.0

"""`Domain`: which sizes a fit was made for, where an engine runs several kernels for one family and number format."""

__all__ = ["Domain", "distance"]

from math import log2

from perfmodel.files.base import Spec
from perfmodel.ops.extents import KernelTraits

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

    def distance(self, traits: KernelTraits) -> float:
        """How far what a kernel is picked by is from this domain, 0 if inside or unknown."""
        far = 0.0
        if self.head_dim and traits.head_dim:
            far += abs(log2(traits.head_dim / self.head_dim))
        if self.kv_element_bytes and traits.kv_element_bytes:
            far += _OTHER_FORMAT * abs(log2(traits.kv_element_bytes / self.kv_element_bytes))
        if self.groups and traits.group and not any(low <= traits.group < high + 1 for low, high in self.groups):
            far += _OTHER_GROUP
        if self.gates is not None and traits.gates:
            far += _OTHER_GROUP * (self.gates != traits.gates)
        if self.expert_parallel is not None and traits.gates:
            far += _OTHER_FORMAT * (self.expert_parallel != traits.shares_experts)
        return far


def distance(fit: Spec, traits: KernelTraits | None) -> float:
    """How far what a kernel is picked by is from the domain of a fit; a fit without one takes any."""
    domain = getattr(fit, "domain", None)
    return domain.distance(traits) if traits is not None and isinstance(domain, Domain) else 0.0

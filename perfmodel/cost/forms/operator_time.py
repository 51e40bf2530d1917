"""`OperatorTime`: how long one operator takes, and what each resource alone would take."""

__all__ = ["OperatorTime", "bound_of"]

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Seconds of one operator on one device: in all, and what each resource alone would take.

    bound: the resource that takes longest: compute | memory | communication | overhead
    clock: share of the full clock that a power cap leaves
    """

    duration_s: float
    compute_s: float
    memory_s: float
    communication_s: float
    overhead_s: float
    bound: str
    clock: float = 1.0


def bound_of(compute: float, memory: float, communication: float, overhead: float) -> str:
    """The resource that takes longest."""
    largest = max(compute, memory, communication, overhead)
    if largest == memory:
        return "memory"
    if largest == compute:
        return "compute"
    return "communication" if largest == communication else "overhead"

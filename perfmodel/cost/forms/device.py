"""What a form is given of a device, and what it answers: declared figures to scale with, seconds by resource."""

__all__ = ["DeviceFacts", "OperatorTime", "bound_of"]

from dataclasses import dataclass, field

from perfmodel.cost.forms.messages.links import DEFAULT_LINK
from perfmodel.cost.rates import peak_flops_per_s
from perfmodel.ops.messages import Message, RankGroup, Spread, spread_over
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.networks import Link

# Cache to assume where a file declares none: forms only ask whether something fits in it.
_SMALLEST_L2_BYTES = 4e6


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Declared peaks of one device, ready to divide by.

    bandwidth:      of the outermost memory, for data, byte/s
    link_bandwidth: one way, to sibling devices, byte/s (0 without a link)
    link:           the same with its name
    network:        a device's share of what joins nodes, of `devices_per_node` each
    """

    hardware: HardwareSpec
    compute_units: int
    clock_hz: float
    bandwidth: float
    l2_bytes: float
    link_bandwidth: float
    link: Link
    network: Link
    devices_per_node: int
    _peaks: dict[str, float] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, hardware: HardwareSpec) -> "DeviceFacts":
        declared, link = hardware.declared, hardware.scale_up_link
        l2 = hardware.level("l2")
        return cls(
            hardware=hardware,
            compute_units=declared.compute_units,
            clock_hz=declared.clock_hz,
            bandwidth=hardware.data_bandwidth,
            l2_bytes=l2.capacity_bytes if l2 else _SMALLEST_L2_BYTES,
            link_bandwidth=link.bandwidth_bytes_per_s if link else 0.0,
            link=link or DEFAULT_LINK,
            network=hardware.network_link,
            devices_per_node=hardware.devices_per_node,
        )

    def spread(self, message: Message) -> Spread:
        """Over how many nodes a message's group is spread, and how."""
        return spread_over(message.group or RankGroup("tensor", message.num_ranks), self.devices_per_node)

    @property
    def vector_instructions(self) -> float:
        """Instructions per second of the lanes beside the tensor cores: half the FLOP/s, a multiply-add being two."""
        return self.peak("vector") / 2

    def peak(self, rate: str) -> float:
        """Dense FLOP/s of a number format, or of what it falls back to."""
        peak = self._peaks.get(rate)
        if peak is None:
            peak = self._peaks[rate] = peak_flops_per_s(self.hardware, rate)
        return peak


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
    """The resource that takes longest.

    compute, memory, communication, overhead: seconds that each takes alone
    """
    largest = max(compute, memory, communication, overhead)
    if largest == memory:
        return "memory"
    if largest == compute:
        return "compute"
    return "communication" if largest == communication else "overhead"

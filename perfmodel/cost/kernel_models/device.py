"""Device facts that forms scale with, their result by resource, and sustained clocks under TDP.

A rate may stand for a format that the device lacks (FALLBACKS). Declared peaks are units times the highest clock.
Operations at the full rate R draw R e watts at e joules each; dynamic power of CMOS is C V^2 f and voltage follows the
clock, so a device with a smaller TDP sustains the share

    s = min(1, (TDP / (R e))^(1/3))

of its peak. A format of half the bytes doubles the rate but saves less than half of the energy, so FP8 reaches less of
its peak than BF16, and FP4 less than FP8. Fits to measured kernels include this; for other makers the share stands
between the datasheet and what their software reaches.
Source: Afzal et al. 2026 (power and clock of A40 to H200); e is fitted to measured matrix products of four generations.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from perfmodel.ops.formats import MMA_SYNC_RATE, SPARSE_RATE
from perfmodel.ops.messages import Message, RankGroup, Spread, spread_over
from perfmodel.specs.architectures import find_architecture
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.networks import Link

DEFAULT_LINK = Link(name="pcie", bandwidth_bytes_per_s=31.5e9)  # PCIe 4.0 x16, where a file declares no link at all
# A format that the device lacks is converted to the next wider one that it has (weight-only kernels: Marlin's FP8 on
# Ampere, int4 everywhere); narrower integers never replace floats. The last resort is the fastest declared rate.
FALLBACKS: dict[str, tuple[str, ...]] = {
    "fp4": ("fp8", "bf16", "fp16", "fp32"),
    "fp6": ("fp8", "bf16", "fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "int4": ("int8", "fp8", "bf16", "fp16", "fp32"),
    "int8": ("fp8", "bf16", "fp16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "fp16_acc16": ("fp16", "bf16", "fp32"),  # as fast as with FP32 sums where nothing else is declared
    "tf32": ("fp32",),
    "fp32": ("tf32", "bf16", "fp16"),
}
_VECTOR_SHARE = 1 / 16  # of the bf16 rate, where neither a vector nor an fp32 rate is declared (A100: 19.5 of 312)
# Cache to assume where a file declares none: forms only ask whether something fits in it.
_SMALLEST_L2_BYTES = 4e6
# Of L2 that one kernel's operands can count on: all are there up to this share, none from twice of it on [assumed].
CACHED_SHARE = 0.7


@lru_cache(maxsize=4096)
def _peak(rates: tuple[tuple[str, float], ...], vector: float | None, rate: str) -> float:
    declared = dict(rates)
    if rate == "vector":
        return vector or declared.get("fp32") or max(declared.values()) * _VECTOR_SHARE
    names = (rate, *FALLBACKS.get(rate, ("bf16", "fp16", "fp32")))
    return next((declared[name] for name in names if name in declared), max(declared.values()))


def peak_flops_per_s(hardware: HardwareSpec, rate: str) -> float:
    """Dense peak of `rate`: declared, or that of its fallback (FALLBACKS). "vector" is the non-tensor rate:
    `vector_flops_per_s`, else fp32. "bf16@2:4" is bf16 times `sparsity_speedup`, or the format's own speedup."""
    declared = hardware.declared
    if rate.endswith(MMA_SYNC_RATE):
        share = find_architecture(declared.architecture).mma_sync_share
        return share * peak_flops_per_s(hardware, rate.removesuffix(MMA_SYNC_RATE))
    if rate.endswith(SPARSE_RATE):
        dense = rate.removesuffix(SPARSE_RATE)
        speedup = declared.sparsity_speedups.get(dense, declared.sparsity_speedup)
        return speedup * peak_flops_per_s(hardware, dense)
    return _peak(tuple(declared.peak_flops_per_s.items()), declared.vector_flops_per_s, rate)


def ridge_point(hardware: HardwareSpec, rate: str = "bf16") -> float:
    """FLOP per HBM byte with equal compute and memory time (A100 80 GB, bf16: 312e12 / 2039e9 = 153)."""
    return peak_flops_per_s(hardware, rate) / hardware.memory_bandwidth


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Declared peaks of one device, ready to divide by.

    bandwidth:      of the outermost memory for data, byte/s
    link_bandwidth: one way, to sibling devices, byte/s (0 without a link)
    link:           the same with its name
    network:        a device's share, between nodes of `devices_per_node` devices
    tdp_w:          maximum power"""

    hardware: HardwareSpec
    compute_units: int
    clock_hz: float
    bandwidth: float
    l2_bytes: float
    link_bandwidth: float
    link: Link
    network: Link
    devices_per_node: int
    tdp_w: float
    _peaks: dict[str, float] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, hardware: HardwareSpec) -> "DeviceFacts":
        declared, link, l2 = hardware.declared, hardware.scale_up_link, hardware.level("l2")
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
            tdp_w=tdp_w(hardware),
        )

    def spread(self, message: Message) -> Spread:
        """The spread of a message's group over nodes."""
        return spread_over(message.group or RankGroup("tensor", message.num_ranks), self.devices_per_node)

    @property
    def has_own_host(self) -> bool:
        """Whether the host is the maker's own CPU, joined by NVLink (GH200, GB200)."""
        return any(link.name == "nvlink_c2c" for link in self.hardware.declared.links)

    @property
    def vector_instructions(self) -> float:
        """Vector instructions per second: half the FLOP/s, as a multiply-add is two."""
        return self.peak("vector") / 2

    @property
    def exponentials(self) -> float:
        """Exponentials per clock and compute unit, in those of GPUs from Volta to Blackwell."""
        return self.hardware.declared.exponentials_per_clock / 16

    def peak(self, rate: str) -> float:
        """Dense FLOP/s of a number format, or of its fallback."""
        peak = self._peaks.get(rate)
        if peak is None:
            peak = self._peaks[rate] = peak_flops_per_s(self.hardware, rate)
        return peak


class OperatorTime(NamedTuple):
    """Seconds of one operator on one device, in all and by resource alone. bound: the resource that takes longest:
    compute | memory | communication | overhead; clock: share of the full clock under a power cap"""

    duration_s: float
    compute_s: float
    memory_s: float
    communication_s: float
    overhead_s: float
    bound: str
    clock: float = 1.0

    @classmethod
    def of(
        cls, duration: float, compute: float, memory: float, overhead: float | None = None, communication: float = 0.0
    ) -> "OperatorTime":
        """The time with its bound. duration, compute, memory, communication, overhead: seconds; without overhead it is
        what neither compute nor memory explains"""
        if overhead is None:
            overhead = max(0.0, duration - max(compute, memory))
        bound = bound_of(compute, memory, communication, overhead)
        return cls(duration, compute, memory, communication, overhead, bound)

    def times(self, factor: float) -> "OperatorTime":
        duration, compute, memory, communication, overhead = (factor * seconds for seconds in self[:5])
        return OperatorTime(duration, compute, memory, communication, overhead, self.bound, self.clock)

    @classmethod
    def on_the_wire(cls, duration: float) -> "OperatorTime":
        """The time of a message; latency counts as communication."""
        return cls(duration, 0.0, 0.0, duration, 0.0, "communication")


def bound_of(compute: float, memory: float, communication: float, overhead: float) -> str:
    """The resource that takes longest, of seconds of compute, memory, communication and overhead."""
    largest = max(compute, memory, communication, overhead)
    if largest == memory:
        return "memory"
    return "compute" if largest == compute else "communication" if largest == communication else "overhead"


NO_TIME = OperatorTime(0.0, 0.0, 0.0, 0.0, 0.0, "overhead")

# Where a file declares no TDP [assumed]; a CPU by core (Xeon 8480+: 350 W for 56 cores).
_TDP_W = {"gpu": 400.0, "tpu": 200.0, "npu": 600.0, "fpga": 100.0}
_CPU_CORE_W = 6.25


def tdp_w(hardware: HardwareSpec) -> float:
    """Maximum power in watts: declared, or assumed for the kind of device."""
    declared = hardware.declared
    assumed = _CPU_CORE_W * declared.compute_units if hardware.kind == "cpu" else _TDP_W[hardware.kind]
    return declared.tdp_w or assumed


def sustained_share(tdp: float, rate: float, operation_j: float) -> float:
    """The share of `rate` (operations/s) that `tdp` watts sustain; operation_j: joules per operation (0: nothing)."""
    drawn = rate * operation_j
    return 1.0 if drawn <= tdp else (tdp / drawn) ** (1 / 3)

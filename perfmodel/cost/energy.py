"""What a device draws, and what it costs: watts and joules from how busy its memory and its arithmetic units were.

    P = min(TDP, idle + (TDP - idle) (u_compute + 0.5 u_memory)),    E = P t

with u the shares of the declared peaks over the time t. A GPU at its full tensor rate draws its TDP; one that only
streams memory draws about half of the rest: decoding on A100s (Splitwise's power traces) stays at 0.43-0.46 of TDP.
Under a power cap (`perfmodel.cost.power_cap`) a FLOP at a lower clock takes less, and the cap stands for TDP.
What it does not know: the host, cooling.
"""

__all__ = [
    "MEMORY_SHARE",
    "DeviceUsage",
    "device_power_w",
    "energy_j",
    "energy_split_j",
    "idle_power_w",
    "tdp_w",
    "usd_per_hour",
    "usd_per_million_tokens",
]

from typing import Protocol

from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import PriceOverride

MEMORY_SHARE = 0.5  # of what full arithmetic draws beside idle
_IDLE_SHARE = 0.15  # of TDP, where idle power is not declared (A100: 50-60 of 400 W)
# Where a file declares no TDP [assumed]; a CPU by core (Xeon 8480+: 350 W for 56 cores).
_TDP_W = {"gpu": 400.0, "tpu": 200.0, "npu": 600.0, "fpga": 100.0}
_CPU_CORE_W = 6.25


class DeviceUsage(Protocol):
    """Totals of one device over a run."""

    @property
    def peak_compute_s(self) -> float:
        """Seconds that the FLOPs take at the declared peak rates."""

    @property
    def unspent_compute_s(self) -> float:
        """Compute seconds whose energy lower clocks have saved."""

    @property
    def hbm_bytes(self) -> float: ...


def tdp_w(hardware: HardwareSpec) -> float:
    """What the device draws at most: declared, or assumed for its kind."""
    declared = hardware.declared
    assumed = _CPU_CORE_W * declared.compute_units if hardware.kind == "cpu" else _TDP_W[hardware.kind]
    return declared.tdp_w or assumed


def idle_power_w(hardware: HardwareSpec) -> float:
    """What the device draws when it does nothing: declared, or a share of TDP."""
    idle = hardware.declared.idle_w
    return idle if idle is not None else _IDLE_SHARE * tdp_w(hardware)


def device_power_w(hardware: HardwareSpec, compute_share: float, memory_share: float) -> float:
    """Watts of a device whose arithmetic and memory run at these shares of their peaks, at the full clock."""
    tdp, idle = tdp_w(hardware), idle_power_w(hardware)
    limit = tdp if hardware.power_cap_w is None else min(tdp, hardware.power_cap_w)
    return min(limit, idle + (tdp - idle) * (compute_share + MEMORY_SHARE * memory_share))


def energy_j(hardware: HardwareSpec, usage: DeviceUsage, duration_s: float) -> float:
    """Joules of one device over `duration_s`, idle time included."""
    if duration_s <= 0:
        return 0.0
    compute = (usage.peak_compute_s - usage.unspent_compute_s) / duration_s
    memory = usage.hbm_bytes / hardware.memory_bandwidth / duration_s
    return device_power_w(hardware, compute, memory) * duration_s


def energy_split_j(hardware: HardwareSpec, usage: DeviceUsage, duration_s: float) -> dict[str, float]:
    """The same by what takes it: being there, memory, arithmetic. Where the sum would exceed what the device may draw,
    those two that work give way in proportion."""
    whole, idle = energy_j(hardware, usage, duration_s), idle_power_w(hardware) * max(duration_s, 0.0)
    compute = usage.peak_compute_s - usage.unspent_compute_s
    memory = MEMORY_SHARE * usage.hbm_bytes / hardware.memory_bandwidth
    each = (whole - idle) / (compute + memory) if compute + memory > 0 else 0.0
    return {"idle": idle, "memory": each * memory, "compute": each * compute}


def usd_per_hour(hardware: HardwareSpec, override: PriceOverride | None = None) -> float | None:
    """Price of a device hour: the scenario's if it has one, else the hardware file's; None if neither knows."""
    if override is not None:
        return override.usd_per_gpu_hour
    return hardware.price.usd_per_hour if hardware.price else None


def usd_per_million_tokens(device_usd_per_hour: float, num_devices: int, tokens_per_s: float) -> float:
    """USD for a million tokens at a steady `tokens_per_s`: 1e6 price devices / (3600 rate). Infinite at rate 0."""
    if tokens_per_s <= 0:
        return float("inf")
    return 1e6 * device_usd_per_hour * num_devices / (3600 * tokens_per_s)

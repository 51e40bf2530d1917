"""`PowerCap`: what a device does that may not draw what its work asks for: its clock drops, as far as it must.

At the share f of its full clock, voltage falling with it (dynamic power of CMOS: C V^2 f, so energy per FLOP goes with
f^2), an operator takes and draws

    t(f) = t + max(compute / f, memory) - max(compute, memory)
    P(f) = idle + (TDP - idle) (peak_compute f^2 + 0.5 peak_memory) / t(f)

with compute and memory the seconds that either resource needs of the operator, peak_compute and peak_memory those that
its FLOPs and bytes take at the declared peaks. f is the largest with P(f) at or below the cap, so what waits for memory
loses its spare clock first and no time, until arithmetic takes as long. Below the lowest clock only a slower pace
helps. Splitwise (Patel et al., ISCA 2024), Llama-2-70B on 8 H100 at 350 of 700 W, prompts of 1024 tokens: a prompt
takes 1.29 times as long, a token no longer; were all of it compute, at TDP before, it took (630 / 280)^(1/3) = 1.31.

Each operator is held under the cap by itself, where a device's controller averages over milliseconds: that overstates
the slowdown. That kernels draw their TDP below the declared peak rate, which this power model goes by, understates it.
TDP itself is no cap here: measured
times, which calibrations are fitted to, have its throttling in them.
"""

__all__ = ["PowerCap"]

from dataclasses import dataclass, replace

from perfmodel.cost.energy import MEMORY_SHARE, idle_power_w, tdp_w
from perfmodel.cost.forms.operator_time import OperatorTime, bound_of
from perfmodel.errors import SpecError
from perfmodel.specs.hardware import HardwareSpec

_LOWEST_CLOCK = 0.15  # of the full one: 210 of 1410 MHz on an A100 (nvidia-smi, supported clocks)
_HALVINGS = 24


@dataclass(frozen=True, slots=True)
class PowerCap:
    """`allowed`: what the cap leaves beside idle, as a share of what full arithmetic draws beside it."""

    allowed: float

    @classmethod
    def of(cls, hardware: HardwareSpec) -> "PowerCap | None":
        """None without a cap below TDP. Raises SpecError for one that an idle device exceeds."""
        cap, tdp, idle = hardware.power_cap_w, tdp_w(hardware), idle_power_w(hardware)
        if cap is None or cap >= tdp:
            return None
        if cap <= idle:
            raise SpecError(
                f"{hardware.name}: found power_cap_w={cap:g}, which the device exceeds when idle ({idle:g} W); give "
                f"more than that, or leave it out for its {tdp:g} W."
            )
        return cls((cap - idle) / (tdp - idle))

    def capped(self, time: OperatorTime, compute_s: float, memory_s: float) -> OperatorTime:
        """`time` under the cap; its work takes `compute_s` and `memory_s` at the declared peaks."""
        if compute_s + MEMORY_SHARE * memory_s <= self.allowed * time.duration_s:
            return time
        low, high = _LOWEST_CLOCK, 1.0
        for _ in range(_HALVINGS):
            clock = (low + high) / 2
            if _drawn(clock, compute_s, memory_s) <= self.allowed * _duration(time, clock):
                low = clock
            else:
                high = clock
        duration = max(_duration(time, low), _drawn(low, compute_s, memory_s) / self.allowed)
        compute = time.compute_s / low
        bound = bound_of(compute, time.memory_s, time.communication_s, time.overhead_s)
        return replace(time, duration_s=duration, compute_s=compute, bound=bound, clock=low)


def _drawn(clock: float, compute_s: float, memory_s: float) -> float:
    """Energy of the work over the power that full arithmetic draws: seconds."""
    return compute_s * clock**2 + MEMORY_SHARE * memory_s


def _duration(time: OperatorTime, clock: float) -> float:
    needed = max(time.compute_s, time.memory_s)
    return time.duration_s + max(time.compute_s / clock, time.memory_s) - needed

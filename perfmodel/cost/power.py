"""Power and energy of a device from the utilisation of its units, their cost, and power caps.

    P = idle (1 - busy) + busy (active + (TDP - active) min(1, 0.5 u_m^p + compute u_c^p)),    E = P t

u_m and u_c are the shares of the declared peaks while kernels run, `busy` is the share of the time t in which they do,
idle what the device draws without work, and active = active_share TDP what it draws as soon as kernels run, clocks
raised. Power rises steeply with the first load and flattens: H100s and B200s that decode draw 0.5 to 0.95 of TDP at 0.1
to 0.7 of the bandwidth. Three numbers are in `hardware_specs/calibrations/power.yaml`, fitted to served models: rows of
servers do not tell memory's part from arithmetic's, so memory's is that of power caps below (Splitwise's traces of
decoding). A FLOP at a lower clock takes less energy. Host and cooling are not modelled.

Under a power cap (`PowerCap`), which replaces TDP, a device lowers its clock as far as it must. At the share f of
the clock that it has at TDP an operator takes and draws

    t(f) = t + max(compute / f, memory) - max(compute, memory) + (communication + overhead) (1 / f - 1)
    P(f) = idle + (TDP - idle) (peak_compute v(f)^2 + 0.5 peak_memory) / t(f),    v(f) = max(f, 0.7)

compute and memory are the seconds that the operator needs of either resource, peak_compute and peak_memory those at the
declared peaks. Dynamic power of CMOS is C V^2 f: energy per FLOP falls with the square of the voltage, down to a floor,
so power is linear in the clock at its lower end and grows faster above (Afzal et al. 2026 on A40, A100, H100, H200; 0.7
is assumed). f is the largest with P(f) at or below the cap: memory-bound work first loses spare clock and no time.
Below the floor only pace is lost: t goes with 1 / f, that of streams, too, as caches and crossbar share the clock.

A clock takes milliseconds to change (Velicka et al. 2025, on A100 and GH200), a layer takes less. So alternating
operators share one: the mean of their clocks, weighed by energy. Norms and all-reduces between large products run at
the products' clock; only waits for memory or for another node are not affected.

TDP itself is no cap here: measured times include its throttling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import Field

from perfmodel.cost.kernel_models.device import OperatorTime, bound_of, tdp_w
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.errors import SpecError
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import CommittedFits, load_fitted
from perfmodel.ops.problem_sizes import Values
from perfmodel.specs.hardware import HardwareSpec, PriceOverride
from perfmodel.specs.scenario import price_in_use

_MEMORY_SHARE = 0.5  # of what full arithmetic draws beside idle
_IDLE_SHARE = 0.15  # of TDP, where idle power is not declared (A100: 50-60 of 400 W)
_VOLTAGE_FLOOR = 0.7  # the clock's share below which the voltage falls no further [assumed]
_HALVINGS = 24  # of the range in which a capped clock is looked for


class _DeviceUsage(Protocol):
    """Totals of one device over a run: seconds that FLOPs take at the declared peaks, those whose energy lower clocks
    have saved, bytes, and seconds in which kernels run."""

    @property
    def peak_compute_s(self) -> float: ...

    @property
    def unspent_compute_s(self) -> float: ...

    @property
    def hbm_bytes(self) -> float: ...
    @property
    def busy_s(self) -> float: ...


def _idle_power_w(hardware: HardwareSpec) -> float:
    idle = hardware.declared.idle_w
    return idle if idle is not None else _IDLE_SHARE * tdp_w(hardware)


class PowerFit(CommittedFits):
    """The numbers of the module's formula, for all devices."""

    active_share: float = Field(ge=0.15, le=0.5)  # short kernels alone read 0.18 to 0.25 on H200, B200 and GB200
    compute: float = Field(ge=0.1, le=6.0)
    exponent: float = Field(ge=0.1, le=1.5)
    residuals: Residuals = Residuals()  # of joules per token, of each model under a fit without it

    def wanted(self, compute_share: Values, memory_share: Values) -> tuple[Values, Values]:
        """What compute and memory would draw of what is above `active`; more than 1 together is not to be had."""
        return self.compute * compute_share**self.exponent, _MEMORY_SHARE * memory_share**self.exponent


def load_power_fit() -> PowerFit:
    """The committed fit. Raises SpecError for a file that is missing or malformed."""
    return load_fitted(PowerFit, data_dir("calibrations") / "power.yaml")


def device_power_w(
    hardware: HardwareSpec, compute_share: float, memory_share: float, busy: float = 1.0, fit: PowerFit | None = None
) -> float:
    """Watts of `hardware` at utilisations `compute_share` and `memory_share` while kernels run, a share `busy` of the
    time. fit: default: the committed one"""
    return sum(_parts_w(hardware, compute_share, memory_share, busy, fit).values())


def _parts_w(
    hardware: HardwareSpec, compute_share: float, memory_share: float, busy: float, fit: PowerFit | None = None
) -> dict[str, float]:
    """Watts by idle (what a device draws whatever its kernels do), memory and compute; a cap takes from the latter."""
    fit = fit or load_power_fit()
    tdp, idle = tdp_w(hardware), _idle_power_w(hardware)
    limit = tdp if hardware.power_cap_w is None else min(tdp, hardware.power_cap_w)
    active = min(max(idle, fit.active_share * tdp), limit)
    wanted = fit.wanted(compute_share, memory_share)
    compute, memory = ((tdp - active) * share / max(1.0, sum(wanted)) for share in wanted)
    left = busy * min(1.0, (limit - active) / (compute + memory)) if compute + memory else 0.0
    return {"idle": idle * (1 - busy) + active * busy, "memory": left * memory, "compute": left * compute}


def _shares(hardware: HardwareSpec, usage: _DeviceUsage, duration_s: float) -> tuple[float, float, float]:
    """Utilisation of compute and memory while kernels run, and the share of `duration_s` in which they do."""
    busy_s = min(usage.busy_s, duration_s)
    if busy_s <= 0:
        return 0.0, 0.0, 0.0
    compute = (usage.peak_compute_s - usage.unspent_compute_s) / busy_s
    return compute, usage.hbm_bytes / hardware.memory_bandwidth / busy_s, busy_s / duration_s


def energy_j(hardware: HardwareSpec, usage: _DeviceUsage, duration_s: float, fit: PowerFit | None = None) -> float:
    """Joules of one device, `hardware`, over `duration_s`, idle time included. usage: what ran; fit: default: the
    committed one"""
    if duration_s <= 0:
        return 0.0
    return device_power_w(hardware, *_shares(hardware, usage, duration_s), fit) * duration_s


def energy_split_j(hardware: HardwareSpec, usage: _DeviceUsage, duration_s: float) -> dict[str, float]:
    """Energy by idle (what a device draws whatever its kernels do), memory and compute."""
    if duration_s <= 0:
        return {"idle": 0.0, "memory": 0.0, "compute": 0.0}
    parts = _parts_w(hardware, *_shares(hardware, usage, duration_s))
    return {name: watts * duration_s for name, watts in parts.items()}


def usd_per_hour(hardware: HardwareSpec, override: PriceOverride | None = None) -> float | None:
    """Price of a device hour: the scenario's, else the hardware file's or the list's; None if unknown."""
    price = price_in_use(hardware, override)
    return None if price is None else price.usd_per_hour


def idle_power_w(hardware: HardwareSpec) -> float:
    """Watts of a device that is powered on and runs nothing."""
    return device_power_w(hardware, 0.0, 0.0, 0.0)


def usd_per_million_tokens(device_usd_per_hour: float, num_devices: int, tokens_per_s: float) -> float:
    """USD for a million tokens at a steady `tokens_per_s`: 1e6 price devices / (3600 rate). Infinite at rate 0."""
    if tokens_per_s <= 0:
        return float("inf")
    return 1e6 * device_usd_per_hour * num_devices / (3600 * tokens_per_s)


def flop_energy(clock: float) -> float:
    """Energy of a FLOP at a share of the full clock, relative to full clock."""
    return 1.0 if clock == 1.0 else max(clock, _VOLTAGE_FLOOR) ** 2


@dataclass(frozen=True, slots=True)
class Load:
    """An operator at the full clock; its work takes `compute_s` and `memory_s` at the declared peaks.

    count:     how often it runs
    is_remote: its messages wait for another node, whatever the clock"""

    time: OperatorTime
    compute_s: float
    memory_s: float
    count: float = 1.0
    is_remote: bool = False

    def drawn(self, clock: float) -> float:
        """Energy of the work over the power that full arithmetic draws: seconds."""
        return self.compute_s * flop_energy(clock) + _MEMORY_SHARE * self.memory_s

    def duration(self, clock: float) -> float:
        if clock < _VOLTAGE_FLOOR:
            remote = self.time.communication_s if self.is_remote else 0.0
            return remote + (self.duration(_VOLTAGE_FLOOR) - remote) * _VOLTAGE_FLOOR / clock
        time, slower = self.time, 1.0 / clock - 1.0
        waiting = time.overhead_s + (0.0 if self.is_remote else time.communication_s)
        needed = max(time.compute_s, time.memory_s)
        return time.duration_s + max(time.compute_s / clock, time.memory_s) - needed + waiting * slower

    def at(self, clock: float) -> OperatorTime:
        """Its time at `clock`, a share of the full one."""
        time, slower = self.time, max(_VOLTAGE_FLOOR / clock, 1.0)
        compute, overhead = time.compute_s / clock, time.overhead_s / clock
        communication = time.communication_s if self.is_remote else time.communication_s / clock
        return time._replace(
            duration_s=self.duration(clock),
            compute_s=compute,
            memory_s=time.memory_s * slower,
            communication_s=communication,
            overhead_s=overhead,
            bound=bound_of(compute, time.memory_s * slower, communication, overhead),
            clock=clock,
        )


@dataclass(frozen=True, slots=True)
class PowerCap:
    """`allowed`: what the cap leaves above idle, as a share of full compute's power above idle."""

    allowed: float

    @classmethod
    def of(cls, hardware: HardwareSpec) -> "PowerCap | None":
        """None without a cap below TDP. Raises SpecError for one that an idle device exceeds."""
        cap, tdp, idle = hardware.power_cap_w, tdp_w(hardware), _idle_power_w(hardware)
        if cap is None or cap >= tdp:
            return None
        if cap <= idle:
            raise SpecError(
                f"{hardware.name}: got power_cap_w={cap:g}, which the device exceeds when idle ({idle:g} W); give "
                f"more than that, or leave it out for its {tdp:g} W."
            )
        return cls((cap - idle) / (tdp - idle))

    def together(self, loads: Sequence[Load]) -> list[OperatorTime]:
        """Times of alternating operators under the cap."""
        clocks = [self._clock(load) for load in loads]
        asked = [load.count * load.drawn(1.0) for load in loads]
        whole = sum(asked)
        if whole <= 0 or min(clocks, default=1.0) == 1.0:
            return [load.time for load in loads]
        shared = sum(clock * energy for clock, energy in zip(clocks, asked, strict=True)) / whole
        return [load.at(shared) if load.time.duration_s else load.time for load in loads]

    def _clock(self, load: Load) -> float:
        """The largest clock at which the operator alone stays below the cap."""
        if load.drawn(1.0) <= self.allowed * load.time.duration_s:
            return 1.0
        low, high = _VOLTAGE_FLOOR, 1.0
        if load.drawn(low) > self.allowed * load.duration(low):
            return low * load.duration(low) / (load.drawn(low) / self.allowed)
        for _ in range(_HALVINGS):
            clock = (low + high) / 2
            if load.drawn(clock) <= self.allowed * load.duration(clock):
                low = clock
            else:
                high = clock
        return low

"""The roofline with what it leaves out: how long one operator's work takes on one device."""

__all__ = ["OperatorTime", "OperatorTimer"]

from dataclasses import dataclass

from perfmodel.cost.calibration import Calibration, FamilyFit
from perfmodel.cost.datasheet import datasheet
from perfmodel.cost.links import collective_time, link_for
from perfmodel.cost.rates import peak_flops_per_s
from perfmodel.ops.work import Work
from perfmodel.specs.hardware import HardwareSpec

_ITEMS = {"attention_prefill": "seqs", "attention_decode": "seqs", "moe": "distinct_experts"}


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Seconds of one operator on one device: in all, and what each resource alone would take.

    bound: the resource that takes longest: compute | memory | communication | overhead
    """

    duration_s: float
    compute_s: float
    memory_s: float
    communication_s: float
    overhead_s: float
    bound: str


class OperatorTimer:
    """Times work on `hardware` with the achieved fractions of `calibration` (default: the datasheet's).

    The formula is in `perfmodel.cost.calibration`. A kernel of fewer thread blocks than the device has compute units
    reaches only that share of compute, and streams the KV cache at only that share of bandwidth (extents `ctas` and
    `max_splits`). No rate is refused: see
    `perfmodel.cost.rates.FALLBACKS`.
    """

    def __init__(self, hardware: HardwareSpec, calibration: Calibration | None = None) -> None:
        self.hardware = hardware
        self.calibration = calibration or datasheet(hardware)
        self._bandwidth = hardware.memory_bandwidth
        self._compute_units = hardware.declared.compute_units
        self._rates: dict[tuple[str, str], tuple[FamilyFit, float]] = {}

    def time(self, work: Work) -> OperatorTime:
        """How long one run of `work` takes."""
        fit, peak = self._fit_and_peak(work.family, work.rate)
        fill = self._fill(work.extent)
        compute = work.flops / (peak * fit.compute_fraction * fill)
        num_bytes = work.weight_bytes + work.activation_bytes + work.kv_bytes / fill
        memory = num_bytes / (self._bandwidth * fit.memory_fraction)
        overhead = fit.overhead_s * work.num_kernels
        if fit.overhead_per_item_s:
            overhead += fit.overhead_per_item_s * work.extent.get(_ITEMS.get(work.family, ""), 0.0)
        communication = 0.0
        if work.message is not None:
            link = link_for(self.hardware, work.message.num_ranks)
            communication = collective_time(work.message, link, fit.memory_fraction)
        duration = overhead + communication + _knee(compute, memory, fit.knee)
        return OperatorTime(
            duration, compute, memory, communication, overhead, _bound(compute, memory, communication, overhead)
        )

    def _fit_and_peak(self, family: str, rate: str) -> tuple[FamilyFit, float]:
        found = self._rates.get((family, rate))
        if found is None:
            found = (self.calibration.fit(family, rate), peak_flops_per_s(self.hardware, rate))
            self._rates[family, rate] = found
        return found

    def _fill(self, extent: dict[str, float]) -> float:
        """The share of compute units that the kernel's thread blocks, split if they may be, can occupy."""
        ctas = extent.get("ctas")
        if not ctas:
            return 1.0
        return min(1.0, ctas * extent.get("max_splits", 1.0) / self._compute_units)


def _knee(compute: float, memory: float, p: float | None) -> float:
    if p is None or compute == 0.0 or memory == 0.0:
        return max(compute, memory)
    high, low = max(compute, memory), min(compute, memory)
    ratio: float = (1.0 + (low / high) ** p) ** (1.0 / p)
    return high * ratio


def _bound(compute: float, memory: float, communication: float, overhead: float) -> str:
    largest = max(compute, memory, communication, overhead)
    if largest == memory:
        return "memory"
    if largest == compute:
        return "compute"
    return "communication" if largest == communication else "overhead"

"""`OperatorTimer`: how long one operator's work takes on one device, under a calibration."""

__all__ = ["OperatorTime", "OperatorTimer"]

from dataclasses import replace
from typing import Any

from perfmodel.cost.calibration import Calibration
from perfmodel.cost.datasheet import datasheet
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.operator_time import OperatorTime, bound_of
from perfmodel.cost.forms.registry import FormFit, time_work
from perfmodel.cost.power_cap import PowerCap
from perfmodel.ops.work import Work
from perfmodel.specs.hardware import HardwareSpec

_PICKED_BY = (
    "head_dim",
    "kv_element_bytes",
    "heads",
    "kv_heads",
    "gates",
    "experts",
    "local_experts",
)  # what `Domain` looks at


_NOTHING = OperatorTime(0.0, 0.0, 0.0, 0.0, 0.0, "overhead")


class OperatorTimer:
    """Times work on `hardware` with the fits of `calibration` (default: the datasheet's).

    The formulas are in `perfmodel.cost.forms`; under `hardware.power_cap_w`, `PowerCap` has the last word. No rate is
    refused: see `perfmodel.cost.rates.FALLBACKS`.
    """

    def __init__(self, hardware: HardwareSpec, calibration: Calibration | None = None) -> None:
        self.hardware = hardware
        self.calibration = calibration or datasheet(hardware)
        self.device = DeviceFacts.of(hardware)
        self.mixes_attention = self.calibration.knows("attention_mixed")  # prompts and decodes in one kernel
        self._cap = PowerCap.of(hardware)
        self._overheads = self.calibration.kernel_overheads
        self._contained = frozenset(self.calibration.contained)
        self._fits: dict[tuple[Any, ...], FormFit] = {}

    def time(self, work: Work) -> OperatorTime:
        """How long one run of `work` takes."""
        return self.time_by(self.fit(work), work)

    def time_by(self, fit: FormFit | None, work: Work) -> OperatorTime:
        """The same, by the fit that `fit` has found for it."""
        if fit is None:
            return _NOTHING
        time = time_work(work, fit, self.device)
        if self._overheads != 1.0:
            time = _with_overheads(time, self._overheads)
        if self._cap is None:
            return time
        memory_s = work.hbm_bytes / self.hardware.memory_bandwidth
        return self._cap.capped(time, work.flops / self.device.peak(work.rate), memory_s)

    def fit(self, work: Work) -> FormFit | None:
        """What `work` is timed with; None for work that lies within another operator's measured time."""
        if work.name in self._contained:
            return None
        sizes = work.extent.get
        rate = work.message.kind if work.message else work.rate
        key = (work.family, rate, work.format, *(sizes(name) for name in _PICKED_BY))
        fit = self._fits.get(key)
        if fit is None:
            fit = self._fits[key] = self.calibration.fit(work.family, rate, work.extent, work.format)
        return fit


def _with_overheads(time: OperatorTime, factor: float) -> OperatorTime:
    """`time` with so many times its overhead."""
    overhead = factor * time.overhead_s
    bound = bound_of(time.compute_s, time.memory_s, time.communication_s, overhead)
    return replace(time, duration_s=time.duration_s + overhead - time.overhead_s, overhead_s=overhead, bound=bound)

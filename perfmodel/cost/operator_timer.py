"""`OperatorTimer`: the time of one operator on one device under a calibration."""

from collections.abc import Sequence
from typing import Any

from perfmodel.cost.calibrations.calibration import Calibration, datasheet
from perfmodel.cost.kernel_models.device import NO_TIME, DeviceFacts, OperatorTime, bound_of
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.registry import KernelFit, time_work
from perfmodel.cost.power import Load, PowerCap
from perfmodel.ops.work import Work
from perfmodel.specs.hardware import HardwareSpec


class OperatorTimer:
    """Times work on `hardware` with the fits of `calibration` (default: the datasheet's).

    Formulas are in `perfmodel.cost.kernel_models`; `PowerCap` applies `hardware.power_cap_w`. Every rate is accepted:
    see `perfmodel.cost.kernel_models.device.FALLBACKS`."""

    def __init__(self, hardware: HardwareSpec, calibration: Calibration | None = None) -> None:
        self.hardware = hardware
        self.calibration = calibration or datasheet(hardware)
        self.device = DeviceFacts.of(hardware)
        self.mixes_attention = self.calibration.has_family("attention_mixed")  # prompts and decodes in one kernel
        self._cap = PowerCap.of(hardware)
        self._overheads, self._factor = self.calibration.kernel_overheads, self.calibration.kernel_factor
        self._contained = frozenset(self.calibration.contained)
        self._fits: dict[tuple[Any, ...], KernelFit] = {}
        self._peaks: dict[tuple[int, str], float] = {}  # by fit, which the calibration keeps alive, and rate

    def time(self, work: Work) -> OperatorTime:
        """The time of one run of `work`."""
        return self.times([(1.0, work, self.fit(work))])[0]

    def times(self, runs: Sequence[tuple[float, Work, KernelFit | None]]) -> list[OperatorTime]:
        """Times of one run each of alternating operators: (how often, work, its `fit`)."""
        times = [self._free(fit, work) for _, work, fit in runs]
        if self._cap is None:
            return times
        return self._cap.together([self._load(n, work, time) for (n, work, _), time in zip(runs, times, strict=True)])

    def _free(self, fit: KernelFit | None, work: Work) -> OperatorTime:
        if fit is None:
            return NO_TIME
        time = time_work(work, fit, self.device)
        if self._factor != 1.0:
            time = time.times(self._factor)
        if self._overheads == 1.0:
            return time
        overhead = self._overheads * time.overhead_s
        bound = bound_of(time.compute_s, time.memory_s, time.communication_s, overhead)
        return time._replace(duration_s=time.duration_s + overhead - time.overhead_s, overhead_s=overhead, bound=bound)

    def _load(self, count: float, work: Work, time: OperatorTime) -> Load:
        compute_s = self.at_peak_s(work, self.fit(work)) if time.duration_s else 0.0
        memory_s = work.hbm_bytes / self.hardware.memory_bandwidth if time.duration_s else 0.0
        is_remote = work.message is not None and self.device.spread(work.message).num_nodes > 1
        return Load(time, compute_s, memory_s, count, is_remote)

    def at_peak_s(self, work: Work, fit: KernelFit | None) -> float:
        """Seconds of the FLOPs at the declared peak of the kernels' rate: the fit's, where they multiply in another
        format than `work` says (FP32 on a GPU without fast FP16)."""
        key = (id(fit), work.rate)
        if key not in self._peaks:
            self._peaks[key] = self.device.peak(getattr(fit, "rate", None) or work.rate)
        return work.flops / self._peaks[key]

    def fit(self, work: Work) -> KernelFit | None:
        """The fit that times `work`; None if another operator's measured time contains it."""
        if work.name in self._contained:
            return None
        traits = work.problem.traits if work.problem is not None else None
        rate = work.message.kind if work.message else work.rate
        leaves_node = work.message is not None and self.device.spread(work.message).num_nodes > 1
        key = (work.family, rate, work.format, leaves_node, traits)
        fit = self._fits.get(key)
        if fit is None:
            fit = self.calibration.fit(work.family, rate, traits, work.format)
            if leaves_node:  # no measurements there: how well it is known within a node says nothing
                fit = fit.model_copy(update={"residuals": Residuals()})
            self._fits[key] = fit
        return fit

"""`OperatorTimer`: how long one operator's work takes on one device, under a calibration."""

__all__ = ["OperatorTime", "OperatorTimer"]

from perfmodel.cost.calibration import Calibration
from perfmodel.cost.datasheet import datasheet
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.operator_time import OperatorTime
from perfmodel.cost.forms.registry import FormFit, time_work
from perfmodel.ops.work import Work
from perfmodel.specs.hardware import HardwareSpec


class OperatorTimer:
    """Times work on `hardware` with the fits of `calibration` (default: the datasheet's).

    The formulas are in `perfmodel.cost.forms`. No rate is refused: see `perfmodel.cost.rates.FALLBACKS`.
    """

    def __init__(self, hardware: HardwareSpec, calibration: Calibration | None = None) -> None:
        self.hardware = hardware
        self.calibration = calibration or datasheet(hardware)
        self.device = DeviceFacts.of(hardware)
        self._fits: dict[tuple[str, str], FormFit] = {}

    def time(self, work: Work) -> OperatorTime:
        """How long one run of `work` takes."""
        key = (work.family, work.rate)
        fit = self._fits.get(key)
        if fit is None:
            fit = self._fits[key] = self.calibration.fit(*key)
        return time_work(work, fit, self.device)

"""Calibrations: how well a device runs each operator family under an engine, and how much of it stays unexplained.

`families` holds one fit of a physical form (`perfmodel.cost.forms`) per operator family and number format. The
datasheet calibration (`DATASHEET`) is the roofline itself: fractions of 1 and a launch overhead. A fitted one lives in
`hardware_specs/calibrations/<device>@<engine>.yaml`, written by `perfmodel calibrate`, never by hand.
"""

__all__ = ["Calibration", "FamilyFit", "HostFit", "Residuals"]

import datetime
from typing import Literal

from pydantic import Field, NonNegativeFloat

from perfmodel.cost.forms.registry import FormFit
from perfmodel.cost.forms.residuals import Residuals
from perfmodel.cost.forms.roofline import FamilyFit
from perfmodel.specs.base import Spec


class HostFit(Spec):
    """Time of the host (CPU) per step: scheduling, input preparation, sampling bookkeeping.

    `serial` parts always show; `hidden` parts run beside the device and show only where they are the longer ones.
    """

    serial_step_s: NonNegativeFloat = 0.0
    serial_per_sequence_s: NonNegativeFloat = 0.0
    hidden_step_s: NonNegativeFloat = 0.0
    hidden_per_sequence_s: NonNegativeFloat = 0.0


class Calibration(Spec):
    """All fits for one device and engine. `families` keys are a family ("gemm") or a family and rate ("gemm/fp8")."""

    device: str
    engine: str
    origin: Literal["datasheet", "calibrated"] = "calibrated"
    source: str = ""
    date: datetime.date | None = None
    command: str = ""
    families: dict[str, FormFit] = Field(default_factory=dict)
    default: FamilyFit = FamilyFit()
    host: HostFit = HostFit()
    step_residuals: Residuals = Residuals()

    def fit(self, family: str, rate: str) -> FormFit:
        """The most specific fit: family and rate, then family, then the default."""
        return self.families.get(f"{family}/{rate}") or self.families.get(family) or self.default

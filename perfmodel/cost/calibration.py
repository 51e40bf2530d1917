"""Calibrations: achieved fractions and overheads per operator family, with the spread of what they leave unexplained.

    t = overhead_s * kernels + overhead_per_item_s * items + knee(FLOPs / (compute_fraction * peak),
                                                                bytes / (memory_fraction * bandwidth))
    knee(a, b) = (a**p + b**p) ** (1/p);  p = None is the hard maximum of the roofline, p = 1 the sum

Items are what the family counts beside kernels: sequences for attention, distinct experts for mixtures of experts.
The datasheet calibration (`DATASHEET`) is the roofline itself: fractions of 1 and a launch overhead. A fitted one
lives in `hardware_specs/calibrations/<device>@<engine>.yaml`, written by `perfmodel calibrate`, never by hand.
"""

__all__ = ["Calibration", "FamilyFit", "HostFit", "Residuals"]

import datetime
from typing import Literal

from pydantic import Field, NonNegativeFloat

from perfmodel.specs.base import Spec


class Residuals(Spec):
    """Quantiles of log(measured / predicted) over the rows of the fit: exp(p90) - 1 is how far one in ten is above."""

    num_rows: int = 0
    p10: float = 0.0
    p50: float = 0.0
    p90: float = 0.0


class FamilyFit(Spec):
    """How well one operator family uses the hardware. Fractions are of the declared peaks, in (0, 1]."""

    compute_fraction: float = Field(default=1.0, gt=0, le=1)
    memory_fraction: float = Field(default=1.0, gt=0, le=1)
    overhead_s: NonNegativeFloat = 0.0  # per kernel
    overhead_per_item_s: NonNegativeFloat = 0.0
    knee: float | None = Field(default=None, ge=1)
    residuals: Residuals = Residuals()


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
    families: dict[str, FamilyFit] = Field(default_factory=dict)
    default: FamilyFit = FamilyFit()
    host: HostFit = HostFit()
    step_residuals: Residuals = Residuals()

    def fit(self, family: str, rate: str) -> FamilyFit:
        """The most specific fit: family and rate, then family, then the default."""
        return self.families.get(f"{family}/{rate}") or self.families.get(family) or self.default

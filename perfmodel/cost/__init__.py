"""How long work takes: roofline, calibration, step estimate, memory plan, energy, price."""

__all__ = [
    "DATASHEET",
    "Calibration",
    "FamilyFit",
    "HostFit",
    "OperatorTime",
    "OperatorTimer",
    "Residuals",
    "StepEstimate",
    "datasheet",
    "estimate_step",
    "peak_flops_per_s",
    "ridge_point",
]

from perfmodel.cost.calibration import Calibration, FamilyFit, HostFit, Residuals
from perfmodel.cost.datasheet import DATASHEET, datasheet
from perfmodel.cost.estimate import StepEstimate, estimate_step
from perfmodel.cost.rates import peak_flops_per_s, ridge_point
from perfmodel.cost.roofline import OperatorTime, OperatorTimer

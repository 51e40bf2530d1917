"""Fits what an operation of matrix units takes at the full clock: large products of measured makers beside their TDP.

Of each device with kernel tables of its own and each number format in them the rate that a large product reaches, as a
share of the declared peak. Tiles, waves and quantization leave a common share c, power the rest:

    reached / peak = c min(1, (TDP / (peak e))^(1/3))
"""

__all__ = ["fit_operation_j", "measured_shares"]

from collections.abc import Sequence
from math import log

import numpy as np

from perfmodel.cost import OperatorTimer, load_calibration
from perfmodel.cost.calibrations.files import calibrated_kernels
from perfmodel.cost.forms.device import sustained_share, tdp_w
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario_file import load_hardware

_SIZE = 8192  # rows, columns and depth of a large product
_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}
_ENERGIES_J = np.geomspace(1e-13, 1e-11, 401)  # that are tried


def fit_operation_j() -> float:
    """Joules of an operation at the full clock, by all committed kernel tables; 0 without any."""
    shares = [(tdp, peak, share) for _, _, tdp, peak, share in measured_shares()]
    if not shares:
        return 0.0
    return float(f"{min(_ENERGIES_J.tolist(), key=lambda energy: _misses(energy, shares)):.3g}")


def measured_shares() -> list[tuple[str, str, float, float, float]]:
    """(device, number format, watts, declared peak in operations per second, share of it that a large product reaches)
    of each calibrated device and format, one for each engine that was measured."""
    found = []
    for device, engine, file in calibrated_kernels():
        hardware = load_hardware(device)
        own = load_calibration(hardware, engine, file).families
        for rate, peak in hardware.declared.peak_flops_per_s.items():
            if f"gemm/{rate}" in own and rate in _BYTES:
                share = _reached(hardware, engine, rate) / peak
                found.append((device, rate, tdp_w(hardware), peak, share))
    return found


def _reached(hardware: HardwareSpec, engine: str, rate: str) -> float:
    """Operations per second of a large product."""
    form = LinearFormat(rate, _BYTES[rate], _BYTES[rate], 2.0)
    work = gemm("product", _SIZE, _SIZE, _SIZE, form)
    return work.flops / OperatorTimer(hardware, load_calibration(hardware, engine)).time(work).duration_s


def _misses(energy: float, shares: Sequence[tuple[float, float, float]]) -> float:
    """The sum of squares of log errors, with the common share that makes it least."""
    left = [log(share / sustained_share(tdp, peak, energy)) for tdp, peak, share in shares]
    centre = min(sum(left) / len(left), 0.0)
    return sum((each - centre) ** 2 for each in left)

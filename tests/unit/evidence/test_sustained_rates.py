"""What power leaves of a declared peak: a closed form, and products measured on several generations."""

import numpy as np
import pytest

from perfmodel.cost.calibrations.whole_runs import load_whole_runs
from perfmodel.cost.kernel_models.device import sustained_share
from perfmodel.evidence.fit.whole_runs import fit_operation_j, measured_shares

COMMON = 0.88  # of what power sustains, by tiles and waves


def test_the_clock_goes_with_the_cube_root_of_the_power():
    """Power of CMOS is C V^2 f: an eighth of the watts that the full clock draws sustain half of it."""
    assert sustained_share(100.0, 1e14, 1e-12) == 1.0
    assert sustained_share(100.0, 8e14, 1e-12) == pytest.approx(0.5)
    assert sustained_share(100.0, 8e14, 0.0) == 1.0


def test_one_energy_explains_formats_and_generations():
    """Half of the large products in bf16, int8 and fp8 lie within 10 % of one curve, all within 36 %: those of L40S
    below it, FP8 of B200 under SGLang above."""
    energy = fit_operation_j()
    shares = measured_shares()
    assert {rate for _, rate, *_ in shares} >= {"bf16", "fp8", "int8"}
    assert len({device for device, *_ in shares}) >= 6
    off = [share / (COMMON * sustained_share(tdp, peak, energy)) - 1 for _, _, tdp, peak, share in shares]
    assert np.median(np.abs(off)) < 0.1
    assert np.max(np.abs(off)) < 0.36
    assert load_whole_runs().operation_j == pytest.approx(energy, rel=0.02)

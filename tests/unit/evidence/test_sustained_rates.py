"""What power leaves of a declared peak: a closed form, and products measured on several generations."""

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
    """Large products of A100, H100, B200, RTX 4090 and RTX PRO 6000 in bf16, int8 and fp8 lie within 30 % of one curve;
    FP8 of B200 lies highest."""
    energy = fit_operation_j()
    shares = measured_shares()
    assert {rate for _, rate, *_ in shares} >= {"bf16", "fp8", "int8"}
    assert len({device for device, *_ in shares}) >= 4
    for device, rate, tdp, peak, share in shares:
        assert share / (COMMON * sustained_share(tdp, peak, energy)) == pytest.approx(1, abs=0.3), (device, rate)
    assert load_whole_runs().operation_j == pytest.approx(energy, rel=0.02)

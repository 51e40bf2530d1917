"""What power leaves of a declared peak: a closed form, and products measured on several generations."""

import pytest

from perfmodel.cost import OperatorTimer, load_calibration
from perfmodel.cost.calibrations.whole_runs import load_whole_runs
from perfmodel.cost.kernel_models.device import sustained_share
from perfmodel.evidence.fit.whole_runs import fit_operation_j, measured_shares
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm
from perfmodel.specs import load_hardware

COMMON = 0.88  # of what power sustains, by tiles and waves


def test_the_clock_goes_with_the_cube_root_of_the_power():
    """Power of CMOS is C V^2 f: an eighth of the watts that the full clock draws sustain half of it."""
    assert sustained_share(100.0, 1e14, 1e-12) == 1.0
    assert sustained_share(100.0, 8e14, 1e-12) == pytest.approx(0.5)
    assert sustained_share(100.0, 8e14, 0.0) == 1.0


def test_one_energy_explains_formats_and_generations():
    """Large products of A100, H100, RTX 4090 and RTX PRO 6000 in bf16, int8 and fp8 lie within 13 % of one curve."""
    energy = fit_operation_j()
    shares = measured_shares()
    assert {rate for _, rate, *_ in shares} >= {"bf16", "fp8", "int8"}
    assert len({device for device, *_ in shares}) >= 4
    for device, rate, tdp, peak, share in shares:
        assert share / (COMMON * sustained_share(tdp, peak, energy)) == pytest.approx(1, abs=0.13), (device, rate)
    assert load_whole_runs().operation_j == pytest.approx(energy, rel=0.02)


@pytest.mark.parametrize(("rate", "width"), [("bf16", 2.0), ("fp8", 1.0), ("fp4", 0.5)])
def test_a_generation_without_kernel_tables_lies_on_the_curve(rate, width):
    """Blackwell's products are known from servers, not from tables: the curve is fitted without them. FP4 lies a
    quarter above."""
    device = load_hardware("b200-sxm")
    peak = device.declared.peak_flops_per_s[rate]
    work = gemm("product", 8192, 8192, 8192, LinearFormat(rate, width, width, 2.0))
    reached = work.flops / OperatorTimer(device, load_calibration(device, "vllm")).time(work).duration_s
    expected = COMMON * peak * sustained_share(device.declared.tdp_w, peak, load_whole_runs().operation_j)
    assert reached == pytest.approx(expected, rel=0.3)

"""What a device may draw, and which share of its clock that leaves to arithmetic.

Declared peaks are products of units and the highest clock. Operations at the full rate R draw R e watts with e joules
each; dynamic power of CMOS is C V^2 f, the voltage goes with the clock, so a device whose TDP is below that multiplies
at the share

    s = min(1, (TDP / (R e))^(1/3))

of its peak. A format of half the bytes doubles the rate, and its operations save less than half of the energy: that FP8
reaches less of its peak than BF16, and FP4 less of its own, on one device, is this cube root. Makers whose kernels are
measured have it in their fits; for others it stands between the datasheet and what their software reaches.
Source: Afzal et al. 2026 (power and clock of A40 to H200); e is fitted to measured matrix products of four generations.
"""

from perfmodel.specs.hardware import HardwareSpec

# Where a file declares no TDP [assumed]; a CPU by core (Xeon 8480+: 350 W for 56 cores).
_TDP_W = {"gpu": 400.0, "tpu": 200.0, "npu": 600.0, "fpga": 100.0}
_CPU_CORE_W = 6.25


def tdp_w(hardware: HardwareSpec) -> float:
    """What the device draws at most, in watts: declared, or assumed for its kind."""
    declared = hardware.declared
    assumed = _CPU_CORE_W * declared.compute_units if hardware.kind == "cpu" else _TDP_W[hardware.kind]
    return declared.tdp_w or assumed


def sustained_share(tdp: float, rate: float, operation_j: float) -> float:
    """The share of `rate`, operations per second, that `tdp` watts sustain; operation_j: joules of one (0: nothing)."""
    drawn = rate * operation_j
    return 1.0 if drawn <= tdp else (tdp / drawn) ** (1 / 3)

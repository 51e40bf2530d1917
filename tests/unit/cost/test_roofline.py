"""The timer: its formula, its fallbacks, what bounds an operator."""

import pytest
from devices import ONE_OF_EACH
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import Calibration, FamilyFit, OperatorTimer, datasheet, peak_flops_per_s, ridge_point
from perfmodel.cost.calibrations.calibration import LAUNCH_OVERHEAD_S
from perfmodel.cost.kernel_models.device import FALLBACKS
from perfmodel.ops import Message, Work
from perfmodel.ops.problem_sizes import DecodeSize, ExpertsSize, HeadShape, PrefillSize
from perfmodel.specs.hardware import Declared, HardwareSpec, Link, MemoryLevel
from perfmodel.specs.scenario_file import load_hardware

HEADS = HeadShape(8, 8, 128, 128, 2.0)


def device(rates=None, links=(), kind="gpu", vector=None, units=100):
    """A device of round numbers: 100 TFLOP/s in bf16, 1 TB/s."""
    return HardwareSpec(
        name="round",
        kind=kind,
        declared=Declared(
            source="made up",
            compute_units=units,
            clock_hz=1e9,
            peak_flops_per_s=rates or {"bf16": 100e12, "fp32": 10e12},
            vector_flops_per_s=vector,
            memory=(MemoryLevel(level="hbm", capacity_bytes=80e9, bandwidth_bytes_per_s=1e12),),
            links=links,
        ),
    )


def calibrated(**families):
    return Calibration(device="round", engine="test", default=FamilyFit(), families=families)


def test_the_longer_resource_and_the_launch():
    """1e9 FLOP take 10 us, 20 MB take 20 us; the launch 5 us."""
    time = OperatorTimer(device()).time(Work("x", "gemm", flops=1e9, weight_bytes=20e6))
    assert (time.compute_s, time.memory_s, time.overhead_s) == pytest.approx((10e-6, 20e-6, 5e-6))
    assert time.duration_s == pytest.approx(25e-6)
    assert time.bound == "memory"


def test_achieved_fractions_and_the_knee():
    """Half the rate: 20 us of compute beside 20 us of memory; p = 2 makes that 20 sqrt(2), p = 1 the sum."""
    work = Work("x", "gemm", flops=1e9, weight_bytes=20e6)
    for knee, expected in ((None, 20e-6), (2.0, 20e-6 * 2**0.5), (1.0, 40e-6)):
        fit = FamilyFit(compute_fraction=0.5, knee=knee)
        assert OperatorTimer(device(), calibrated(gemm=fit)).time(work).duration_s == pytest.approx(expected)


def test_the_fit_of_a_rate_comes_before_that_of_the_family():
    timer = OperatorTimer(
        device(rates={"bf16": 100e12, "fp8": 200e12}),
        calibrated(**{"gemm": FamilyFit(compute_fraction=0.5), "gemm/fp8": FamilyFit(compute_fraction=0.25)}),
    )
    assert timer.time(Work("x", "gemm", flops=1e9)).duration_s == pytest.approx(20e-6)
    assert timer.time(Work("x", "gemm", flops=1e9, rate="fp8")).duration_s == pytest.approx(20e-6)


@pytest.mark.parametrize(
    "problem",
    [
        DecodeSize(HEADS, num_seqs=8, kv_tokens=800),
        PrefillSize(HEADS, ((100, 0),) * 8, tokens=800, kv_tokens=800, pairs=8 * 5050),
        ExpertsSize(
            16,
            4,
            64,
            64,
            512,
            1024,
            2,
            distinct=8,
            assignments=64,
            sum_bytes=0,
            tiles=(),
            weight_bytes=2,
            input_bytes=2,
        ),
    ],
)
def test_overhead_per_item_counts_what_the_family_counts(problem):
    timer = OperatorTimer(device(), calibrated(any=FamilyFit(overhead_s=1e-6, overhead_per_item_s=2e-6)))
    assert timer.time(Work("x", "any", problem=problem)).overhead_s == pytest.approx(17e-6)


def test_few_thread_blocks_reach_few_compute_units():
    """10 blocks on 100 units: a tenth of the bandwidth; four splits each: four tenths; no more than all."""
    timer = OperatorTimer(device(), calibrated())
    for splits, expected in ((1, 10e-6), (4, 2.5e-6), (50, 1e-6)):
        work = Work(
            "x", "attention_decode", kv_bytes=1e6, problem=DecodeSize(HEADS, 10, 1000, thread_blocks=10 * splits)
        )
        assert timer.time(work).memory_s == pytest.approx(expected)


def test_a_message_is_bound_by_communication():
    timer = OperatorTimer(device(links=(Link(name="nvlink", bandwidth_bytes_per_s=100e9, latency_s=1e-6),)))
    time = timer.time(Work("all_reduce", "collective", message=Message("all_reduce", 100e6, 2)))
    assert time.bound == "communication"
    assert time.duration_s == pytest.approx(5e-6 + 1e-6 + 1e-3)


def test_nothing_costs_nothing():
    assert OperatorTimer(device()).time(Work("x", "gemm", num_kernels=0)).duration_s == 0


@pytest.mark.parametrize(
    ("rates", "rate", "expected"),
    [
        ({"bf16": 3e12}, "fp8", 3e12),
        ({"bf16": 3e12}, "fp4", 3e12),
        ({"bf16": 3e12, "fp8": 6e12}, "fp4", 6e12),
        ({"bf16": 3e12, "int8": 6e12}, "int4", 6e12),
        ({"fp16": 2e12, "fp32": 1e12}, "bf16", 2e12),
        ({"fp32": 1e12}, "bf16", 1e12),
        ({"int8": 9e12}, "bf16", 9e12),
        ({"bf16": 16e12}, "vector", 1e12),
        ({"bf16": 16e12, "fp32": 2e12}, "vector", 2e12),
        ({"bf16": 3e12}, "a format of the future", 3e12),
    ],
)
def test_missing_rates_fall_back(rates, rate, expected):
    assert peak_flops_per_s(device(rates=rates), rate) == expected


def test_the_vector_rate_is_the_declared_one():
    assert peak_flops_per_s(device(vector=7e12), "vector") == 7e12


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_no_device_refuses_any_rate(name):
    hardware = load_hardware(name)
    timer = OperatorTimer(hardware)
    for rate in (*FALLBACKS, "vector"):
        assert ridge_point(hardware, rate) > 0
        assert timer.time(Work("x", "gemm", flops=1e12, weight_bytes=1e9, rate=rate)).duration_s > 0
    for ranks in (2, 8, 64, 512):
        assert timer.time(Work("x", "collective", message=Message("all_reduce", 1e6, ranks))).duration_s > 0


@pytest.mark.parametrize("kind", ["gpu", "cpu", "tpu", "npu", "fpga"])
def test_each_kind_of_device_has_its_launch_overhead(kind):
    calibration = datasheet(device(kind=kind))
    assert calibration.origin == "datasheet"
    assert calibration.default.overhead_s == LAUNCH_OVERHEAD_S[kind]


@given(
    st.floats(0, 1e15),
    st.floats(0, 1e11),
    st.floats(0.05, 1),
    st.floats(0.05, 1),
    st.one_of(st.none(), st.floats(1, 8)),
)
def test_no_fit_beats_the_hardware(flops, num_bytes, compute, memory, knee):
    fit = FamilyFit(compute_fraction=compute, memory_fraction=memory, knee=knee)
    time = OperatorTimer(device(), calibrated(gemm=fit)).time(
        Work("x", "gemm", flops=flops, activation_bytes=num_bytes)
    )
    assert time.duration_s >= max(flops / 100e12, num_bytes / 1e12) * (1 - 1e-12)
    assert time.duration_s <= (time.compute_s + time.memory_s) * (1 + 1e-12)

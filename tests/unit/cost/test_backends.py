"""Backends of engines for a single machine: how their numbers pass to what nobody measured."""

import datetime

import pytest

from perfmodel.cost.calibrations.backends import (
    BackendFit,
    BackendFits,
    Factors,
    backend_calibration,
    generation_of,
    load_backends,
    power_factor,
    product_rates,
)
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.steps.stages import LayerSplit
from perfmodel.errors import SpecError
from perfmodel.files.fitted import load_fitted, save_fitted
from perfmodel.specs import EngineSpec, load_hardware
from perfmodel.specs.engine.description import describe_engine

ENGINE = EngineSpec(profile="llamacpp", ubatch_size=512)


def numbers(**changed):
    base = {
        "launch_s": 8e-6,
        "memory_fraction": 0.8,
        "cycles": {"q4_k": 0.1, "float": 0.3},
        "other_cycles": 0.2,
        "row_share": 0.3,
        "vector_knee": 3.0,
        "compute_fraction": 0.5,
        "float_compute_fraction": 0.4,
        "tile": 2000.0,
        "half_rows": 10.0,
        "knee": 1.5,
        "expert_memory": 0.8,
        "expert_compute": 0.7,
        "attention_fraction": 0.1,
        "kv_fraction": 0.4,
        "score_fraction": 0.03,
        "score_kv_fraction": 0.3,
        "decode_residuals": Residuals(num_rows=9, p10=-0.1, p50=0.0, p90=0.1),
    }
    return BackendFit(**(base | changed))


def fits(**backends):
    return BackendFits(
        engine="llamacpp",
        source="a test",
        date=datetime.date(2026, 11, 1),
        command="none",
        like="cuda",
        backends={"cuda": numbers(), **backends},
    )


def calibration(device, engine=ENGINE, **backends):
    return backend_calibration(load_hardware(device), engine, fits(**backends))


def test_a_generation_nobody_measured_has_the_numbers_of_the_backend_and_wider_intervals():
    ada = numbers(by_generation={"ada": Factors(launch=0.5, memory=0.9)})
    seen, unseen = (calibration(device, cuda=ada) for device in ("rtx-4090", "rtx-3090"))
    assert seen.families["gemm"].launch_s == pytest.approx(4e-6)
    assert seen.families["gemm"].memory_fraction == pytest.approx(0.72)
    assert unseen.families["gemm"].launch_s == pytest.approx(8e-6)
    assert unseen.families["gemm"].memory_fraction == pytest.approx(0.8)
    assert unseen.spread > seen.spread == 1.0


def test_a_backend_nobody_measured_has_the_numbers_of_another():
    own = calibration("rtx-4090", ENGINE.model_copy(update={"backend": "vulkan"}))
    assert own.families["gemm/q4_k_wo"].weight_cycles == 0.1
    assert own.spread > 1.0


def test_formats_without_cycles_of_their_own_have_the_others():
    found = calibration("rtx-4090").families
    assert found["gemm/q4_k_wo"].weight_cycles == 0.1
    assert found["gemm/iq3_xxs_wo"].weight_cycles == 0.2
    assert found["gemm"].weight_cycles == 0.3
    assert found["gemm"].compute_fraction == 0.4


@pytest.mark.parametrize(("version", "launch_s"), [("2900", 16e-6), ("4400", 24e-6), ("6300", 8e-6)])
def test_a_version_has_the_factors_of_the_first_one_that_is_not_older(version, launch_s):
    old = numbers(by_version={"2900": Factors(launch=2.0), "4400": Factors(launch=3.0)})
    found = calibration("rtx-4090", ENGINE.model_copy(update={"version": version}), cuda=old)
    assert found.families["elementwise"].launch_s == pytest.approx(launch_s)


def test_a_cpu_is_held_back_by_its_power():
    """16 cores at 4 W each of 65 W: 1 + (64 / 65)^2 to the half; with no power, not at all."""
    assert power_factor(4.0, 1.0, 16, 65.0) == pytest.approx((1 + (64 / 65) ** 2) ** 0.5)
    assert power_factor(4.0, 0.0, 16, 65.0) == 1.0


def test_16_bits_are_multiplied_in_32_where_that_is_faster():
    """GeForce GTX 10 have FP16 at a sixty-fourth of FP32."""
    cuda = describe_engine("llamacpp").facts.backends["cuda"]
    assert product_rates(cuda, load_hardware("gtx-1080-ti")) == ("int8", "fp32")
    assert product_rates(cuda, load_hardware("rtx-4090")) == ("int8", "fp16_acc16")


def test_generations():
    assert generation_of(load_hardware("rtx-2080-ti")) == "turing"
    assert generation_of(load_hardware("gtx-1660")) == "turing-vector"
    assert generation_of(load_hardware("ryzen-9-5950x")) == "avx2"


def test_what_is_written_reads_back(tmp_path):
    file = save_fitted(fits(), tmp_path / "backend@llamacpp.yaml")
    assert load_fitted(BackendFits, file) == fits()


def test_every_engine_with_backends_has_numbers_for_them():
    for engine in ("llamacpp", "mlx"):
        found = load_backends(engine)
        assert found is not None
        assert found.like in found.backends
        assert set(found.backends) <= set(describe_engine(engine).facts.backends)


def test_a_backend_of_other_devices_is_refused_with_those_that_there_are():
    with pytest.raises(SpecError, match=r"got metal on rtx-4090 \(a gpu\); expected there: cuda, vulkan, opencl"):
        calibration("rtx-4090", ENGINE.model_copy(update={"backend": "metal"}))


@pytest.mark.parametrize(("tokens", "share"), [(1, 1.0), (512, 1.0), (1024, 3 / 4), (2048, 5 / 8), (1 << 20, 0.5)])
def test_pieces_pass_two_devices_like_a_flow_line(tokens, share):
    """(n + 1) / 2n for n pieces of 512: nothing gained by one, half of the time in the limit."""
    assert LayerSplit(2, 512).share(tokens) == pytest.approx(share, rel=1e-3)

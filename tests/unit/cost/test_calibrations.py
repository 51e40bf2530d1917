"""Calibration files: what is found, what is written, what is refused."""

import datetime

import pytest

from perfmodel.cost import Calibration, FamilyFit, HostFit, Residuals, load_calibration, save_calibration
from perfmodel.errors import SpecError
from perfmodel.specs.scenario_file import load_hardware

A100 = load_hardware("a100-sxm-80gb")
FITTED = Calibration(
    device="a100-sxm-80gb",
    engine="vllm",
    source="kernel times, vLLM 0.15",
    date=datetime.date(2026, 3, 1),
    command="perfmodel calibrate --device a100",
    families={
        "gemm": FamilyFit(compute_fraction=0.89, memory_fraction=0.785, overhead_s=1.15e-5, knee=1.9),
        "gemm/fp8": FamilyFit(compute_fraction=0.7, residuals=Residuals(num_rows=40, p10=-0.1, p90=0.12)),
    },
    host=HostFit(serial_step_s=3e-4, serial_per_sequence_s=6e-6),
    step_residuals=Residuals(num_rows=12, p10=-0.05, p50=0.0, p90=0.07),
)


def test_what_is_written_is_read_back(tmp_path):
    path = save_calibration(FITTED, tmp_path / "made" / "on the way" / "x.yaml")
    assert load_calibration(A100, path=path) == FITTED
    assert path.read_text().startswith("# Written by `perfmodel calibrate`")


def test_without_a_file_the_datasheet_stands_in():
    found = load_calibration(A100, "an engine that nobody fitted")
    assert found.origin == "datasheet"
    assert found.device == "a100-sxm-80gb"
    assert load_calibration(A100, "datasheet").origin == "datasheet"


def test_the_file_of_the_device_and_profile_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("perfmodel.cost.calibrations.data_dir", lambda kind: tmp_path)
    save_calibration(FITTED, tmp_path / "a100-sxm-80gb@vllm.yaml")
    assert load_calibration(A100, "vllm") == FITTED
    assert load_calibration(A100, "sglang").origin == "datasheet"
    assert load_calibration(A100, "datasheet").origin == "datasheet"


def test_a_missing_file_asked_for_by_path_is_an_error(tmp_path):
    with pytest.raises(SpecError, match=r"nowhere\.yaml"):
        load_calibration(A100, path=tmp_path / "nowhere.yaml")


def test_a_fraction_above_one_is_refused_with_its_place(tmp_path):
    path = save_calibration(FITTED, tmp_path / "x.yaml")
    path.write_text(path.read_text().replace("0.785", "1.7"))
    with pytest.raises(SpecError, match=r"x\.yaml:\d+: .*memory_fraction"):
        load_calibration(A100, path=path)

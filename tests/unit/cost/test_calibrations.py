"""Calibration files: what is found, what is written, what is refused."""

import datetime

import pytest

from perfmodel.cost import Calibration, FamilyFit, HostFit, Residuals, load_calibration, save_calibration
from perfmodel.cost.calibrations.files import GenerationFit, calibrated_kernels, load_generation
from perfmodel.errors import SpecError
from perfmodel.files.fitted import save_fitted
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


def test_without_a_relation_the_datasheet_stands_in():
    found = load_calibration(load_hardware("arc-b580"), "vllm")
    assert found.origin == "datasheet"
    assert found.device == "arc-b580"
    assert load_calibration(A100, "datasheet").origin == "datasheet"


def test_the_file_of_the_device_and_profile_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("perfmodel.cost.calibrations.files.data_dir", lambda kind: tmp_path)
    save_calibration(FITTED, tmp_path / "a100-sxm-80gb@vllm.yaml")
    assert load_calibration(A100, "vllm") == FITTED
    assert load_calibration(A100, "datasheet").origin == "datasheet"


def test_the_nearest_relation_passes_its_fits_on_and_intervals_widen_with_the_distance(tmp_path, monkeypatch):
    monkeypatch.setattr("perfmodel.cost.calibrations.files.data_dir", lambda kind: tmp_path)
    monkeypatch.setattr("perfmodel.cost.calibrations.files.data_dir", lambda kind: tmp_path)
    save_calibration(FITTED, tmp_path / "a100-sxm-80gb@vllm.yaml")
    spreads = []
    for device, engine in (
        ("a100-sxm-80gb", "vllm"),  # its own
        ("a100-sxm-80gb", "sglang"),  # another engine on the same device
        ("a100-sxm-40gb", "vllm"),  # a sibling
        ("h100-sxm-80gb", "vllm"),  # the generation after
        ("b200-sxm", "vllm"),  # the one after that
    ):
        found = load_calibration(load_hardware(device), engine)
        assert found.families == FITTED.families
        assert found.device == device
        spreads.append(found.spread)
    assert spreads == sorted(set(spreads))
    assert "passed on from a100-sxm-80gb under vllm" in found.source
    assert load_calibration(load_hardware("arc-b580"), "vllm").origin == "datasheet"


def test_a_generation_that_is_known_to_reach_less_of_its_peaks_does_so_with_fits_from_the_one_before(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("perfmodel.cost.calibrations.files.data_dir", lambda kind: tmp_path)
    monkeypatch.setattr("perfmodel.cost.calibrations.files.data_dir", lambda kind: tmp_path)
    save_calibration(FITTED.model_copy(update={"device": "h100-sxm-80gb"}), tmp_path / "h100-sxm-80gb@vllm.yaml")
    known = GenerationFit(architecture="blackwell", compute=0.5, memory=0.9)
    assert load_generation("blackwell") is None
    save_fitted(known, tmp_path / "generation@blackwell.yaml")
    assert load_generation("blackwell") == known
    sibling, newer = (load_calibration(load_hardware(name), "vllm") for name in ("h200-sxm", "b200-sxm"))
    assert sibling.families == FITTED.families
    for key, fit in FITTED.families.items():
        assert newer.families[key].memory_fraction == pytest.approx(0.9 * fit.memory_fraction)
    assert load_calibration(load_hardware("h200-sxm"), "vllm", generation=known).families == FITTED.families


def test_a_sibling_goes_before_a_neighbour(tmp_path, monkeypatch):
    monkeypatch.setattr("perfmodel.cost.calibrations.files.data_dir", lambda kind: tmp_path)
    for device in ("a100-sxm-80gb", "h100-sxm-80gb"):
        save_calibration(FITTED.model_copy(update={"device": device}), tmp_path / f"{device}@vllm.yaml")
    assert "from h100-sxm-80gb" in load_calibration(load_hardware("h200-sxm"), "vllm").source
    assert "from a100-sxm-80gb" in load_calibration(load_hardware("l40s"), "vllm").source


def test_of_engines_equally_far_away_the_default_profile_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr("perfmodel.cost.calibrations.files.data_dir", lambda kind: tmp_path)
    for engine in ("an-engine", "vllm", "zz-engine"):
        save_calibration(FITTED.model_copy(update={"engine": engine}), tmp_path / f"a100-sxm-80gb@{engine}.yaml")
    found = load_calibration(A100, "perfmodel")
    assert "under vllm" in found.source


def test_a_missing_file_asked_for_by_path_is_an_error(tmp_path):
    with pytest.raises(SpecError, match=r"nowhere\.yaml"):
        load_calibration(A100, path=tmp_path / "nowhere.yaml")


def test_a_fraction_above_one_is_refused_with_its_place(tmp_path):
    path = save_calibration(FITTED, tmp_path / "x.yaml")
    path.write_text(path.read_text().replace("0.785", "1.7"))
    with pytest.raises(SpecError, match=r"x\.yaml:\d+: .*memory_fraction"):
        load_calibration(A100, path=path)


@pytest.mark.parametrize("engine", ["trtllm", "sglang", "vllm"])
@pytest.mark.parametrize("device", ["h100-sxm-80gb", "h200-sxm", "gb200"])
def test_a_kind_of_kernel_is_passed_on_from_whoever_measured_it(device, engine):
    """Latent attention of 128 query heads over one KV head is no grouped-query kernel, whatever the engine's table has.

    16 sequences of 8,000 tokens, 128 heads: 2 x 16 x 8000 x 128 x (576 + 512) = 36 GFLOP; no kernel for it takes longer
    than a tenth of the bf16 peak would.
    """
    from perfmodel.cost import OperatorTimer
    from perfmodel.ops import BatchShape, build_graph
    from perfmodel.specs import EngineSpec, load_model

    hardware = load_hardware(device)
    spec = EngineSpec(data_parallel_size=8, enable_expert_parallel=True, kv_cache_dtype="fp8", profile=engine)
    graph = build_graph(load_model("deepseek-v3"), spec)
    (node,) = [node for node in graph.nodes if node.name.startswith("attention_decode")]
    work = node.work(BatchShape(16, 16, (), 16, 16 * 8000))
    took = OperatorTimer(hardware, load_calibration(hardware, engine)).time(work).duration_s
    peak = hardware.declared.peak_flops_per_s["bf16"]
    assert work.flops == pytest.approx(2 * 16 * 8000 * 128 * (576 + 512))
    assert work.flops / peak < took < 10 * work.flops / peak


@pytest.mark.parametrize("seconds", [0.0, 5.9e-15, 1e-13, 2e-6])
def test_a_fit_may_find_next_to_nothing(seconds: float) -> None:
    """Least squares within bounds end near 0, not on it; a lane operation of a whole GPU takes 5e-14 s."""
    fit = FamilyFit(overhead_s=seconds, overhead_per_item_s=seconds, vector_op_s=seconds)
    host = HostFit(serial_step_s=seconds, hidden_per_sequence_s=seconds)
    assert (fit.overhead_per_item_s, host.serial_step_s) == (seconds, seconds)


def test_the_executors_kernels_stand_for_no_other_engine():
    """Its Triton kernels were measured on an H200: they say how long its own steps take there, and
    nothing of vLLM's, whose nearest relation is its own kernels on an H100."""
    h200 = load_hardware("h200-sxm")
    assert all(engine != "perfmodel" for _, engine, _ in calibrated_kernels("vllm"))
    assert "h100-sxm-80gb under vllm" in load_calibration(h200, "vllm").source
    assert "executor" in load_calibration(h200, "perfmodel").source

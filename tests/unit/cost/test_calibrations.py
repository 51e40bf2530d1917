"""Calibration files: what is found, what is written, what is refused."""

import datetime

import pytest

from perfmodel.cost import Calibration, FamilyFit, HostFit, Residuals, load_calibration, save_calibration
from perfmodel.cost.calibrations.files import calibrated_kernels, with_others
from perfmodel.cost.kernel_models.gemm import TiledGemmFit
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


def test_fits_of_kernels_that_nobody_runs_by_default_are_in_a_file_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("perfmodel.cost.calibrations.files.data_dir", lambda kind: tmp_path)
    others = {"gemm/fp8/static/1.2.0,1.1.0": FamilyFit(compute_fraction=0.6)}
    save_calibration(FITTED.model_copy(update={"others": others}), tmp_path / "a100-sxm-80gb@vllm.yaml")
    served = load_calibration(A100, "vllm")
    assert served == FITTED
    assert with_others(served, A100).others == others
    assert with_others(served, A100).families == FITTED.families


def _of_versions(folder, device):
    """A kernel of 0.24 with others before it, one that all versions have, and one of no known version."""
    fits = {
        name: FamilyFit(compute_fraction=n / 10) for n, name in enumerate(("new", "0.19", "0.14", "same", "any"), 1)
    }
    rare = FamilyFit(compute_fraction=0.6, residuals=Residuals(num_rows=5))
    calibration = FITTED.model_copy(
        update={
            "device": device,
            "families": {"moe/fp8_block": fits["new"], "gemm/bf16": fits["same"], "elementwise": fits["any"]},
            "versions": {"moe/fp8_block": "0.24.0", "gemm/bf16": "0.24.0,0.14.0"},
            "others": {
                "moe/fp8_block/triton/0.19.0": fits["0.19"].model_copy(update={"residuals": Residuals(num_rows=9)}),
                "moe/fp8_block/rare/0.19.0": rare,
                "moe/fp8_block/triton/0.14.0": fits["0.14"],
                "moe/fp8_block/rare/0.24.0": rare,
            },
        }
    )
    save_calibration(calibration, folder / f"{device}@vllm.yaml")


@pytest.mark.parametrize(
    ("version", "kernel"),
    [
        (None, 0.1),
        ("0.31.0", 0.1),
        ("nightly", 0.1),
        ("0.24.1", 0.1),
        ("0.23.0", 0.1),
        ("0.19.0rc2", 0.2),  # of two kernels the one with more rows
        ("0.18.1", 0.2),
        ("0.14.0", 0.3),
        ("0.11.0", 0.3),  # older than all: the first
    ],
)
def test_a_version_runs_the_kernels_that_were_measured_first_from_it_on(tmp_path, monkeypatch, version, kernel):
    monkeypatch.setattr("perfmodel.cost.calibrations.files.data_dir", lambda kind: tmp_path)
    _of_versions(tmp_path, "a100-sxm-80gb")
    hardware = load_hardware("a100-sxm-80gb")
    served = load_calibration(hardware, "vllm", version=version)
    assert served.fit("moe", "fp8_block").compute_fraction == kernel
    assert sum(key.startswith("moe/") for key in served.families) == 1
    assert (served.fit("gemm", "bf16").compute_fraction, served.fit("elementwise", "").compute_fraction) == (0.4, 0.5)
    sibling = load_calibration(load_hardware("a100-sxm-40gb"), "vllm", version=version)
    assert sibling.fit("moe", "fp8_block").compute_fraction == kernel


@pytest.mark.parametrize(
    ("device", "version", "kernel"),
    [("b200-sxm", "0.19.0", 0.1), ("h100-sxm-80gb", "0.18.1", 0.1), ("h100-sxm-80gb", "0.14.1", 0.2)],
)
def test_kernels_that_servers_ran_before_tables_timed_them_are_the_newest(
    tmp_path, monkeypatch, device, version, kernel
):
    """vLLM ran block FP8 experts on Blackwell, of 0.15 on Hopper, too, with other kernels than older tables have."""
    monkeypatch.setattr("perfmodel.cost.calibrations.files.data_dir", lambda kind: tmp_path)
    _of_versions(tmp_path, device)
    served = load_calibration(load_hardware(device), "vllm", version=version)
    assert served.fit("moe", "fp8_block").compute_fraction == kernel


def test_inputs_that_come_quantized_run_the_kernel_of_their_format():
    """Experts of ModelOpt's NVFP4: tables time the kernel of the format alone, and no other format's stands for it."""
    slow, own, static = (TiledGemmFit(launch_s=seconds) for seconds in (9e-6, 3e-6, 1e-6))
    calibration = Calibration(
        device="d",
        engine="e",
        families={"moe/fp8": slow, "moe/nvfp4": own, "gemm/nvfp4": own, "gemm/nvfp4_static": static},
    )
    assert calibration.fit("moe", "fp4", format="nvfp4_static") is own
    assert calibration.fit("gemm", "fp4", format="nvfp4_static") is static


def test_a_device_that_was_fitted_together_with_another_has_fits_of_its_own(tmp_path, monkeypatch):
    """Nothing is passed on, and no interval is widened; another device of the architecture is a relation."""
    monkeypatch.setattr("perfmodel.cost.calibrations.files.data_dir", lambda kind: tmp_path)
    both = FITTED.model_copy(update={"device": "h100-sxm-80gb", "devices": ("h200-sxm",)})
    save_calibration(both, tmp_path / "h100-sxm-80gb@vllm.yaml")
    h100, h200, sibling = (load_calibration(load_hardware(n), "vllm") for n in ("h100-sxm-80gb", "h200-sxm", "gh200"))
    assert (h200.families, h200.device, h200.source) == (FITTED.families, "h200-sxm", FITTED.source)
    assert (h200.spread, h200.is_passed_on) == (h100.spread, False)
    assert sibling.is_passed_on
    assert sibling.spread > h200.spread


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


def test_a_gpu_without_relations_has_what_all_kernels_have_in_common_and_other_devices_their_peaks(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("perfmodel.cost.calibrations.files.data_dir", lambda kind: tmp_path)
    save_calibration(FITTED.model_copy(update={"device": "any", "engine": "any"}), tmp_path / "prior.yaml")
    gpu, other = (load_calibration(load_hardware(name), "vllm") for name in ("arc-b580", "altra-m128-26"))
    assert (gpu.device, gpu.engine, gpu.families) == ("arc-b580", "vllm", FITTED.families)
    assert gpu.is_passed_on
    assert "of no related device" in gpu.source
    assert other.origin == "datasheet"


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
    spec = EngineSpec(data_parallel_size=8, enable_expert_parallel=True, profile=engine)
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
    nothing of vLLM's, whose own kernels were measured on an H200, too."""
    h200 = load_hardware("h200-sxm")
    assert all(engine != "perfmodel" for _, engine, _ in calibrated_kernels("vllm"))
    of_vllm = load_calibration(h200, "vllm")
    assert "h200-sxm" in of_vllm.source
    assert "executor" not in of_vllm.source
    assert not of_vllm.is_passed_on
    assert "executor" in load_calibration(h200, "perfmodel").source

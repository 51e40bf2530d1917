"""What whole runs say of makers without kernel tables: fits find what rows were made with, and pass on along lines."""

from dataclasses import replace

import pytest

from perfmodel.cost import load_calibration
from perfmodel.cost.calibrations.whole_runs import (
    OTHERS,
    ArchitectureFit,
    WholeRunFits,
    load_whole_runs,
    whole_run_calibration,
)
from perfmodel.errors import SpecError
from perfmodel.evidence.fit import recorded
from perfmodel.evidence.fit.whole_runs import fit_whole_runs, with_others, without_own
from perfmodel.evidence.observation import Observation
from perfmodel.evidence.predict.results import predict_row
from perfmodel.evidence.sources.setups import Setup
from perfmodel.files.fitted import save_fitted
from perfmodel.specs import load_hardware

KNOWN = ArchitectureFit(compute_fraction=0.35, memory_fraction=0.62, link_fraction=0.4, launch_s=5e-6, step_s=1e-3)
GAUDI = Setup(
    device="gaudi-2",
    device_class="accelerator",
    num_devices=1,
    engine="vllm",
    version="0.9.0",
    model="llama-3.1-8b",
    precision="bf16",
    kv_dtype="auto",
    load="burst",
    prompt=128,
    answer=64,
    tp=1,
    num_requests=1,
    max_num_seqs=512,
    is_in_process=True,
)


def row(setup, folder):
    fits = WholeRunFits(architectures={"gaudi": KNOWN})
    made = predict_row(Observation("", setup, {}), folder, fits).metrics
    measured = {"output_tokens_per_s": made["output_tokens_per_s"]}
    return Observation(str(setup), setup, measured, labels={"device": setup.device}, group=str(setup))


def test_a_fit_finds_the_numbers_that_rows_were_made_with(tmp_path):
    """Decodes of few sequences read weights, long prompts with one token behind them multiply."""
    setups = [replace(GAUDI, num_requests=count) for count in (1, 2, 4, 8)]
    setups += [replace(GAUDI, prompt=length, answer=2, num_requests=16) for length in (512, 1024, 2048)]
    fit = fit_whole_runs([row(setup, tmp_path) for setup in setups], tmp_path).architectures["gaudi"]
    assert fit.compute_fraction == pytest.approx(KNOWN.compute_fraction, rel=0.15)
    assert fit.memory_fraction == pytest.approx(KNOWN.memory_fraction, rel=0.15)
    assert fit.rows == len(setups)
    assert abs(fit.residuals.p90) < 0.1


def test_nothing_to_fit_is_said(tmp_path):
    with pytest.raises(SpecError, match="no results on devices without kernel tables"):
        fit_whole_runs([], tmp_path)


def test_a_line_passes_its_numbers_on_with_wider_intervals():
    fits = WholeRunFits(architectures={"cdna3": KNOWN})
    own = whole_run_calibration(load_hardware("mi300x"), "vllm", fits)
    sibling = whole_run_calibration(load_hardware("mi325x"), "vllm", fits)
    next_one = whole_run_calibration(load_hardware("mi355x"), "vllm", fits)
    assert own.default.compute_fraction == sibling.default.compute_fraction == 0.35
    assert own.spread == sibling.spread < next_one.spread
    assert whole_run_calibration(load_hardware("arc-b580"), "vllm", fits) is None
    anyone = whole_run_calibration(load_hardware("arc-b580"), "vllm", with_others(fits), or_others=True)
    assert anyone.spread > next_one.spread
    assert whole_run_calibration(load_hardware("mi300x"), "perfmodel", fits) is None


def test_each_generation_between_widens_the_interval_by_half():
    fits = WholeRunFits(architectures={"cdna2": KNOWN})
    devices = ("mi250x", "mi300x", "mi355x")
    spreads = [whole_run_calibration(load_hardware(name), "vllm", fits).spread for name in devices]
    assert spreads == [1.0, 1.5, 1.5 * 1.5]


def test_leaving_an_architecture_out_leaves_the_mean_of_the_others():
    """The geometric mean of 0.2 and 0.45 is 0.3."""
    fits = WholeRunFits(
        architectures={
            "cdna3": KNOWN,
            "gaudi": KNOWN.model_copy(update={"compute_fraction": 0.2}),
            "tpu": KNOWN.model_copy(update={"compute_fraction": 0.45}),
        }
    )
    left = without_own(with_others(fits))
    assert left.architectures["cdna3"].compute_fraction == pytest.approx(0.3)
    assert left.architectures["gaudi"].compute_fraction == pytest.approx((0.35 * 0.45) ** 0.5, rel=1e-3)


def test_what_is_written_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr("perfmodel.cost.calibrations.whole_runs.data_dir", lambda kind: tmp_path)
    assert load_whole_runs() == WholeRunFits()
    fits = with_others(WholeRunFits(source="x", architectures={"cdna3": KNOWN}))
    save_fitted(fits, tmp_path / "whole_runs.yaml")
    assert load_whole_runs() == fits
    assert set(fits.architectures) == {"cdna3", OTHERS["gpu"]}


def test_devices_without_tables_answer_with_the_committed_fit_and_those_with_tables_do_not():
    found = load_calibration(load_hardware("mi300x"), "vllm")
    assert found.origin == "calibrated"
    assert found.source.startswith("whole runs on cdna3")
    assert not load_calibration(load_hardware("h200-sxm"), "vllm").source.startswith("whole runs")


def test_programs_that_are_compiled_whole_have_cheaper_kernels_than_a_gpu():
    """Of a GPU's 5 us a launch, the means of all architectures give an unknown TPU a fifth, an NPU two fifths."""
    fits = with_others(WholeRunFits(architectures={"cdna3": KNOWN, "gaudi": KNOWN.model_copy(update={"kind": "npu"})}))
    mean_s = (5e-6 * 5e-6 * 5 / 2) ** 0.5  # gaudi's, as of a GPU, is 5/2 of what it is
    assert fits.architectures[OTHERS["gpu"]].launch_s == pytest.approx(mean_s, rel=1e-3)
    for name, share in (("tpu-v6e", 1 / 5), ("arc-b580", 1.0)):
        found = whole_run_calibration(load_hardware(name), "vllm", fits, or_others=True)
        assert found.default.overhead_s == pytest.approx(share * mean_s, rel=1e-3)


def test_a_static_batch_that_does_not_fit_is_not_predicted_in_another_format(tmp_path):
    """163 sequences of 2,176 tokens of Llama 2 7B are 186 GB of KV in bf16, on 96 GB; 50 are 57 GB."""
    static = replace(GAUDI, model="llama-2-7b", precision="fp8", kv_dtype="", prompt=128, answer=2048, is_static=True)
    fits = WholeRunFits(architectures={"gaudi": KNOWN})
    many, few = (
        predict_row(Observation("", replace(static, num_requests=count), {}), tmp_path, fits) for count in (163, 50)
    )
    assert "static batch of 163 sequences of 2176 tokens" in many.reason
    assert few.scenario.engine.kv_cache_dtype == "auto"


def test_a_fit_is_written_among_the_calibrations_and_its_tables_stay_as_they_are(tmp_path, monkeypatch):
    table = tmp_path / "other_devices.csv"
    table.write_text("id,kind,device,engine,model\na,offline,gaudi-2,vllm,llama-3.1-8b\n")
    before = table.read_bytes()
    monkeypatch.setattr(recorded, "fit_whole_runs", lambda *_: WholeRunFits(architectures={"gaudi": KNOWN}))
    _, file = recorded.fit_recorded_for_all("whole_runs", tmp_path, tmp_path / "out")
    assert file == tmp_path / "out" / "whole_runs.yaml"
    assert file.is_file()
    assert table.read_bytes() == before

"""`validate local`: each device counts once, and rows are priced by the steps that the simulator takes."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.api import simulate
from perfmodel.evidence.kinds.pooled import pooled_over_devices, validate_local
from perfmodel.evidence.predict.results import predict_rows
from perfmodel.evidence.report import Rows, median_of_others
from perfmodel.evidence.sources.local import read_local_rows

HEADER = "id,device,device_class,backend,model,model_params,gguf_type,test,n_prompt,n_gen,tokens_per_s,group,flags\n"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct,8e9,Q4_K_M"


def test_two_thirds_of_the_rows_on_one_device_count_once():
    """Medians of 10 %, 30 % and 50 %: the median over devices is 30 %, however many rows the first has."""
    devices = ["a"] * 6 + ["b", "b", "c"]
    predicted = [1.1] * 6 + [0.7, 0.7, 1.5]
    low = [0.5] * 6 + [0.5, 0.5, 0.5]
    high = [1.0] * 6 + [1.0, 1.0, 1.0]
    stats = pooled_over_devices(Rows(predicted, [1.0] * 9, [""] * 9, (low, high), [1.2] * 6 + [1.4, 1.4, 1.6]), devices)
    assert stats.median_ape == pytest.approx(0.3)
    assert stats.mean_ape == pytest.approx(0.3)
    assert stats.bias == pytest.approx(0.1)
    assert stats.interval_coverage == pytest.approx(2 / 3)
    assert stats.interval_width == pytest.approx(2)
    assert stats.trivial_ape == pytest.approx(0.4)


def test_the_simplest_prediction_is_the_median_of_the_other_rows_of_the_device():
    assert median_of_others([1, 2, 4, 9, 100], ["a", "a", "a", "a", "b"]).tolist() == [4, 4, 2, 2, 3]
    assert math.isnan(median_of_others([1.0], ["a"])[0])
    values = np.random.default_rng(0).random(41)
    without = [np.median(np.delete(values, i)) for i in range(41)]
    assert median_of_others(values, ["a"] * 41) == pytest.approx(without)


def test_a_figure_that_proves_nothing_shows_it():
    """Predictions equal to the simplest ones have their error, and intervals as wide as its errors spread: with ratios
    of measured to simplest evenly from 0.5 to 1.5, a median error of 1/3 and 1.4 / 0.6 from the 10th to the 90th."""
    measured = np.linspace(0.5, 1.5, 101)
    stats = Rows(np.ones(101), measured, [""] * 101, (0.6, 1.4), np.ones(101)).stats()
    assert stats.trivial_ape == stats.median_ape
    assert stats.trivial_width == pytest.approx(1.4 / 0.6)
    assert stats.interval_width == pytest.approx(1.4 / 0.6)
    assert Rows(np.ones(101), measured, [""] * 101).stats().trivial_ape is None


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "figures.csv"
    file.write_text(
        HEADER
        + f"a,rtx-4090-24gb,gpu,cuda,{LLAMA},tg,0,128,100,g1,\n"
        + f"b,rtx-4090-24gb,gpu,cuda,{LLAMA},tg,0,128,140,g1,\n"
        + f"c,rtx-4090-24gb,gpu,cuda,{LLAMA},pp,512,0,5000,g2,\n"
        + f"d,apple-m1-8gpu,apple,metal,{LLAMA},tg,0,128,10,g3,\n"
        + f"e,rtx-3060-12gb,gpu,cuda,{LLAMA},tg,0,128,2,g4,slow: below 25 % of peak bandwidth\n"
        + f"f,unheard-of,gpu,cuda,{LLAMA},tg,0,128,2,g5,\n"
    )
    return file


def test_rows_groups_and_reasons(table):
    report = validate_local(table)
    assert (report.rows, report.covered) == (6, 5)
    assert set(report.metrics) == {"decode_tokens_per_s", "prompt_tokens_per_s"}
    assert report.metrics["decode_tokens_per_s"].rows == 2  # groups g1 and g3; g4 is apart
    assert report.by["apart: flagged rows"]["decode_tokens_per_s"].rows == 1
    floor = report.by["identical settings on other hosts"]["decode_tokens_per_s"]
    assert floor.median_ape == pytest.approx(20 / 120)  # 100 and 140 around 120
    assert any("unheard-of: no file or alias" in note for note in report.notes)


def test_the_dimensions_that_tools_ask_for(table):
    by = validate_local(table).to_json()["by"]
    for key in ("device rtx-4090-24gb", "device class apple", "backend cuda", "gguf type Q4_K_M", "test pp"):
        assert key in by
    assert any(key.startswith("model ") for key in by)
    json.dumps(by, allow_nan=False)


def test_a_row_is_priced_by_the_steps_of_the_simulator(tmp_path):
    """One request of 512 tokens in and 257 out: its mean gap is the step at the mean depth, 512 + 128 tokens."""
    file = tmp_path / "figures.csv"
    file.write_text(HEADER.replace("n_gen", "depth,n_gen") + f"a,rtx-4090-24gb,gpu,cuda,{LLAMA},tg,0,512,256,100,g1,\n")
    rows, _ = read_local_rows(file)
    (pair,) = predict_rows([replace(rows[0], setup=replace(rows[0].setup, tool="llama-bench"))], tmp_path)
    traffic = pair.scenario.traffic.model_copy(
        update={
            "input_tokens": pair.scenario.traffic.input_tokens.model_copy(update={"value": 512}),
            "output_tokens": pair.scenario.traffic.output_tokens.model_copy(update={"value": 257}),
        }
    )
    summary = simulate(pair.scenario.model_copy(update={"traffic": traffic})).summary
    assert 1e3 / summary["mean_tpot_ms"] == pytest.approx(pair.metrics["decode_tokens_per_s"], rel=0.01)

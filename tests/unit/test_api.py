"""perfmodel from Python: its functions answer as the commands do, and its documentation runs as it stands."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import perfmodel as pm
from perfmodel.cli import app
from perfmodel.planning.points import Point, evaluate

NAME = "llama-3.1-8b-a100"
FEW = {"traffic.num_requests": 40}
PAGE = Path(__file__).parents[2] / "docs/python.md"


@pytest.fixture(scope="module")
def result():
    return pm.simulate(NAME, FEW)


def test_the_page_runs_as_it_stands(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) > 4
    exec("\n".join(blocks), {})
    shown = capsys.readouterr().out
    assert "Successful requests" in shown
    assert "Did you mean 'max_num_seqs'" in shown


def test_simulate_answers_as_the_command_does():
    done = CliRunner().invoke(app, ["simulate", NAME, "--set", "traffic.num_requests=40", "--json"])
    document = json.loads(done.stdout)
    summary = pm.simulate(NAME, FEW, intervals=True).summary
    assert document["mean_tpot_ms"] == summary["mean_tpot_ms"]
    assert document["interval"] == json.loads(json.dumps(summary["interval"]))


def test_overrides_are_a_mapping_texts_or_keywords(result):
    by_text = pm.simulate(NAME, ["traffic.num_requests=40"])
    by_keyword = pm.simulate(NAME, **{"traffic.num_requests": 40})
    by_scenario = pm.simulate(pm.load_scenario(NAME, ["traffic.num_requests=40"]))
    assert by_text.summary == by_keyword.summary == by_scenario.summary == result.summary
    assert pm.simulate(pm.load_scenario(NAME), FEW).summary == result.summary
    assert pm.simulate(NAME, FEW, seed=3).scenario.seed == 3


def test_a_result_prints_itself(result):
    text, html = str(result), result._repr_html_()
    assert text == repr(result)
    for shown in (text, html):
        assert "Successful requests" in shown
        assert "TPOT" in shown
    assert "\x1b" not in text
    assert html.startswith("<pre")
    assert isinstance(result, pm.RunResult)


def test_columns_are_equally_long_and_add_up(result):
    requests, steps = result.columns(), result.columns("steps")
    assert {len(column) for column in requests.values()} == {40}
    assert len({len(column) for column in steps.values()}) == 1
    np.testing.assert_allclose(requests["ttft_s"].mean() * 1e3, result.summary["mean_ttft_ms"])
    with pytest.raises(pm.SpecError, match="expected 'requests' or 'steps'"):
        result.columns("tokens")
    with pytest.raises(pm.SpecError, match="this run has none"):
        pm.simulate(NAME, FEW, keep_steps=False).columns("steps")


@pytest.mark.skipif(importlib.util.find_spec("polars") is None, reason="polars is not installed")
def test_columns_are_a_data_frame(result):
    import polars

    table = pm.sweep(NAME, {"engine.quantization": [None, "fp8"]}, FEW, workers=1)
    for columns in (result.columns(), result.columns("steps"), table.columns()):
        assert polars.DataFrame(columns).shape == (len(next(iter(columns.values()))), len(columns))


def test_a_sweep_has_a_row_for_each_combination():
    over = {"engine.max_num_seqs": [8, 16], "model": ["llama-3.1-8b", "llama-3.1-70b"]}
    table = pm.sweep(NAME, over, FEW, ["mean_tpot_ms", "weight_gb"], workers=1)
    columns = table.columns()
    assert columns["engine.max_num_seqs"].tolist() == [8, 8, 16, 16]
    assert np.isnan(columns["mean_tpot_ms"]).tolist() == [False, True, False, True]
    assert "Smallest that fits" in columns["problem"][1]
    alone = evaluate(Point(NAME, ("mean_tpot_ms",), ("traffic.num_requests=40", "engine.max_num_seqs=16")))
    assert columns["mean_tpot_ms"][2] == alone.values["mean_tpot_ms"]
    assert "Smallest that fits" in str(table)
    assert table._repr_html_().startswith("<pre")


def test_what_if_prints_itself_and_has_columns():
    report = pm.whatif(NAME, {"hardware.hbm.bandwidth": "0.5x..2x:3"}, FEW, "mean_tpot_ms", workers=1)
    assert "HBM bandwidth" in str(report)
    columns = report.columns()
    assert columns["path"].tolist() == ["hardware.hbm.bandwidth"]
    assert -1 < columns["elasticity"][0] < 0
    assert columns["high"][0] < columns["base"][0] < columns["low"][0]


def test_plan_is_make_plan(tmp_path):
    assert pm.plan is pm.make_plan
    space = {"hardware": ["a100-sxm-80gb"], "tensor_parallel_size": [1], "max_num_seqs": [64]}
    space["max_num_batched_tokens"] = [2048]
    overrides = {
        "traffic.input_tokens": {"distribution": "fixed", "value": 300},
        "traffic.output_tokens": {"distribution": "fixed", "value": 40},
        "plan": {"finalists": 1, "seeds": 2, "num_requests": 100, "max_gpus": 4, "space": space},
    }
    found = pm.plan(NAME, overrides, store=tmp_path / "store", workers=1)
    assert found.winner is not None
    assert "vllm serve" in str(found)
    assert found._repr_html_().startswith("<pre")
    assert found.columns()["gpus"].tolist() == [each.num_devices for each in (*found.ranked, *found.missed)]

"""Recorded entries that are something else than they should be are left out by name, or refused; never a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest

from perfmodel.calibrate.serving.runs import read_request_log, read_serving_runs
from perfmodel.calibrate.steady.states import read_steady_states
from perfmodel.errors import SpecError


@pytest.mark.parametrize("entry", [3, "x", [], {"id": "a", "workload": 0.5}, {"id": "a", "workload": {"stages": 3}}])
def test_a_serving_run_that_is_none_is_left_out(tmp_path: Path, entry: Any) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([entry]))
    runs, left_out = read_serving_runs(path)
    assert (runs, len(left_out)) == ([], 1)


@pytest.mark.parametrize("concurrency", ["0", "inf", "1e400", "nan", ""])
def test_a_steady_state_without_a_number_is_left_out(tmp_path: Path, concurrency: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"id,concurrency,system,model_path,precision,isl,osl\na,{concurrency},h100_sxm,x/y,bf16,inf,0\n")
    rows, left_out = read_steady_states(path)
    assert (rows, len(left_out)) == ([], 1)


@pytest.mark.parametrize("value", [[None], "x", 0, -1, "9" * 5000])
def test_a_log_with_an_impossible_engine_is_refused_in_one_line(tmp_path: Path, value: Any) -> None:
    folder = tmp_path / "h100-run" / "e2e"
    folder.mkdir(parents=True)
    arguments = {"model": "meta-llama/Llama-3.1-8B", "max_num_seqs": value}
    (folder / "meta.json").write_text(json.dumps({"engine_kwargs": arguments, "vllm_version": "0.10.0"}))
    (folder / "requests.csv").write_text(
        "client_arrival_s,first_token_s,last_token_s,input_toks,output_toks\n0,1,2,3,4\n"
    )
    with pytest.raises(SpecError, match=r"meta.json: its description is incomplete: .*max_num_seqs") as refused:
        read_request_log(folder.parent, tmp_path)
    assert "\n" not in str(refused.value)

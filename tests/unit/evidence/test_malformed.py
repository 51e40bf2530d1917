"""Recorded entries that are something else than they should be are left out by name, or refused; never a traceback."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.errors import SpecError
from perfmodel.evidence.breakdown import why
from perfmodel.evidence.fit.kernels import predict
from perfmodel.evidence.fit.systems import MODULES
from perfmodel.evidence.kinds.operators import validate_operators
from perfmodel.evidence.sources.kernels import KernelTable, read_table
from perfmodel.evidence.sources.recorded import read_request_log, read_serving_runs
from perfmodel.evidence.sources.steady import read_steady_states
from perfmodel.specs import load_hardware


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


SLOW = {
    "mla_bmm": {"bmm_dtype": "bfloat16", "num_heads": 128.0},
    "gemm": {"gemm_dtype": "bfloat16", "n": 65536.0, "k": 8192.0},
}


@pytest.mark.parametrize(("op", "tokens", "per_ms"), [("mla_bmm", "num_tokens", 4e3), ("gemm", "m", 150)])
def test_a_kernel_timed_at_long_prompts_alone_is_fitted(op: str, tokens: str, per_ms: float) -> None:
    """The quickest of its rows takes longer than any launch, where the search began."""
    counts = np.array([4e5, 8e5, 1.6e6])
    columns = {name: np.full(len(counts), value) for name, value in {**SLOW[op], "kernel_source": "any"}.items()}
    columns |= {"engine_version": np.full(len(counts), "vllm 0.14"), tokens: counts, "latency_ms": counts / per_ms}
    table = KernelTable("a100_sxm", op, columns)
    (group,) = MODULES[op].groups(table, DeviceFacts.of(load_hardware("a100-sxm-80gb")))
    assert predict(group, MODULES[op].fit([group])) == pytest.approx(group.seconds, rel=0.1)


GEMM = {"m": 64, "n": 4096, "k": 4096, "gemm_dtype": "bfloat16", "kernel_source": "any", "engine_version": "vllm 0.14"}


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("k", None, "has no column 'k'; it has m"),
        ("latency_ms", 0.0, "gemm.csv: no row has a latency_ms above 0"),
        ("latency_ms", "fast", "its rows cannot be understood: could not convert"),
        ("m", "x", "its rows cannot be understood: "),
    ],
)
def test_a_kernel_table_with_a_wrong_column_is_refused(tmp_path: Path, column: str, value: Any, said: str) -> None:
    row = {**GEMM, "latency_ms": 0.05, column: value}
    row = {name: each for name, each in row.items() if each is not None}
    lines = [",".join(row), *[",".join(map(str, row.values()))] * 12]
    table = tmp_path / "h100_sxm" / "gemm.csv"
    table.parent.mkdir()
    table.write_text("\n".join(lines) + "\n")
    parquet, csv = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow.csv")
    parquet.write_table(csv.read_csv(table), table.with_suffix(".parquet"))
    with pytest.raises(SpecError, match=said):
        validate_operators(tmp_path)


def test_rows_that_carry_no_time_are_counted_and_not_read(tmp_path: Path) -> None:
    file = tmp_path / "gemm.csv"
    file.write_text("m,latency_ms\n64,0.05\n65,0\n66,nan\n67,\n68,-1\n69,inf\n70,0.06\n")
    table = read_table(file)
    assert (table["m"].tolist(), table.untimed) == ([64, 70], 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("m,latency_ms\n64,0\n65,0\n", r"gemm.csv: no row has a latency_ms above 0"),
        ("m,seconds\n64,1\n", r"gemm.csv: has no column latency_ms"),
    ],
)
def test_a_table_without_times_is_not_read(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "gemm.csv"
    file.write_text(text)
    with pytest.raises(SpecError, match=said):
        read_table(file)


def test_a_report_says_how_many_rows_carry_no_time(tmp_path: Path) -> None:
    file = tmp_path / "h100_sxm" / "gemm.csv"
    file.parent.mkdir()
    lines = [",".join(map(str, {**GEMM, "latency_ms": seconds}.values())) for seconds in (0.05, 0, 0.06, 0)]
    file.write_text("\n".join([",".join([*GEMM, "latency_ms"]), *lines]) + "\n")
    report = validate_operators(tmp_path)
    assert (report.rows, report.covered) == (2, 2)
    assert "h100_sxm/gemm: 2 rows carry no time" in report.notes


def test_a_prediction_of_nothing_is_said_to_be_one() -> None:
    """An answer of one token has no time per token after it, whatever a log says."""
    assert why(0.0, 12.0, {"steps": 1.0}, "a token") == "predicted 0"

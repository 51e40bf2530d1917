"""The traffic files say what the public traces say: means and 99th percentiles, recomputed where the traces are."""

import csv
import json
import statistics
from pathlib import Path

import pytest

from perfmodel.specs import load_traffic


def p99(values: list[int]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


@pytest.mark.parametrize(("name", "file"), [("azure-conversation", "conv"), ("azure-code", "code")])
def test_azure(shared: Path, name: str, file: str) -> None:
    with (shared / "traces" / f"AzureLLMInferenceTrace_{file}.csv").open(newline="") as trace:
        rows = list(csv.DictReader(trace))
    check(name, [int(r["ContextTokens"]) for r in rows], [int(r["GeneratedTokens"]) for r in rows])


def test_mooncake(shared: Path) -> None:
    with (shared / "traces" / "mooncake_conversation_trace.jsonl").open() as trace:
        rows = [json.loads(line) for line in trace]
    check("mooncake-conversation", [r["input_length"] for r in rows], [r["output_length"] for r in rows])


def check(name: str, inputs: list[int], outputs: list[int]) -> None:
    traffic = load_traffic(name)
    for lengths, values in ((traffic.input_tokens, inputs), (traffic.output_tokens, outputs)):
        assert lengths is not None
        assert lengths.mean == pytest.approx(statistics.fmean(values), rel=0.01)
        assert lengths.p99 == pytest.approx(p99(values), rel=0.01)
        assert lengths.max == max(values)
        assert lengths.min <= min(v for v in values if v > 0)

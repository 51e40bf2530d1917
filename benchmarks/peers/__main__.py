"""Predictions of AIConfigurator (whose engine AISimulate is) and ours, of the same measured servers.

    python benchmarks/peers [--each 3] [--report MD]

Servers at a fixed concurrency whose lengths are known and which draft nothing (measurements/steady-state; its rows come
from AIConfigurator's repository). AIConfigurator runs in an environment of its own under build/peers, made on first use
(0.9 GB), in its default mode (kernel tables of the newest engine version). It is asked for mean lengths, and in the
format of the checkpoint where that is the row's, else in the row's formats; where it refuses, in the other. Ours are as
shipped, which is partly fitted to these rows, and by a fit without the row's cell (model, version, device, format).
"""

__all__ = ["main"]

import argparse
import csv
import gzip
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from perfmodel.evidence.leave_out import validate_left_out  # noqa: E402

_VERSION = "0.12.0"
_MEASURED = ROOT / "measurements" / "steady-state" / "unified.csv.gz"
_STORE = ROOT / "reports" / "accuracy_202611.csv.gz"
_METRICS = {"ttft_mean": "TTFT", "tpot_mean": "TPOT"}
_REPOSITORIES = {"meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B", "zhipuai/GLM-5": "zai-org/GLM-5"}
_DENSE = ("Llama-3.1", "Qwen3-32B")
_PUBLISHED = {"gpt-oss": "fp4", "DeepSeek-V3": "fp8", "DeepSeek-R1": "fp8", "MiniMax": "fp8"}  # checkpoints' formats
_MEAN_SHARE = 0.9  # of nominal lengths, which are drawn between 0.8 and 1 of them


class Compared(NamedTuple):
    """A row's figure as measured, and as predicted by AIConfigurator, by us, and by us without the row's cell."""

    metric: str
    group: str
    measured: float
    peer: float
    shipped: float
    left_out: float
    trivial: float


def _python() -> Path:
    """The interpreter of AIConfigurator's environment, which is made if it is not there."""
    place = ROOT / "build" / "peers" / f"aiconfigurator-{_VERSION}"
    python = place / "bin" / "python"
    if not (place / "complete").exists():
        print(f"making {place} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", f"aiconfigurator=={_VERSION}"], check=True)
        (place / "complete").touch()
    return python


def _arguments(row: dict[str, str], as_published: bool) -> dict[str, Any]:
    """AIConfigurator's arguments for `row`; `as_published`: in the formats of the checkpoint."""
    gpus, ep, ranks = int(row["gpus"]), int(row["ep"]), int(row["attention_dp"])
    share = 1.0 if row["lengths"] == "fixed" else _MEAN_SHARE
    asked = {
        "model_path": _REPOSITORIES.get(row["model_path"], row["model_path"]),
        "system_name": row["system"],
        "backend_name": row["backend"],
        "isl": round(share * int(row["isl"])),
        "osl": round(share * int(row["osl"])),
        "batch_size": max(1, round(int(row["concurrency"]) / ranks)),
        "tp_size": int(row["attention_tp"]),
        "attention_dp_size": ranks,
    }
    if not any(name in row["model_path"] for name in _DENSE):
        asked |= {"moe_ep_size": ep, "moe_tp_size": gpus // ep}
    if not as_published and row["precision"] != "bf16":
        asked |= {"gemm_quant_mode": row["gemm_quant_mode"], "kvcache_quant_mode": "fp8"}
        asked |= {"moe_quant_mode": row["moe_quant_mode"]} if "moe_ep_size" in asked else {}
    return asked


def _answers(rows: list[dict[str, str]]) -> list[list[float] | str]:
    """[TTFT, TPOT] in ms of each of `rows`, or why there is none."""
    is_published = [
        _PUBLISHED.get(next(filter(row["model_path"].count, _PUBLISHED), "")) == row["precision"] for row in rows
    ]
    asked = [
        [_arguments(row, first), _arguments(row, not first)] for row, first in zip(rows, is_published, strict=True)
    ]
    command = [_python(), Path(__file__).with_name("ask_aiconfigurator.py")]
    done = subprocess.run(command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True)
    answers: list[list[float] | str] = json.loads(done.stdout)
    return answers


def _table(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(gzip.decompress(file.read_bytes()).decode().splitlines()))


def _shipped() -> dict[tuple[str, str], tuple[float, float]]:
    """(predicted, trivial) by metric and row, of the whole table of accuracy."""
    chosen = [row for row in _table(_STORE) if row["set"] == "servers at a fixed concurrency"]
    return {(row["metric"], row["row"]): (float(row["predicted"]), float(row["trivial"])) for row in chosen}


def _compared(rows: list[dict[str, str]], answers: list[list[float] | str]) -> Iterator[Compared]:
    peers = {row["id"]: answer for row, answer in zip(rows, answers, strict=True) if not isinstance(answer, str)}
    groups = {row["id"]: f"{row['backend']}, {row['system'].removesuffix('_sxm').upper()}" for row in rows}
    shipped = _shipped()
    report = validate_left_out("steady-state", _MEASURED, "cell")
    for comparison in report.comparisons:
        place = list(_METRICS).index(comparison.metric)
        values = comparison.rows
        for label, own, measured in zip(values.labels, values.predicted, values.measured, strict=True):
            if label in peers and (comparison.metric, label) in shipped:
                fitted, trivial = shipped[comparison.metric, label]
                own_group = groups[label]
                yield Compared(comparison.metric, own_group, measured, peers[label][place], fitted, own, trivial)


def _line(name: str, rows: list[Compared]) -> str:
    measured = np.array([row.measured for row in rows])
    cells = [name, f"{len(rows)}"]
    errors = {field: np.abs([getattr(row, field) for row in rows] / measured - 1) for field in Compared._fields[3:]}
    for field in ("peer", "left_out", "shipped"):
        cells.append(f"{np.median(errors[field]):.1%} / {np.quantile(errors[field], 0.9):.0%}")
    cells += [f"{np.median(errors['trivial']):.0%}", f"{np.mean(errors['left_out'] < errors['peer']):.0%}"]
    return f"| {' | '.join(cells)} |"


def _report(rows: list[dict[str, str]], answers: list[list[float] | str], compared: list[Compared], each: int) -> str:
    why = Counter(answer.partition(":")[0] for answer in answers if isinstance(answer, str))
    refused = ", ".join(f"{count} by {name}" for name, count in why.most_common())
    lines = [
        "# AIConfigurator and we, on the same measured servers",
        "",
        f"`python benchmarks/peers --each {each}`: AIConfigurator {_VERSION} answers {len(rows) - why.total()} of "
        f"{len(rows)} servers (refused: {refused}); of these, those in our table of accuracy. "
        f"Errors: median / nine in ten below.",
    ]
    columns = ("servers", "rows", "AIConfigurator", "ours, cell left out", "ours, as shipped", "trivial")
    for metric, title in _METRICS.items():
        groups = defaultdict[str, list[Compared]](list)
        for row in compared:
            if row.metric == metric:
                groups[row.group].append(row)
        everyone = [row for members in groups.values() for row in members]
        lines += ["", f"## {title}", "", f"| {' | '.join(columns)} | left-out ours nearer |"]
        lines += ["|---|" + (len(columns)) * "---:|", _line("all", everyone)]
        lines += [_line(name, members) for name, members in sorted(groups.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Ask both, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=1, help="of so many servers one is asked for")
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    rows = [row for row in _table(_MEASURED) if row["mtp_unlabelled"] == "False" and row["lengths"] != "unknown"]
    rows = sorted(rows, key=lambda row: (row["backend"], row["system"], row["id"]))[:: asked.each]
    answers = _answers(rows)
    text = _report(rows, answers, list(_compared(rows, answers)), asked.each)
    print(text)
    if asked.report is not None:
        asked.report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

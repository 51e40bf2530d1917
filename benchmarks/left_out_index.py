"""Prediction errors of setups left out of the fit, from the cross-validation reports.

python benchmarks/left_out_index.py    # writes hardware_specs/validated/left_out/errors.csv (perfmodel.trust)
"""

__all__ = ["left_out_table"]

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfmodel.files.catalog import data_dir
from perfmodel.trust.index import LeftOutError

ROOT = Path(__file__).parents[1]
_STEADY = ("held-out_steady-state_cells_202611.md", "held-out_steady-state_hopper-blackwell_202611.md")
_SECTION = re.compile(r"^(\w+), leaving out one (cell|model|device) at a time:.*?\n\n(.*?)left out:", re.M | re.S)
_FIGURES = re.compile(r"^  (tpot_mean|ttft_mean) +([\d.]+) / *[\d.]+ / *([\d.]+)", re.M)
_TESTS = {"decode": "decode_tokens_per_s", "prompts": "prompt_tokens_per_s"}
_HEAD = "engine,left_out,devices,metric,median_error,p90_error,report"


def left_out_table() -> str:
    """The text of the file."""
    lines = [",".join((*map(str, line[:4]), f"{line.median:.4g}", f"{line.p90:.4g}", line.report)) for line in _lines()]
    return "\n".join([_HEAD, *lines, ""])


def _lines() -> Iterator[LeftOutError]:
    for name in _STEADY:  # servers at a fixed concurrency
        for engine, cut, text in _SECTION.findall((ROOT / "reports" / name).read_text(encoding="utf-8")):
            for metric, median, p90 in _FIGURES.findall(text):
                yield LeftOutError(engine, cut, "", metric, float(median) / 100, float(p90) / 100, name)
    local, held_out = _report("local_202611.json"), "held_out"
    for cut in ("model", "device"):
        for what, errors in local[held_out][cut].items():
            test, devices = what.split(", ")
            if devices != "all":
                yield _left_out_error("llamacpp", cut, devices, _TESTS[test], errors, "local_202611.json")
    served = _report("served_202611.json")["served"]["metrics"]
    for metric in ("tpot_mean", "ttft_mean"):
        yield _left_out_error("", "architecture", "", metric, served[metric], "served_202611.json")
    systems = _report("published_figures_202611.json")["metrics"]["systems"]
    yield _left_out_error("", "datasheet", "", "tpot_mean", systems, "published_figures_202611.json")


def _left_out_error(
    engine: str, cut: Any, devices: str, metric: str, errors: dict[str, Any], report: str
) -> LeftOutError:
    return LeftOutError(engine, cut, devices, metric, errors["median_ape"], errors["p90_ape"], report)


def _report(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((ROOT / "reports" / name).read_text(encoding="utf-8"))
    return data


if __name__ == "__main__":
    file = data_dir("validated") / "left_out" / "errors.csv"
    file.parent.mkdir(exist_ok=True)
    file.write_text(left_out_table(), encoding="utf-8", newline="\n")

"""Prediction errors of setups left out of the fit, from the reports of `perfmodel validate KIND --leave-out GROUP`.

python benchmarks/left_out_index.py    # writes hardware_specs/validated/left_out/errors.csv (perfmodel.trust)
"""

__all__ = ["left_out_table"]

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfmodel.files.catalog import data_dir
from perfmodel.trust.index import LeftOutError

ROOT = Path(__file__).parents[1]
_HEAD = "engine,left_out,devices,metric,median_error,p90_error,report"
_LATENCIES = ("tpot_mean", "ttft_mean")
_TESTS = {"decode": "decode_tokens_per_s", "prompts": "prompt_tokens_per_s"}


def left_out_table() -> str:
    """The text of the file."""
    lines = [",".join((*map(str, line[:4]), f"{line.median:.4g}", f"{line.p90:.4g}", line.report)) for line in _lines()]
    return "\n".join([_HEAD, *lines, ""])


def _lines() -> Iterator[LeftOutError]:
    for cut in ("cell", "model", "device"):  # servers at a fixed concurrency
        yield from _of_groups(f"held-out_steady-state_{cut}_202611.json", cut, "engine ", _LATENCIES)
    for cut in ("model", "device"):
        for what, errors in _report("local_202611.json")["held_out"][cut].items():
            test, devices = what.split(", ")
            if devices != "all":
                line = _error("llamacpp", cut, _TESTS[test], errors, "local_202611.json")
                yield line._replace(devices=devices)
    served, published = "held-out_served_architecture_202611.json", "published_figures_202611.json"
    for metric in _LATENCIES:
        yield _error("", "architecture", metric, _report(served)["metrics"][metric], served)
    yield _error("", "datasheet", "tpot_mean", _report(published)["metrics"]["systems"], published)


def _of_groups(name: str, cut: str, prefix: str, metrics: tuple[str, ...]) -> Iterator[LeftOutError]:
    """A line for each group of the dimension `prefix` and metric."""
    for group, errors in _report(name)["by"].items():
        if group.startswith(prefix):
            yield from (
                _error(group.removeprefix(prefix), cut, key, errors[key], name) for key in metrics if key in errors
            )


def _error(engine: str, cut: Any, metric: str, errors: dict[str, Any], report: str) -> LeftOutError:
    return LeftOutError(engine, cut, "", metric, errors["median_ape"], errors["p90_ape"], report)


def _report(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((ROOT / "reports" / name).read_text(encoding="utf-8"))
    return data


if __name__ == "__main__":
    file = data_dir("validated") / "left_out" / "errors.csv"
    file.write_text(left_out_table(), encoding="utf-8", newline="\n")

"""Closes the loop of `perfmodel calibrate --suggest` with a real vLLM server on this CPU.

    python benchmarks/witness/suggestion.py REPORT.md

The machine is calibrated as by drift.py. Then the load tests that `--suggest` names for a deployment are run one after
another against vLLM's own server, and after each the profile is fitted to those so far. A load that no fit sees, the
deployment's own, is measured at the beginning and at the end. Ten minutes; needs Linux.
"""

__all__ = ["main"]

import argparse
import json
import shlex
import subprocess
from pathlib import Path
from statistics import mean
from typing import Any

from drift import BUILD, HERE, calibrated_model, perfmodel, priority_prefix, scenario_file, send, serve_command
from environments import NEWEST
from surface import running, surroundings, vllm_command

_RATE, _REQUESTS, _INPUT = 1.5, 100, 96
_FIGURES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}


def main() -> None:
    """Suggest, measure, fit, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    asked = parser.parse_args()
    model = calibrated_model()
    prompts = {"distribution": "uniform", "low": _INPUT // 2, "high": _INPUT * 3 // 2}
    arrivals = {"process": "poisson", "rate": _RATE}
    scenario = scenario_file(model, "planned", {"profile": "here"}, arrivals=arrivals, input_tokens=prompts)
    suggestion = json.loads(perfmodel(["calibrate", "--suggest", "--scenario", str(scenario), "--json"]).stdout)
    with running(None, serve_command(model)) as url:
        send(url, model, ["--random-input-len", str(_INPUT), "--request-rate", "2", "--num-prompts", "40"]).wait()
        unseen = [_measured(url, model, "unseen-1")]
        runs = [_run(url, model, run["command"]) for run in suggestion["runs"]]
        unseen.append(_measured(url, model, "unseen-2"))
    rows = []
    for count in range(len(runs) + 1):
        profile = _fitted(scenario, runs[:count])
        rows.append({"runs": count, **_compared(scenario, profile, unseen)})
        print(json.dumps(rows[-1]), flush=True)
    answer = {"suggestion": suggestion, "rows": rows}
    asked.report.with_suffix(".json").write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    asked.report.write_text(_text(suggestion, rows), encoding="utf-8")


def _measured(url: str, model: Path, name: str) -> Path:
    """The deployment's own load, once."""
    file = HERE / f"{name}.json"
    words = ["--random-input-len", str(_INPUT), "--request-rate", str(_RATE), "--num-prompts", str(_REQUESTS)]
    words += ["--seed", name[-1]]
    send(url, model, [*words, *_saved(file)]).wait()
    return file


def _saved(file: Path) -> list[str]:
    return ["--save-result", "--save-detailed", "--result-dir", str(file.parent), "--result-filename", file.name]


def _run(url: str, model: Path, command: str) -> Path:
    """A suggested command as it stands, but for address, names and the folder of its result."""
    words = shlex.split(command)
    file = HERE / words[words.index("--result-filename") + 1]
    for name, value in {"--base-url": url, "--model": "m"}.items():
        words[words.index(name) + 1] = value
    more = ["--tokenizer", str(model), "--temperature", "0", "--disable-tqdm", "--result-dir", str(HERE)]
    command = [*priority_prefix(), *vllm_command(NEWEST["vllm"], BUILD), *words[1:], *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **surroundings())
    return file


def _fitted(scenario: Path, runs: list[Path]) -> str:
    """The profile fitted to `runs`; without any, the machine's."""
    if not runs:
        return "here"
    name = f"after-{len(runs)}"
    words = ["calibrate", "--from", *map(str, runs), "--scenario", str(scenario), "--name", name]
    perfmodel([*words, "--to", str(HERE / "calibrations"), "--force"], check=True)
    return name


def _compared(scenario: Path, profile: str, unseen: list[Path]) -> dict[str, Any]:
    """Half-widths of the deployment's intervals under `profile`, and errors of the load that it was not fitted to."""
    given = ["--set", f"engine.profile={profile}", "--json"]
    summary = json.loads(perfmodel(["simulate", str(scenario), *given]).stdout)
    widths = {}
    for figure in _FIGURES:
        low, high = summary["interval"][f"mean_{figure}_ms"]
        widths[figure] = (high / low) ** 0.5 - 1
    answer = json.loads(perfmodel(["validate", "bench", *map(str, unseen), "--scenario", str(scenario), *given]).stdout)
    errors = {}
    for figure in _FIGURES:
        pairs = [item for run in answer["runs"] for item in run["figures"] if item["metric"] == f"mean_{figure}_ms"]
        errors[figure] = mean(pair["predicted"] for pair in pairs) / mean(pair["measured"] for pair in pairs) - 1
    return {"widths": widths, "errors": errors}


def _text(suggestion: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [
        "# What to measure next, measured: a vLLM server on a CPU",
        "",
        f"`perfmodel calibrate --suggest` named three load tests for a deployment ({_RATE:g} requests/s); vLLM's own "
        f"server ran them, and after each the profile was fitted to those so far. The deployment's own load, which no "
        f"fit saw, was measured before and after them. `python benchmarks/witness/suggestion.py` runs it again.",
        "",
        "| fitted to | " + " | ".join(f"{name}: interval, error" for name in _FIGURES.values()) + " |",
        "|---|" + "---|" * len(_FIGURES),
    ]
    names = ["whole steps alone", *(f"and {run['what']}" for run in suggestion["runs"])]
    for name, row in zip(names, rows, strict=True):
        cells = [f"+- {row['widths'][figure]:.0%}, {row['errors'][figure]:+.1%}" for figure in _FIGURES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

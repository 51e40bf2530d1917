"""Calibrate on some of the measured loads of each model, predict all, and write how far apart they are.

    python benchmarks/on_vllm/predict.py [--runs build/on_vllm] [--report reports/measured/NAME.md]

Times are restated at the machine's median speed: each run is bracketed by two of a reference load (`measure.py`).
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "executors"), str(HERE)]

from loads import FITTED, LOADS, MODELS, overrides_of, scenario_text  # noqa: E402

from perfmodel.cost import EngineProfile  # noqa: E402
from perfmodel.evidence.fit.whole_steps import (  # noqa: E402
    EngineSteps,
    FitResult,
    fit_engine_steps,
    read_chunks,
)
from perfmodel.report.runs import read_requests, read_steps  # noqa: E402
from perfmodel.sim import simulate  # noqa: E402
from perfmodel.sim.records.columns import RequestColumns  # noqa: E402
from perfmodel.specs import load_scenario  # noqa: E402
from perfmodel_executors.engines.results import changed_settings  # noqa: E402

MAX_DRIFT = 1.3  # of the references around a run from the usual: beyond that something else had the core
TARGETS = {"mean TPOT": 0.05, "p90 TPOT": 0.05, "mean E2E": 0.05, "mean TTFT": 0.10, "p99 TTFT": 0.20}


_TEXT = HERE / "report.md"


class Run(NamedTuple):
    """A measured load; speed: of the machine while it ran, over the median of the model's runs;
    drift: how much slower the slowest of the references around it was."""

    load: str
    number: int
    folder: Path
    speed: float
    facts: dict[str, Any]
    drift: float


def runs_of(folder: Path) -> list[Run]:
    """All runs of a model, but those of the reference."""
    records = [(file, json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("*/*/run.json"))]
    usual = median(record["reference_s"] for _, record in records)
    runs = []
    for place, (file, record) in enumerate(records):
        if record["load"] in LOADS:
            around = [
                item for other, item in records[max(0, place - 3) : place + 4] if other.parents[1] == file.parents[1]
            ]
            drifts = [item["reference_s"] / usual for item in around if item["load"] == "reference"]
            runs.append(
                Run(record["load"], record["round"], file.parent, usual / record["reference_s"], record, max(drifts))
            )
    return runs


def _card(model: str) -> str:
    return str(HERE / "models" / f"{model}.yaml")


def scenario_of(model: str, run: Run) -> Any:
    """The load, with the settings that vLLM came to have."""
    text = scenario_text(model, _card(model))
    overrides = overrides_of(model, LOADS[run.load], run.number)
    scenario = load_scenario(text, overrides)
    changed = changed_settings(scenario.engine, run.facts["measured_on"])
    return scenario.model_copy(update={"engine": scenario.engine.model_copy(update=changed)})


def fitted(model: str, runs: Sequence[Run]) -> FitResult:
    """The calibration of the loads in FITTED."""
    result = [run for run in runs if run.load in FITTED]
    return fit_engine_steps(
        [
            EngineSteps(
                scenario_of(model, run),
                read_steps(run.folder / "steps.csv"),
                read_chunks(run.folder / "chunks.csv"),
                run.speed,
            )
            for run in result
        ]
    )


def figures(requests: RequestColumns, speed: float = 1.0) -> dict[str, float]:
    """What is compared, in ms."""
    tpot, ttft, e2e = (1e3 * speed * item for item in (requests.tpot_s, requests.ttft_s, requests.e2el_s))
    tpot = tpot[~np.isnan(tpot)]
    result = {"mean TPOT": tpot.mean(), "p90 TPOT": np.quantile(tpot, 0.9), "mean E2E": e2e.mean()}
    return {
        name: float(value)
        for name, value in (result | {"mean TTFT": ttft.mean(), "p99 TTFT": np.quantile(ttft, 0.99)}).items()
    }


def compared(model: str, runs: Sequence[Run], fit: FitResult) -> Iterator[dict[str, Any]]:
    """A row per load: measured and predicted figures, means over its rounds."""
    profile = EngineProfile(engine="vllm")
    for load in dict.fromkeys(run.load for run in runs):
        outcome = [run for run in runs if run.load == load]
        measured = [figures(read_requests(run.folder / "requests.csv"), run.speed) for run in outcome]
        predicted, steps = [], []
        for run in outcome:
            result = simulate(scenario_of(model, run), calibration=fit.calibration, profile=profile, keep_steps=True)
            predicted.append(figures(result.requests))
            steps.append((result.summary["preemptions"], run.facts["summary"]["preemptions"]))
        means = [
            {name: float(np.mean([row[name] for row in rows])) for name in TARGETS} for rows in (measured, predicted)
        ]
        yield {
            "load": load,
            "is_fitted": load in FITTED,
            "rounds": len(outcome),
            "measured_ms": means[0],
            "predicted_ms": means[1],
            "errors": {name: means[1][name] / means[0][name] - 1 for name in TARGETS},
            "preemptions": steps,
            "spread": {name: spread([item[name] for item in measured]) for name in TARGETS},
        }


def spread(values: Sequence[float]) -> float:
    """How far rounds are apart, over their mean."""
    return float((max(values) - min(values)) / np.mean(values))


def verdicts(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of loads that were not fitted to: the median error of each figure, and how many are within the target."""
    result = [row for row in rows if not row["is_fitted"]]
    return {
        name: {
            "median": float(np.median([abs(row["errors"][name]) for row in result])),
            "worst": float(max(abs(row["errors"][name]) for row in result)),
            "within": sum(abs(row["errors"][name]) <= target for row in result),
            "of": len(result),
        }
        for name, target in TARGETS.items()
    }


def answer(model: str, folder: Path) -> dict[str, Any]:
    """All that the report says of a model."""
    every = runs_of(folder)
    runs = [run for run in every if run.drift < MAX_DRIFT and run.speed < MAX_DRIFT]
    fit = fitted(model, runs)
    rows = list(compared(model, runs, fit))
    first = next(run for run in runs if LOADS[run.load].engine == "plain")
    facts = first.facts["measured_on"]
    asked_for = load_scenario(scenario_text(model, _card(model)), overrides_of(model, LOADS[first.load], first.number))
    return {
        "model": model,
        "versions": facts["versions"],
        "attention_backends": facts["attention_backends"],
        "arguments": facts["arguments"],
        "changed_by_vllm": changed_settings(asked_for.engine, facts),
        "coefficients": fit.coefficients,
        "left_out_steps": float(np.mean(np.abs(fit.errors))),
        "loads": rows,
        "verdicts": verdicts(rows),
        "taken_away": [f"{run.load}, round {run.number}: {run.drift:.1f} times" for run in every if run not in runs],
        "refused": [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("refused*.json"))],
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def report(answers: Sequence[dict[str, Any]], machine: str) -> str:
    """The text of the report."""
    summary = [
        [item["model"], *(f"{v['median']:.1%} ({v['within']}/{v['of']})" for v in item["verdicts"].values())]
        for item in answers
    ]
    every = verdicts([row for item in answers for row in item["loads"]])
    summary.append(["all", *(f"{v['median']:.1%} ({v['within']}/{v['of']})" for v in every.values())])
    head = [f"{name} ({target:.0%})" for name, target in TARGETS.items()]
    text = _TEXT.read_text(encoding="utf-8").format(machine=machine, vllm=answers[0]["versions"]["vllm"])
    introduction, how = text.split("<!-- tables -->")
    parts = [introduction.rstrip() + "\n"]
    parts.append(_table(["median error (loads within the target)", *head], summary))
    parts += [_of_model(item, head) for item in answers]
    parts.append(how.strip() + "\n")
    return "\n".join(parts)


def _of_model(each: dict[str, Any], head: Sequence[str]) -> str:
    rows = [
        [
            f"{row['load']}{' (fitted)' if row['is_fitted'] else ''}",
            str(row["rounds"]),
            *(f"{row['errors'][name]:+.1%}" for name in TARGETS),
            f"{row['measured_ms']['mean TPOT']:.1f}, {row['measured_ms']['mean TTFT']:.0f}, "
            f"{row['measured_ms']['mean E2E']:.0f}",
            "; ".join(f"{ours} and {theirs}" for ours, theirs in row["preemptions"])
            if any(map(sum, row["preemptions"]))
            else "",
        ]
        for row in each["loads"]
    ]
    columns = ["load", "rounds", *head, "measured TPOT, TTFT, E2E (ms)", "preemptions, predicted and measured"]
    changed = ", ".join(f"`{name}` {json.dumps(value)}" for name, value in each["changed_by_vllm"].items())
    notes = [
        f"Attention: {', '.join(each['attention_backends'])}. Steps left out of the fit are predicted within "
        f"{each['left_out_steps']:.1%} on average.",
        *(
            [f"vLLM came to other settings than it was asked for, which the prediction has too: {changed}."]
            if changed
            else []
        ),
        *(
            [f"Left out, since something else had the core (times as slow as usual): {'; '.join(each['taken_away'])}."]
            if each["taken_away"]
            else []
        ),
        *(f"Refused by this build: {', '.join(one['loads'])}: {one['sentence']}" for one in each["refused"]),
    ]
    return f"## {each['model']}\n\n{' '.join(notes)}\n\n{_table(columns, rows)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "on_vllm")
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--machine", default="one core of this machine")
    parser.add_argument("--report", type=Path, help="FILE.md; FILE.json is written beside it")
    asked = parser.parse_args()
    answers = [answer(model, asked.runs / model) for model in asked.model or MODELS if (asked.runs / model).exists()]
    text = report(answers, asked.machine)
    print(text)
    if asked.report is not None:
        asked.report.write_text(text, encoding="utf-8")
        asked.report.with_suffix(".json").write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")

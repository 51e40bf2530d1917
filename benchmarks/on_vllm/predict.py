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
sys.path[:0] = [str(ROOT), str(HERE)]

from loads import FITTED, LOADS, MODELS, overrides_of, scenario_text  # noqa: E402

from perfmodel.calibrate.engine_runs import EngineSteps, fit_engine_steps, read_chunks  # noqa: E402
from perfmodel.calibrate.whole_steps import FitResult  # noqa: E402
from perfmodel.cost import EngineProfile  # noqa: E402
from perfmodel.report.runs import read_requests, read_steps  # noqa: E402
from perfmodel.sim import simulate  # noqa: E402
from perfmodel.sim.records.columns import RequestColumns  # noqa: E402
from perfmodel.specs import load_scenario  # noqa: E402

TARGETS = {"mean TPOT": 0.05, "p90 TPOT": 0.05, "mean E2E": 0.05, "mean TTFT": 0.10, "p99 TTFT": 0.20}


class Run(NamedTuple):
    """A measured load; speed: of the machine while it ran, over the median of the model's runs."""

    load: str
    number: int
    folder: Path
    speed: float
    facts: dict[str, Any]


def runs_of(folder: Path) -> list[Run]:
    """All runs of a model, but those of the reference."""
    records = [(file, json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("*/*/run.json"))]
    usual = median(record["reference_s"] for _, record in records)
    return [
        Run(record["load"], record["round"], file.parent, usual / record["reference_s"], record)
        for file, record in records
        if record["load"] in LOADS
    ]


def scenario_of(model: str, run: Run) -> Any:
    text = scenario_text(model, str(HERE / "models" / f"{model}.yaml"))
    return load_scenario(text, overrides_of(model, LOADS[run.load], run.number))


def fitted(model: str, runs: Sequence[Run]) -> FitResult:
    """The calibration of the loads in FITTED."""
    mine = [run for run in runs if run.load in FITTED]
    return fit_engine_steps(
        [
            EngineSteps(
                scenario_of(model, run),
                read_steps(run.folder / "steps.csv"),
                read_chunks(run.folder / "chunks.csv"),
                run.speed,
            )
            for run in mine
        ]
    )


def figures(requests: RequestColumns, speed: float = 1.0) -> dict[str, float]:
    """What is compared, in ms."""
    tpot, ttft, e2e = (1e3 * speed * each for each in (requests.tpot_s, requests.ttft_s, requests.e2el_s))
    tpot = tpot[~np.isnan(tpot)]
    found = {"mean TPOT": tpot.mean(), "p90 TPOT": np.quantile(tpot, 0.9), "mean E2E": e2e.mean()}
    return {
        name: float(value)
        for name, value in (found | {"mean TTFT": ttft.mean(), "p99 TTFT": np.quantile(ttft, 0.99)}).items()
    }


def compared(model: str, runs: Sequence[Run], fit: FitResult) -> Iterator[dict[str, Any]]:
    """A row per load: measured and predicted figures, means over its rounds."""
    profile = EngineProfile(engine="vllm")
    for load in dict.fromkeys(run.load for run in runs):
        mine = [run for run in runs if run.load == load]
        measured = [figures(read_requests(run.folder / "requests.csv"), run.speed) for run in mine]
        predicted, steps = [], []
        for run in mine:
            result = simulate(scenario_of(model, run), calibration=fit.calibration, profile=profile, keep_steps=True)
            predicted.append(figures(result.requests))
            steps.append((result.summary["preemptions"], run.facts["summary"]["preemptions"]))
        means = [
            {name: float(np.mean([each[name] for each in rows])) for name in TARGETS} for rows in (measured, predicted)
        ]
        yield {
            "load": load,
            "is_fitted": load in FITTED,
            "rounds": len(mine),
            "measured_ms": means[0],
            "predicted_ms": means[1],
            "errors": {name: means[1][name] / means[0][name] - 1 for name in TARGETS},
            "preemptions": steps,
            "spread": {name: spread([each[name] for each in measured]) for name in TARGETS},
        }


def spread(values: Sequence[float]) -> float:
    """How far rounds are apart, over their mean."""
    return float((max(values) - min(values)) / np.mean(values))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "on_vllm")
    parser.add_argument("--model", action="append", choices=MODELS)
    asked = parser.parse_args()
    for model in asked.model or MODELS:
        runs = runs_of(asked.runs / model)
        fit = fitted(model, runs)
        print(model, {k: float(f"{v:.3g}") for k, v in fit.coefficients.items()})
        errors = np.abs(fit.errors)
        print(f"left-out steps: mean {errors.mean():.1%} p90 {np.quantile(errors, 0.9):.1%} n {len(errors)}")
        for row in compared(model, runs, fit):
            print(
                f"{row['load']:26s} {'fit' if row['is_fitted'] else '   '}",
                *(f"{name} {value:+.1%}" for name, value in row["errors"].items()),
                row["preemptions"],
            )

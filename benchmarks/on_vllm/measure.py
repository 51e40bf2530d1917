"""Measure all loads of a model on vLLM: in random order, each between two runs of a reference load.

    python -P benchmarks/on_vllm/measure.py MODEL --on vllm:PATH [--rounds 2] [--engine plain] [--only LOAD] [--out DIR]

One engine is started for each kind of engine and round. The folder of a run has its records and a `run.json`; take the
machine for it (one thread; `taskset`, a real-time priority), since a shared core counts as the engine's time.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "executors"), str(HERE)]

from loads import ENGINES, LOADS, MODELS, REFERENCE, overrides_of, scenario_text  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.specs import load_scenario  # noqa: E402
from perfmodel_executors.engines.run import OnEngine, execute_all_on  # noqa: E402


def _measure(model: str, engine: str, number: int, asked: argparse.Namespace) -> None:
    """One round of the loads of one engine, bracketed by reference runs."""
    card = str(HERE / "models" / f"{model}.yaml")
    text = scenario_text(model, card)
    names = [name for name, load in LOADS.items() if load.engine == engine and (not asked.only or name in asked.only)]
    random.Random(f"{model} {engine} {number}").shuffle(names)  # an order, no secret
    order = ["reference"]
    for name in names:
        order += [name, "reference"]
    loads = {**LOADS, "reference": REFERENCE._replace(engine=engine)}
    folders = [asked.out / model / f"{number}" / f"{engine} {place:02d} {name}" for place, name in enumerate(order)]
    runs = []
    for name, folder in zip(order, folders, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        runs.append(OnEngine(load_scenario(text, overrides_of(model, loads[name], number)), card, folder))
    try:
        results = execute_all_on(asked.on, runs)
    except PerfmodelError as error:
        refused = {"engine": engine, "loads": names, "sentence": str(error)}
        (asked.out / model / f"refused {engine}.json").write_text(json.dumps(refused), encoding="utf-8")
        print(f"{model}, {engine}: {error}")
        return
    speeds = [_reference_s(folder) for folder in folders[::2]]
    for place, (name, folder, result) in enumerate(zip(order, folders, results, strict=True)):
        around = speeds[(place - 1) // 2 : (place - 1) // 2 + 2] if place % 2 else [speeds[place // 2]]
        record: dict[str, Any] = {"load": name, "round": number, "reference_s": sum(around) / len(around)}
        record |= {"summary": result.summary, "notes": result.notes, "measured_on": result.measured_on}
        (folder / "run.json").write_text(json.dumps(record, default=str), encoding="utf-8")
    low, high = min(speeds) * 1e3, max(speeds) * 1e3
    print(f"{model}, {engine}, round {number}: references {low:.1f} to {high:.1f} ms a token")


def _reference_s(folder: Path) -> float:
    """Seconds of a decode step of the reference load."""
    header, *rows = [line.split(",") for line in (folder / "steps.csv").read_text(encoding="utf-8").split()]
    start, end, chunks = (header.index(name) for name in ("start_s", "end_s", "num_chunks"))
    return median(float(row[end]) - float(row[start]) for row in rows if row[chunks] == "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--on", required=True)
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--engine", choices=list(ENGINES), action="append")
    parser.add_argument("--only", action="append", help="of the loads, by name")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "on_vllm")
    asked = parser.parse_args()
    for number in asked.rounds:
        for engine in asked.engine or ENGINES:
            _measure(asked.model, engine, number, asked)


if __name__ == "__main__":
    main()

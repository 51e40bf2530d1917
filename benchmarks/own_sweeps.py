"""What a fit to load tests of a server is worth at its other loads: published sweeps of vLLM, cell by cell.

    python benchmarks/own_sweeps.py [--cells 20] [--report MD]

A cell is a model under a version of vLLM on devices of a kind, at one layout, format and pair of lengths, measured at
five concurrencies or more (measurements/steady-state). Each of some cells, drawn with a seed, is fitted to its first,
third and fifth concurrency as `perfmodel calibrate --from ... --name` fits load tests, and asked for the two between:
errors and 80 % intervals under the shipped profile and under the fitted one. Half a minute a cell.
"""

__all__ = ["main"]

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from perfmodel.cost import EngineProfile  # noqa: E402
from perfmodel.evidence.fit import server_fit  # noqa: E402
from perfmodel.evidence.observation import Observation  # noqa: E402
from perfmodel.evidence.sources.steady import read_steady_states  # noqa: E402
from perfmodel.sim import simulate  # noqa: E402
from perfmodel.specs.scenario import Scenario  # noqa: E402

_MEASURED = {"mean_tpot_ms": "tpot_mean", "mean_ttft_ms": "ttft_mean"}
_NAMES = {"mean_tpot_ms": "TPOT", "mean_ttft_ms": "TTFT"}
_FITTED, _ASKED = (0, 2, 4), (1, 3)
_MOST = 256  # of the first concurrency
_REQUESTS, _PER_SLOT = 100, 3
_COLUMNS = ("figure and profile", "rows", "median error", "nine in ten below", "80 % intervals hold", "high / low")


def _cells() -> list[list[Observation]]:
    """Sweeps of vLLM by concurrency, one row of each."""
    cells = defaultdict[tuple[Any, ...], dict[int, Observation]](dict)
    for row in read_steady_states(ROOT / "measurements" / "steady-state" / "unified.csv.gz")[0]:
        scenario, engine, traffic = row.scenario, row.scenario.engine, row.scenario.traffic
        if engine.profile == "vllm":
            lengths = str(traffic.input_tokens), str(traffic.output_tokens)
            formats = engine.quantization, engine.kv_cache_dtype
            layout = scenario.hardware.name, engine.version, engine.tensor_parallel_size
            cells[scenario.model.name, *layout, *lengths, *formats].setdefault(traffic.arrivals.concurrency or 0, row)
    sweeps = [[rows[count] for count in sorted(rows)] for rows in cells.values() if len(rows) > max(_FITTED)]
    return [sweep for sweep in sweeps if (sweep[0].scenario.traffic.arrivals.concurrency or 0) <= _MOST]


def _run(row: Observation) -> server_fit._Run:
    scenario: Scenario = row.scenario
    count = min(max(_REQUESTS, _PER_SLOT * (scenario.traffic.arrivals.concurrency or 1)), server_fit._MAX_REQUESTS)
    scenario = scenario.model_copy(update={"traffic": scenario.traffic.model_copy(update={"num_requests": count})})
    measured = {metric: row.metrics[name] for metric, name in _MEASURED.items()}
    return server_fit._Run(row.name, "aiconfigurator", scenario, measured, count)


def _compared(sweep: list[Observation]) -> Iterator[tuple[str, str, float, bool, float]]:
    """(figure, profile, error, is within, log of the interval's ends) of the concurrencies that were not fitted."""
    runs = [_run(row) for row in sweep]
    fitted = [runs[place] for place in _FITTED]
    begin = server_fit._begin(fitted[0].scenario)
    profile, _, spreads = server_fit._fitted(begin, fitted, None)
    metrics = np.array([metric for run in fitted for metric in run.measured])
    own = profile.model_copy(update={"name": "own", **server_fit._residuals(begin, fitted, metrics, spreads)})
    profiles: dict[str, EngineProfile] = {"shipped": begin, "fitted": own}
    for place in _ASKED:
        for name, item in profiles.items():
            summary = simulate(runs[place].scenario, profile=item, intervals=True, keep_steps=False).summary
            for metric, measured in runs[place].measured.items():
                low, high = summary["interval"][metric]
                yield (
                    metric,
                    name,
                    abs(summary[metric] / measured - 1),
                    low <= measured <= high,
                    float(np.log(high / low)),
                )


def main() -> None:
    """Fit, ask, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=20)
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    sweeps = random.Random(1).sample(_cells(), asked.cells)
    groups = defaultdict[tuple[str, str], list[tuple[float, bool, float]]](list)
    for number, sweep in enumerate(sweeps, 1):
        for metric, profile, *values in _compared(sweep):
            groups[metric, profile].append(tuple(values))
        print(f"{number} of {len(sweeps)}: {sweep[0].name}", file=sys.stderr, flush=True)
    lines = [
        "# A fit to three loads of a server, asked for two others",
        "",
        f"`python benchmarks/own_sweeps.py --cells {asked.cells}`: cells of vLLM drawn from measurements/steady-state, "
        f"whose rows are partly what the shipped profile was fitted to.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|" + len(_COLUMNS) * "---|",
    ]
    for (metric, profile), rows in groups.items():
        errors, within, widths = np.array(rows).T
        cells = [f"{_NAMES[metric]}, {profile}", f"{len(rows)}"]
        cells += [
            f"{np.median(errors):.1%}",
            f"{np.quantile(errors, 0.9):.1%}",
            f"{within.mean():.0%}",
            f"{np.exp(np.median(widths)):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if asked.report is not None:
        asked.report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

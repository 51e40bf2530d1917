"""`perfmodel simulate SCENARIO`: the scenario on the simulated clock."""

__all__ = ["simulate"]

from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.cli.asked import Asked
from perfmodel.cli.flags import takes_flags
from perfmodel.cli.options import JsonFlag, OutFolder, Overrides, Seed
from perfmodel.cli.runs import Progress, run_to_folder

if TYPE_CHECKING:
    from perfmodel.sim.records.result import RunResult


@takes_flags()
def simulate(
    asked: Asked,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
    out: OutFolder = None,
    seed: Seed = None,
) -> None:
    """Simulate a scenario: latencies, throughput, goodput, cost, and what bounds them."""
    loaded = asked.load(overrides, seed)
    from dataclasses import replace

    from perfmodel import sim

    def run(progress: Progress | None, folder: Path | None) -> "RunResult":
        keep_steps = None if folder else False
        result = sim.simulate(loaded, progress=progress, out=folder, keep_steps=keep_steps, intervals=True)
        return replace(result, notes=(*asked.assumed(loaded), *result.notes))

    run_to_folder("simulating", run, out, as_json)

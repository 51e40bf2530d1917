"""`perfmodel simulate SCENARIO`: the scenario on the simulated clock."""

__all__ = ["simulate"]

from perfmodel.cli.options import JsonFlag, OutFolder, Overrides, ScenarioName, Seed, load
from perfmodel.cli.runs import run_to_folder


def simulate(
    scenario: ScenarioName,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
    out: OutFolder = None,
    seed: Seed = None,
) -> None:
    """Simulate a scenario: latencies, throughput, goodput, cost, and what bounds them."""
    loaded = load(scenario, overrides, seed)
    from perfmodel import sim

    run_to_folder(
        "simulating",
        lambda progress, folder: sim.simulate(
            loaded, progress=progress, out=folder, keep_steps=None if folder else False, intervals=True
        ),
        out,
        as_json,
    )

"""`perfmodel simulate SCENARIO`: the scenario on the simulated clock."""

__all__ = ["simulate"]

from perfmodel.cli.asked import (
    E2eFlag,
    HardwareFlag,
    ModelFlag,
    RateFlag,
    TpotFlag,
    TrafficFlag,
    TtftFlag,
    asked_scenario,
    say_assumed,
)
from perfmodel.cli.options import Given, JsonFlag, OutFolder, Overrides, ScenarioOrFlags, Seed, load
from perfmodel.cli.runs import run_to_folder


def simulate(
    scenario: ScenarioOrFlags = None,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
    out: OutFolder = None,
    seed: Seed = None,
    model: ModelFlag = None,
    hardware: HardwareFlag = None,
    rate: RateFlag = None,
    ttft: TtftFlag = None,
    tpot: TpotFlag = None,
    e2e: E2eFlag = None,
    traffic: TrafficFlag = None,
) -> None:
    """Simulate a scenario: latencies, throughput, goodput, cost, and what bounds them."""
    flags: dict[str, Given] = {"model": model, "hardware": hardware, "rate": rate, "ttft": ttft, "tpot": tpot}
    flags |= {"e2e": e2e, "traffic": traffic}
    loaded = load(asked_scenario(scenario, flags), overrides, seed)
    say_assumed(loaded, flags)
    from perfmodel import sim

    run_to_folder(
        "simulating",
        lambda progress, folder: sim.simulate(
            loaded, progress=progress, out=folder, keep_steps=None if folder else False, intervals=True
        ),
        out,
        as_json,
    )

"""`perfmodel execute SCENARIO`: the scenario on the executed clock."""

__all__ = ["execute"]

from perfmodel.cli.options import JsonFlag, OutFolder, Overrides, ScenarioName, Seed, load
from perfmodel.cli.runs import run_to_folder


def execute(
    scenario: ScenarioName,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
    out: OutFolder = None,
    seed: Seed = None,
) -> None:
    """Execute a scenario: the same engine, with every step run for real on this machine and timed.

    Needs the executor extra (torch). Weights are random; the clock advances by each step's measured time, so
    queueing replays as if the machine did nothing else.
    """
    loaded = load(scenario, overrides, seed)
    from perfmodel.validate.executor_bridge import execute_scenario

    run_to_folder(
        "executing",
        lambda progress, folder: execute_scenario(loaded, progress=progress, out=folder),
        out,
        as_json,
    )

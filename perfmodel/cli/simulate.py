"""`perfmodel simulate SCENARIO`: the scenario on the simulated clock."""

__all__ = ["simulate"]

from perfmodel.answers.asked import Asked
from perfmodel.cli.flags import takes_flags, takes_short_forms
from perfmodel.cli.options import Details, JsonFlag, OutFolder, Overrides, Seed
from perfmodel.cli.runs import run_to_folder


@takes_flags()
@takes_short_forms()
def simulate(
    asked: Asked,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
    out: OutFolder = None,
    seed: Seed = None,
    has_details: Details = False,
) -> None:
    """Simulate a scenario: latencies, throughput, goodput, cost, and what bounds them."""
    loaded = asked.load(overrides, seed)
    from perfmodel.answers.run import answer_of_run, simulated

    run_to_folder(
        "simulating",
        lambda progress, folder: answer_of_run(simulated(loaded, asked.assumed(loaded, overrides), progress, folder)),
        out,
        as_json,
        has_details,
    )

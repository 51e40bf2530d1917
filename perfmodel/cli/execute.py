"""`perfmodel execute SCENARIO`: the scenario on the executed clock."""

__all__ = ["execute"]

from typing import Annotated

import typer

from perfmodel.answers.asked import load
from perfmodel.cli.options import JsonFlag, OutFolder, Overrides, ScenarioName, Seed
from perfmodel.cli.runs import run_to_folder

Kernels = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        metavar="NAME",
        help="torch or triton; by default triton on a GPU, torch on a CPU.",
        show_default=False,
    ),
]


def execute(
    scenario: ScenarioName,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
    out: OutFolder = None,
    seed: Seed = None,
    kernels: Kernels = None,
) -> None:
    """Execute a scenario: the same engine, with every step run for real on this machine and timed.

    Needs the executor extra (torch), and the GPU that the scenario names if it names one. Weights are those of the
    file where the model is a .gguf or .safetensors file, else random; the clock advances by each step's measured
    time, so queueing replays as if the machine did nothing else.
    """
    loaded = load(scenario, overrides, seed)
    from perfmodel.answers.run import answer_of_run
    from perfmodel.validate.executed.bridge import load_executor

    run_to_folder(
        "executing",
        lambda progress, folder: answer_of_run(
            load_executor().execute_scenario(loaded, progress=progress, out=folder, kernels=kernels)
        ),
        out,
        as_json,
    )

"""`perfmodel execute SCENARIO`: the scenario on the executed clock."""

__all__ = ["execute"]

from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.answers.asked import load
from perfmodel.cli.flags import takes_short_forms
from perfmodel.cli.options import Details, JsonFlag, OutFolder, Overrides, ScenarioName, Seed
from perfmodel.cli.runs import run_to_folder
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

    from perfmodel.answers.answer import Answer, Progress

Kernels = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        metavar="NAME",
        help="torch or triton; by default triton on a GPU, torch on a CPU.",
        show_default=False,
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ENGINE",
        help="vllm: the one of this environment; vllm:PATH: of another one's bin/python; vllm:http://HOST:PORT: a "
        "server that runs.",
        show_default=False,
    ),
]


@takes_short_forms()
def execute(
    scenario: ScenarioName,
    overrides: Overrides = None,
    as_json: JsonFlag = False,
    out: OutFolder = None,
    seed: Seed = None,
    kernels: Kernels = None,
    on: On = None,
    has_details: Details = False,
) -> None:
    """Execute a scenario: the same engine, with every step run for real on this machine and timed.

    Needs the executor extra (torch), and the GPU that the scenario names if it names one. Weights are those of the
    file where the model is a .gguf or .safetensors file, else random; the clock advances by each step's measured
    time, so queueing replays as if the machine did nothing else.

    With --on, on vLLM itself: its own scheduler and kernels, arrivals at their times, records of the same form. Needs
    no torch here; real weights where `model:` is a folder that has them, else dummy ones. `compare` and `validate
    executor --measured` put the prediction beside it.
    """
    from perfmodel.specs.scenario_file import named_model
    from perfmodel.specs.scenario_source import given_source

    source = given_source(scenario)
    loaded = load(source, overrides, seed)
    from perfmodel.answers.run import answer_of_run
    from perfmodel.evidence.executed.bridge import load_executor

    def run(progress: "Progress | None", folder: "Path | None") -> "Answer":
        if on is None:
            executor = load_executor()
            return answer_of_run(executor.execute_scenario(loaded, progress=progress, out=folder, kernels=kernels))
        if kernels is not None:
            raise SpecError("--kernels beside --on: vLLM chooses its kernels itself; leave it out.")
        model = named_model(source, overrides or ())
        return answer_of_run(load_executor(needs_torch=False).execute_on(on, loaded, model, progress, folder))

    run_to_folder("executing", run, out, as_json, has_details)

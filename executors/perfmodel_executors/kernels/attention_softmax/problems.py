"""Attention with caps and sinks: heads of gpt-oss and Gemma 2, and odd ones."""

__all__ = ["serving", "tiny"]

from dataclasses import replace
from typing import Any

import torch

from perfmodel_executors.kernels.attention_decode import problems as decodes
from perfmodel_executors.kernels.attention_prefill import problems as prompts
from perfmodel_executors.kernels.problem import Inputs, Problem

_NUM_CHUNK_ARGUMENTS = 5  # of a prompt: queries, pages, tables, starts, computed; the window and the chunk follow


def tiny(dtype: torch.dtype) -> list[Problem]:
    """What plain attention has, in plain pages, with a cap, sinks, and both."""
    found = [p for p in (*decodes.tiny(dtype), *prompts.tiny(dtype)) if _is_plain(p)]
    terms = ((5.0, False), (None, True), (3.0, True))
    return [_with(problem, *terms[index % len(terms)]) for index, problem in enumerate(found)]


def serving() -> list[Problem]:
    """Decodes and prompts of plain attention, with gpt-oss's sinks or Gemma 2's cap."""
    found = [p for p in (*decodes.serving(), *prompts.serving()) if _is_plain(p)]
    sinks, caps = ((None, True), found[:4]), ((50.0, False), found[-4:])
    return [_with(problem, *terms) for terms, problems in (sinks, caps) for problem in problems]


def _is_plain(problem: Problem) -> bool:
    return problem.sizes["kv_cache_dtype"] == problem.sizes["attn_dtype"] and problem.sizes.get("tree", "no") == "no"


def _with(problem: Problem, cap: float | None, has_sinks: bool) -> Problem:
    is_decode = problem.operator == "attention_decode"

    def make(inputs: Inputs) -> tuple[Any, ...]:
        args = problem.make(inputs)
        if not is_decode:
            args = args[: _NUM_CHUNK_ARGUMENTS + 2]
        q = args[0]
        return *args, cap, inputs.normal(q.shape[1], dtype=q.dtype, scale=2.0) if has_sinks else None

    sizes = {**problem.sizes, "cap": cap or 0, "sinks": "yes" if has_sinks else "no"}
    operator = "attention_softmax_decode" if is_decode else "attention_softmax_prefill"
    return replace(problem, operator=operator, sizes=sizes, make=make, baselines={})

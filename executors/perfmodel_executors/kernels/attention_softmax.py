"""Attention over paged keys and values whose scores are capped (Gemma 2), or whose softmax has a sink (gpt-oss).

    s = q k^T / sqrt(H);  capped: c tanh(s / c);  weights = exp(s) / (exp(sink) + sum exp(s)), summed in fp32

A sink is a logit of each query head that takes its part of the softmax and has no value.

Problems: heads of gpt-oss and Gemma 2, and odd ones.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perfmodel_executors.kernels import attention_decode as decodes
from perfmodel_executors.kernels import attention_prefill as prompts
from perfmodel_executors.kernels.kv_pages import KVPages
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.spans import first_visible, visible

_QUERY_TILE = 128


def attention_softmax_decode(
    q_DNH: Tensor,
    pages: KVPages,
    block_tables_DM: Tensor,
    context_lens_D: Tensor,
    window: int | None,
    chunk: int | None,
    cap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """One new token per sequence, [D, N, H_v]; arguments as those of `attention_decode`, then:

    cap:   scores become cap * tanh(score / cap); None: they stay
    sinks: a logit for each query head; None: the softmax is over keys alone
    """
    out_DNH = q_DNH.new_empty(*q_DNH.shape[:2], pages.v_dim)
    for row, context in enumerate(context_lens_D.tolist()):
        rows = slice(row, row + 1)
        out_DNH[rows] = _chunk(
            q_DNH[rows], pages, block_tables_DM[row], context - 1, (window, chunk), cap=cap, sinks_N=sinks_N
        )
    return out_DNH


def attention_softmax_prefill(
    q_TNH: Tensor,
    pages: KVPages,
    block_tables_GM: Tensor,
    query_starts_G: Tensor,
    num_computed_G: Tensor,
    window: int | None,
    chunk: int | None,
    cap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Prompt chunks, [T, N, H_v]; arguments as those of `attention_prefill`, then those of the decode."""
    starts: list[int] = query_starts_G.tolist()
    out_TNH = q_TNH.new_empty(*q_TNH.shape[:2], pages.v_dim)
    for row, computed in enumerate(num_computed_G.tolist()):
        for begin in range(starts[row], starts[row + 1], _QUERY_TILE):
            rows = slice(begin, min(begin + _QUERY_TILE, starts[row + 1]))
            first = computed + begin - starts[row]
            out_TNH[rows] = _chunk(
                q_TNH[rows], pages, block_tables_GM[row], first, (window, chunk), cap=cap, sinks_N=sinks_N
            )
    return out_TNH


def _chunk(
    q_TNH: Tensor,
    pages: KVPages,
    table_M: Tensor,
    first: int,
    span: tuple[int | None, int | None],
    cap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Queries at the positions from `first` on, of one sequence."""
    num_queries, num_heads, head_dim = q_TNH.shape
    size, last = pages.block_size, first + num_queries
    low = first_visible(first, *span)
    base = low // size
    k_LKH, v_LKH = pages.gathered(table_M[base : -(-last // size)], q_TNH.dtype)
    keys = slice(low - base * size, last - base * size)
    k_KLH, v_KLH = k_LKH[keys].transpose(0, 1), v_LKH[keys].transpose(0, 1)
    group = num_heads // len(k_KLH)
    q_KRH = q_TNH.view(num_queries, -1, group, head_dim).permute(1, 2, 0, 3).reshape(len(k_KLH), -1, head_dim)
    scores_KGTL = torch.bmm(q_KRH, k_KLH.transpose(1, 2)).float().view(len(k_KLH), group, num_queries, -1)
    scores_KGTL *= 1 / math.sqrt(head_dim)
    if cap is not None:
        scores_KGTL = cap * torch.tanh(scores_KGTL / cap)
    queries_T, keys_L = (torch.arange(p, last, device=q_TNH.device) for p in (first, low))
    scores_KGTL.masked_fill_(~visible(queries_T, keys_L, *span), -math.inf)
    weights_KGTL = _softmax(scores_KGTL, sinks_N).to(q_TNH.dtype)
    out_KRH = torch.bmm(weights_KGTL.flatten(1, 2), v_KLH)
    out_KGTH = out_KRH.view(len(k_KLH), group, num_queries, -1)
    return out_KGTH.permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1)


def _softmax(scores_KGTL: Tensor, sinks_N: Tensor | None) -> Tensor:
    if sinks_N is None:
        return torch.softmax(scores_KGTL, dim=-1)
    kv_heads, group, num_queries, _ = scores_KGTL.shape
    sinks_KGTL = sinks_N.float().view(kv_heads, group, 1, 1).expand(-1, -1, num_queries, 1)
    return torch.softmax(torch.cat((scores_KGTL, sinks_KGTL), dim=-1), dim=-1)[..., :-1]


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

"""Block-sparse attention: BigBird's pattern and windows of blocks, odd ones and those of long prompts."""

__all__ = ["serving", "tiny"]

from dataclasses import replace
from typing import Any

import torch

from perfmodel.models.architecture import BlockSparsity
from perfmodel_executors.kernels.attention_decode import problems as decodes
from perfmodel_executors.kernels.attention_prefill import problems as prompts
from perfmodel_executors.kernels.problem import Inputs, Problem

_NUM_CHUNK_ARGUMENTS = 5  # of a prompt: queries, pages, tables, starts, computed
_NUM_DECODE_ARGUMENTS = 4


def tiny(dtype: torch.dtype) -> list[Problem]:
    """What plain attention has, in plain pages of 16 tokens, over one to three blocks."""
    patterns = BlockSparsity(16, 3, None, 1, 1), BlockSparsity(32, None, 0.5, 1), BlockSparsity(16, 1)
    found = [p for p in (*decodes.tiny(dtype), *prompts.tiny(dtype)) if _is_plain(p)]
    return [_over(problem, pattern) for problem in found for pattern in patterns]


def serving() -> list[Problem]:
    """Eight blocks of 64 tokens, of which BigBird has two at the beginning and three anywhere."""
    found = [p for p in (*decodes.serving()[:3], *prompts.serving()[:3]) if _is_plain(p)]
    return [_over(problem, BlockSparsity(64, 8, None, 2, 3)) for problem in found]


def _is_plain(problem: Problem) -> bool:
    sizes = problem.sizes
    spans = (sizes.get("window_size", 0), sizes.get("chunk", 0))
    is_whole = sizes["kv_cache_dtype"] == sizes["attn_dtype"] and sizes["block_size"] == 16
    return is_whole and spans == (0, 0) and sizes.get("tree", "no") == "no"


def _over(problem: Problem, sparsity: BlockSparsity) -> Problem:
    is_decode = problem.operator == "attention_decode"
    count = _NUM_DECODE_ARGUMENTS if is_decode else _NUM_CHUNK_ARGUMENTS

    def make(inputs: Inputs) -> tuple[Any, ...]:
        return *problem.make(inputs)[:count], sparsity

    pattern = {"block": sparsity.block, "blocks": sparsity.num_blocks or 0, "random": sparsity.num_random}
    operator = "attention_sparse_decode" if is_decode else "attention_sparse_prefill"
    return replace(problem, operator=operator, sizes={**problem.sizes, **pattern}, make=make, work=None, baselines={})

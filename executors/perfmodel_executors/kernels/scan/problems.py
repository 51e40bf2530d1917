"""Scans of Mamba-2 and of the gated delta rule: sizes of Mamba-2 2.7B and Qwen3-Next, and odd ones."""

__all__ = ["serving", "tiny"]

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.ops.recurrent import StateShape, chunked_delta_rule, chunked_ssd, state_update
from perfmodel_executors.kernels.kv_pages.samples import NAMES
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.scan.inputs import ScanInputs

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


class _Sizes(NamedTuple):
    """Heads, groups of them that share queries and keys, elements of a key and of a value; the delta rule or not."""

    heads: int
    groups: int
    keys: int
    values: int
    erases: bool


_QWEN = _Sizes(32, 16, 128, 128, True)
_MAMBA = _Sizes(80, 1, 128, 64, False)


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Odd sizes, chunks shorter and longer than a tile."""
    delta, mamba = _Sizes(4, 2, 20, 24, True), _Sizes(4, 1, 16, 40, False)
    prompts = [_prefill([70, 1, 130], delta, dtype), _prefill([64], delta._replace(values=16), dtype)]
    prompts += [_prefill([5, 140], mamba, dtype), _prefill([65], mamba._replace(groups=4, keys=9), dtype)]
    return [_decode(3, delta, dtype), _decode(2, mamba, dtype, torch.float16), *prompts]


def serving() -> list[Problem]:
    bf16 = torch.bfloat16
    decodes = [_decode(size, sizes, bf16) for size in (1, 64, 256) for sizes in (_QWEN, _MAMBA)]
    prompts = [_prefill(each, sizes, bf16) for each in ([8192], [1024] * 8) for sizes in (_QWEN, _MAMBA)]
    return prompts + decodes


def _decode(num_seqs: int, sizes: _Sizes, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32) -> Problem:
    def make(inputs: Inputs) -> tuple[Any, ...]:
        rows = inputs.permutation(num_seqs + 2)[:num_seqs]
        return _tokens(inputs, num_seqs, sizes, dtype), rows, _states(inputs, num_seqs, sizes, state_dtype)

    work = state_update(num_seqs, _shape(sizes, dtype, state_dtype))
    tolerance = max(_TOLERANCE[dtype], _TOLERANCE[state_dtype])  # what is read of a state is as exact as that is
    return Problem("scan_decode", {"batch_size": num_seqs, **_named(sizes, dtype)}, make, work, tolerance)


def _prefill(lengths: list[int], sizes: _Sizes, dtype: torch.dtype) -> Problem:
    def make(inputs: Inputs) -> tuple[Any, ...]:
        starts = inputs.of(list(accumulate(lengths, initial=0)), torch.int64)
        rows = inputs.permutation(len(lengths) + 2)[: len(lengths)]
        states = _states(inputs, len(lengths), sizes, torch.float32)
        return _tokens(inputs, sum(lengths), sizes, dtype), rows, starts, states

    spans, shape = [(length, 0) for length in lengths], _shape(sizes, dtype, torch.float32)
    work = chunked_delta_rule(spans, shape) if sizes.erases else chunked_ssd(spans, shape, 64)
    named = {"batch_size": len(lengths), "isl": max(lengths), **_named(sizes, dtype)}
    return Problem("scan_prefill", named, make, work, _TOLERANCE[dtype])


def _tokens(inputs: Inputs, num_tokens: int, sizes: _Sizes, dtype: torch.dtype) -> ScanInputs:
    """Keys of length one, decays of 0.5 to 1 a token, weights of what is written of 0 to 1."""
    heads, groups, keys, values, erases = sizes
    q, k = (functional.normalize(inputs.normal(num_tokens, groups, keys, dtype=torch.float32), dim=2) for _ in "qk")
    v = inputs.normal(num_tokens, heads * values + 16, dtype=dtype)[:, : heads * values]  # beside others in memory
    decay, beta = (inputs.normal(num_tokens, heads, dtype=torch.float32).sigmoid() for _ in "ab")
    skip = None if erases else inputs.normal(heads, dtype=torch.float32)
    v = v.view(num_tokens, heads, values)
    return ScanInputs(q.to(dtype), k.to(dtype), v, -0.7 * decay, beta, skip, erases, 64)


def _states(inputs: Inputs, num_seqs: int, sizes: _Sizes, dtype: torch.dtype) -> Tensor:
    return inputs.normal(num_seqs + 2, sizes.heads, sizes.keys, sizes.values, dtype=dtype)


def _shape(sizes: _Sizes, dtype: torch.dtype, state_dtype: torch.dtype) -> StateShape:
    heads, groups, keys, values, _ = sizes
    elements = 2 * groups * keys + 2 * heads * values
    widths = dtype.itemsize, state_dtype.itemsize
    return StateShape(heads, keys, values, groups, elements, NAMES[dtype], *widths)


def _named(sizes: _Sizes, dtype: torch.dtype) -> dict[str, int | str]:
    kind = "delta" if sizes.erases else "mamba2"
    return {"kind": kind, "num_heads": sizes.heads, "num_groups": sizes.groups, "state_rows": sizes.keys,
            "state_columns": sizes.values, "dtype": NAMES[dtype]}  # fmt: skip

"""silu(conv(x)): depthwise over the last tokens, with the inputs that a sequence leaves behind for its next step."""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.kernels.kv_pages import NAMES, TOLERANCE
from perfmodel_executors.kernels.problem import Inputs, Problem, Sizes


def causal_conv_decode(
    x_DK: Tensor, rows_D: Tensor, inputs_RKW: Tensor, weight_KW: Tensor, bias_K: Tensor | None
) -> Tensor:
    """One new token per sequence, [D, K], of `rows` in `inputs`, [R, K, taps - 1], which take the token in."""
    window_DKW = torch.cat((inputs_RKW[rows_D], x_DK[..., None]), dim=-1)
    inputs_RKW[rows_D] = window_DKW[..., 1:]
    out_DK = (window_DKW * weight_KW).sum(dim=-1)
    return functional.silu(out_DK if bias_K is None else out_DK + bias_K)


def causal_conv_prefill(
    x_TK: Tensor, rows_G: Tensor, starts_G: Tensor, inputs_RKW: Tensor, weight_KW: Tensor, bias_K: Tensor | None
) -> Tensor:
    """Chunks of sequences behind one another, [T, K]; chunk g has the tokens starts[g] : starts[g + 1]."""
    parts = []
    for row, (begin, end) in zip(rows_G.tolist(), pairwise(starts_G.tolist()), strict=True):
        window_KT = torch.cat((inputs_RKW[row], x_TK[begin:end].T), dim=-1)
        inputs_RKW[row] = window_KT[:, end - begin :]
        parts.append(functional.conv1d(window_KT[None], weight_KW[:, None], bias_K, groups=len(weight_KW))[0].T)
    return functional.silu(torch.cat(parts))


def tiny(dtype: torch.dtype) -> list[Problem]:
    chunks = [[1, 40, 2], [33], [3, 70, 1]]
    prompts = [_problem("prefill", lengths, 70 + i, 4 - i, dtype, i % 2 == 0) for i, lengths in enumerate(chunks)]
    decodes = [_problem("decode", [1] * 3, 70, 4, dtype, True), _problem("decode", [1] * 2, 300, 2, dtype, False)]
    return [*decodes, *prompts]


def serving() -> list[Problem]:
    bf16 = torch.bfloat16
    decodes = [_problem("decode", [1] * n, width, 4, bf16, True) for n, width in ((1, 8192), (64, 8192), (256, 5376))]
    prompts = [_problem("prefill", [8192], 8192, 4, bf16, False), _problem("prefill", [1024] * 8, 5376, 4, bf16, True)]
    return [*decodes, *prompts]


def _problem(kind: str, lengths: list[int], channels: int, taps: int, dtype: torch.dtype, has_bias: bool) -> Problem:
    count, is_prefill = len(lengths), kind == "prefill"

    def make(inputs: Inputs) -> tuple[Any, ...]:
        x = inputs.normal(sum(lengths), channels + 16, dtype=dtype)[:, :channels]
        starts = [inputs.of(list(accumulate(lengths, initial=0)), torch.int64)] if is_prefill else []
        rows = inputs.permutation(count + 2)[:count]
        left = inputs.normal(count + 2, channels, taps - 1, dtype=dtype)
        weight = inputs.normal(channels, taps, dtype=dtype, scale=taps**-0.5)
        return x, rows, *starts, left, weight, inputs.normal(channels, dtype=dtype) if has_bias else None

    longest = {"isl": max(lengths)} if is_prefill else {}
    sizes: Sizes = {"batch_size": count, **longest, "channels": channels, "taps": taps, "dtype": NAMES[dtype]}
    return Problem(f"causal_conv_{kind}", sizes, make, tolerance=TOLERANCE[dtype])

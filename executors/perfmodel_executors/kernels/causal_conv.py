"""silu(conv(x)): depthwise over the last tokens, with the inputs that a sequence leaves behind for its next step."""

from itertools import accumulate
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
    starts: list[int] = starts_G.tolist()
    parts = []
    for row, begin, end in zip(rows_G.tolist(), starts, starts[1:], strict=False):
        window_KT = torch.cat((inputs_RKW[row], x_TK[begin:end].T), dim=-1)
        inputs_RKW[row] = window_KT[:, end - begin :]
        parts.append(functional.conv1d(window_KT[None], weight_KW[:, None], bias_K, groups=len(weight_KW))[0].T)
    return functional.silu(torch.cat(parts))


def tiny(dtype: torch.dtype) -> list[Problem]:
    chunks = [[1, 40, 2], [33], [3, 70, 1]]
    prompts = [_prefill(lengths, 70 + i, 4 - i, dtype, i % 2 == 0) for i, lengths in enumerate(chunks)]
    return [_decode(3, 70, 4, dtype, True), _decode(2, 300, 2, dtype, False), *prompts]


def serving() -> list[Problem]:
    bf16 = torch.bfloat16
    decodes = [_decode(size, width, 4, bf16, True) for size, width in ((1, 8192), (64, 8192), (256, 5376))]
    return [*decodes, _prefill([8192], 8192, 4, bf16, False), _prefill([1024] * 8, 5376, 4, bf16, True)]


def _decode(num_seqs: int, channels: int, taps: int, dtype: torch.dtype, has_bias: bool) -> Problem:
    def make(inputs: Inputs) -> tuple[Any, ...]:
        x = inputs.normal(num_seqs, channels + 16, dtype=dtype)[:, :channels]
        return x, inputs.permutation(num_seqs + 2)[:num_seqs], *_weights(inputs, num_seqs, channels, taps, has_bias, x)

    sizes: Sizes = {"batch_size": num_seqs, "channels": channels, "taps": taps, "dtype": NAMES[dtype]}
    return Problem("causal_conv_decode", sizes, make, tolerance=TOLERANCE[dtype])


def _prefill(lengths: list[int], channels: int, taps: int, dtype: torch.dtype, has_bias: bool) -> Problem:
    def make(inputs: Inputs) -> tuple[Any, ...]:
        x = inputs.normal(sum(lengths), channels + 16, dtype=dtype)[:, :channels]
        starts = inputs.of(list(accumulate(lengths, initial=0)), torch.int64)
        rows = inputs.permutation(len(lengths) + 2)[: len(lengths)]
        return x, rows, starts, *_weights(inputs, len(lengths), channels, taps, has_bias, x)

    sizes: Sizes = {"batch_size": len(lengths), "isl": max(lengths), "channels": channels, "taps": taps}
    return Problem("causal_conv_prefill", {**sizes, "dtype": NAMES[dtype]}, make, tolerance=TOLERANCE[dtype])


def _weights(
    inputs: Inputs, num_seqs: int, channels: int, taps: int, has_bias: bool, x: torch.Tensor
) -> tuple[Any, ...]:
    left = inputs.normal(num_seqs + 2, channels, taps - 1, dtype=x.dtype)
    weight = inputs.normal(channels, taps, dtype=x.dtype, scale=taps**-0.5)
    return left, weight, inputs.normal(channels, dtype=x.dtype) if has_bias else None

"""Choice of the next token without a sort.

Greedy, in two stages: the best of each piece of the vocabulary (enough programs for a single row), then of the pieces.

Sampling keeps what reaches a threshold (see `reference`), so the threshold is all that has to be found: bisection on
the bits of exp((logit - max) / temperature), which as unsigned integers are in the order of the values. Each pass
counts or sums what reaches the middle; the search ends when the interval holds no more than one token, or after 30
passes with one value. One program a row: the row, 256 KB of logits, is read from L2 some 20 to 50 times, where a sort
moves it as often through HBM. A last pass finds the token in the vocabulary's order. Nothing depends on the host.
"""

__all__ = ["greedy", "sample_top_k_top_p"]

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch

_PIECE = 4096  # logits of a program of the first stage: 32 a thread, which stay in registers
_BLOCK = 8192  # logits of a step of a pass
_NOWHERE = tl.constexpr(0x7FFFFFFF)
_ONE_BITS = tl.constexpr(0x3F800000)  # of 1.0, the largest exp(logit - max)


@triton.jit
def _best_of_pieces_kernel(logits_ptr, values_ptr, indices_ptr, vocab, pieces, row_stride, BLOCK: tl.constexpr):
    row, piece = tl.program_id(0), tl.program_id(1)
    index = piece * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    logits = tl.load(row_ptr + index, mask=index < vocab, other=-float("inf")).to(tl.float32)
    best = tl.max(logits, axis=0)
    tl.store(values_ptr + row * pieces + piece, best)
    tl.store(indices_ptr + row * pieces + piece, tl.min(tl.where(logits == best, index, _NOWHERE), axis=0))


@triton.jit
def _best_kernel(values_ptr, indices_ptr, tokens_ptr, pieces, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    piece = tl.arange(0, BLOCK)
    values = tl.load(values_ptr + row * pieces + piece, mask=piece < pieces, other=-float("inf"))
    indices = tl.load(indices_ptr + row * pieces + piece, mask=piece < pieces, other=_NOWHERE)
    tl.store(tokens_ptr + row, tl.min(tl.where(values == tl.max(values, axis=0), indices, _NOWHERE), axis=0))


@triton.jit
def _weights(row_ptr, start, vocab, inverse, largest, BLOCK: tl.constexpr):
    """exp((logit - max) / temperature) of a block, in 0..1."""
    index = start + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + index, mask=index < vocab, other=-float("inf")).to(tl.float32)
    return tl.exp((logits - largest) * inverse)


@triton.jit
def _reaching(row_ptr, vocab, inverse, largest, bits, BLOCK: tl.constexpr):
    """(how many weights have at least these bits, their sum)."""
    counts = tl.zeros((BLOCK,), tl.int32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        weights = _weights(row_ptr, start, vocab, inverse, largest, BLOCK)
        inside = (weights.to(tl.int32, bitcast=True) >= bits) & (start + tl.arange(0, BLOCK) < vocab)
        counts += inside.to(tl.int32)
        sums += tl.where(inside, weights, 0.0)
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0)


@triton.jit
def _sample_kernel(
    logits_ptr, temperatures_ptr, top_k_ptr, top_p_ptr, uniforms_ptr, tokens_ptr, vocab, row_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures_ptr + row)
    is_greedy = temperature <= 0.0
    inverse = tl.div_rn(1.0, tl.where(is_greedy, 1.0, temperature))
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    top_k = tl.where(is_greedy, 1, top_k)
    top_p = tl.load(top_p_ptr + row)

    maxima = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + index, mask=index < vocab, other=-float("inf")).to(tl.float32)
        maxima = tl.maximum(maxima, logits)
    largest = tl.max(maxima, axis=0)

    # Invariant of both searches: what reaches `low` is enough, what reaches `high` is not.
    low = 0
    high = _ONE_BITS + 1
    low_count = vocab
    high_count = 0
    if top_k < vocab:
        while (high - low > 1) & (low_count - high_count > 1):
            middle = (low + high) // 2
            count, _ = _reaching(row_ptr, vocab, inverse, largest, middle, BLOCK)
            is_enough = count >= top_k
            low = tl.where(is_enough, middle, low)
            low_count = tl.where(is_enough, count, low_count)
            high = tl.where(is_enough, high, middle)
            high_count = tl.where(is_enough, high_count, count)
    _, total = _reaching(row_ptr, vocab, inverse, largest, low, BLOCK)
    if top_p < 1.0:
        wanted = top_p * total
        high = _ONE_BITS + 1
        high_count = 0
        while (high - low > 1) & (low_count - high_count > 1):
            middle = (low + high) // 2
            count, kept = _reaching(row_ptr, vocab, inverse, largest, middle, BLOCK)
            is_enough = kept >= wanted
            low = tl.where(is_enough, middle, low)
            low_count = tl.where(is_enough, count, low_count)
            total = tl.where(is_enough, kept, total)
            high = tl.where(is_enough, high, middle)
            high_count = tl.where(is_enough, high_count, count)

    target = tl.where(is_greedy, 0.0, tl.load(uniforms_ptr + row)) * total
    before = 0.0
    token = _NOWHERE
    last = 0
    for start in range(0, vocab, BLOCK):
        weights = _weights(row_ptr, start, vocab, inverse, largest, BLOCK)
        index = start + tl.arange(0, BLOCK)
        inside = (weights.to(tl.int32, bitcast=True) >= low) & (index < vocab)
        kept = tl.where(inside, weights, 0.0)
        sums = before + tl.cumsum(kept, axis=0)
        token = tl.minimum(token, tl.min(tl.where(inside & (sums > target), index, _NOWHERE), axis=0))
        last = tl.maximum(last, tl.max(tl.where(inside, index, 0), axis=0))
        before += tl.sum(kept, axis=0)
    # Rounding may leave the sums just short of a target near the total.
    tl.store(tokens_ptr + row, tl.minimum(token, last))


def greedy(logits_SV: Tensor) -> Tensor:
    """The index of each row's largest logit, int64 [S]; the first of equal ones."""
    rows, vocab = logits_SV.shape
    block = min(_PIECE, triton.next_power_of_2(vocab))
    pieces = triton.cdiv(vocab, block)
    values = torch.empty(rows, pieces, dtype=torch.float32, device=logits_SV.device)
    indices = torch.empty(rows, pieces, dtype=torch.int32, device=logits_SV.device)
    tokens_S = torch.empty(rows, dtype=torch.int64, device=logits_SV.device)
    args = (logits_SV, values, indices, vocab, pieces, logits_SV.stride(0))
    launch(_best_of_pieces_kernel, (rows, pieces), *args, options=Options(4, 1), BLOCK=block)
    blocks = triton.next_power_of_2(pieces)
    launch(_best_kernel, (rows,), values, indices, tokens_S, pieces, options=Options(1, 1), BLOCK=blocks)
    return tokens_S


def sample_top_k_top_p(
    logits_SV: Tensor, temperature_S: Tensor, top_k_S: Tensor, top_p_S: Tensor, uniform_S: Tensor
) -> Tensor:
    """One token for each row, int64 [S]; see the reference."""
    rows, vocab = logits_SV.shape
    tokens_S = torch.empty(rows, dtype=torch.int64, device=logits_SV.device)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    args = (logits_SV, temperature_S, top_k_S, top_p_S, uniform_S, tokens_S, vocab, logits_SV.stride(0))
    launch(_sample_kernel, (rows,), *args, options=Options(num_warps=16, num_stages=1), BLOCK=block)
    return tokens_S

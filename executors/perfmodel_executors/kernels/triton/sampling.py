"""Choice of the next token without a sort, with many programs a row. Greedy, in two stages: the best of each piece of
the vocabulary (enough programs for a single row), then of the pieces. Sampling keeps what reaches a threshold (see
its definition in torch), which radix selection finds: the bits of a weight, as an integer, are in the order of the
weights, and are settled digit by digit, the exponent first, then 8, 8 and 7 bits of the mantissa."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels import sampling as reference
from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.sampling import DRAW_BITS, WEIGHT_BITS

_MAX_NODES = 63  # of a tree of drafts, whose nodes are bits
_PIECE = 4096  # logits of a program: 32 a thread, which stay in registers
_NOWHERE = tl.constexpr(0x7FFFFFFF)
_DIGITS = ((23, 127), (15, 255), (7, 255), (0, 127))  # shift and mask of each digit, the most significant first
_PASSES = tl.constexpr(len(_DIGITS))
_BINS = tl.constexpr(256)
_SCALE = tl.constexpr(float(1 << WEIGHT_BITS))
_DRAW_BITS = tl.constexpr(DRAW_BITS)
_LOW_BITS = tl.constexpr((1 << DRAW_BITS) - 1)


@triton.jit
def _numbers(row_ptr, index, vocab):
    """(logits, the least there is in place of those that are no numbers; how many those are)."""
    logits = tl.load(row_ptr + index, mask=index < vocab, other=-float("inf")).to(tl.float32)
    is_nan = logits != logits
    return tl.where(is_nan, -float("inf"), logits), tl.sum(is_nan.to(tl.int32), axis=0)


@triton.jit
def _best_of_pieces_kernel(
    logits_ptr, values_ptr, indices_ptr, num_nan_ptr, vocab, pieces, row_stride, BLOCK: tl.constexpr
):
    row, piece = tl.program_id(0), tl.program_id(1)
    index = piece * BLOCK + tl.arange(0, BLOCK)
    logits, num_nan = _numbers(logits_ptr + row.to(tl.int64) * row_stride, index, vocab)
    best = tl.max(logits, axis=0)
    tl.store(values_ptr + row * pieces + piece, best)
    if indices_ptr is not None:
        tl.store(indices_ptr + row * pieces + piece, tl.min(tl.where(logits == best, index, _NOWHERE), axis=0))
    if num_nan_ptr is not None:  # noqa: SIM102 (this one is settled when it is compiled)
        if num_nan > 0:
            tl.atomic_add(num_nan_ptr, num_nan.to(tl.int64), sem="relaxed")


@triton.jit
def _best_kernel(values_ptr, indices_ptr, tokens_ptr, pieces, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    piece = tl.arange(0, BLOCK)
    values = tl.load(values_ptr + row * pieces + piece, mask=piece < pieces, other=-float("inf"))
    indices = tl.load(indices_ptr + row * pieces + piece, mask=piece < pieces, other=_NOWHERE)
    tl.store(tokens_ptr + row, tl.min(tl.where(values == tl.max(values, axis=0), indices, _NOWHERE), axis=0))


@triton.jit
def _weights(
    logits_ptr, maxima_ptr, temperature_ptr, row, piece, vocab, pieces, row_stride, stride,
    BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Weights of a piece; -1 beyond the vocabulary."""
    index = piece * BLOCK + tl.arange(0, BLOCK)
    logits, _ = _numbers(logits_ptr + row.to(tl.int64) * row_stride, index, vocab)
    arange = tl.arange(0, PIECES)
    largest = tl.max(tl.load(maxima_ptr + row * pieces + arange, mask=arange < pieces, other=-float("inf")), axis=0)
    temperature = tl.load(temperature_ptr + row * stride)
    inverse = tl.div_rn(1.0, tl.where(temperature <= 0.0, 1.0, temperature))
    weights = tl.where(logits == largest, 1.0, tl.exp((logits - largest) * inverse))
    return tl.where(index < vocab, weights, -1.0)


@triton.jit
def _choose_digit(bins_ptr, prefix, wanted, SHIFT: tl.constexpr):
    """(prefix with the largest digit that reaches what is wanted from above; what is wanted of its tokens)."""
    digit = tl.arange(0, _BINS)
    result = tl.load(bins_ptr + digit)
    reached = tl.sum(result, axis=0) - tl.cumsum(result, axis=0) + result
    chosen = tl.max(tl.where(reached >= wanted, digit, 0), axis=0)
    above = tl.sum(tl.where(digit > chosen, result, 0), axis=0)
    return prefix | (chosen << SHIFT), wanted - above


@triton.jit
def _asks(setting_ptr, temperature_ptr, row, vocab, stride, IS_SUM: tl.constexpr):
    """Whether the row has a threshold of this kind to be found."""
    is_drawn = tl.load(temperature_ptr + row * stride) > 0.0
    setting = tl.load(setting_ptr + row * stride)
    if IS_SUM:
        return is_drawn & (setting < 1.0)
    else:
        return is_drawn & (setting > 0) & (setting < vocab)


@triton.jit
def _begin_pass(
    bins_ptr, prefixes_ptr, wanted_ptr, setting_ptr, row, rows, stride,
    PASS: tl.constexpr, SHIFT: tl.constexpr, IS_SUM: tl.constexpr,
):  # fmt: skip
    """(prefix, what is wanted) when pass `PASS` begins; `SHIFT`: of the digit before."""
    prefix = 0
    if IS_SUM:
        wanted = tl.full((), 0, tl.int64)
    else:
        wanted = tl.load(setting_ptr + row * stride).to(tl.int64)
    if PASS > 1:
        prefix = tl.load(prefixes_ptr + row + rows * (PASS - 1))
        wanted = tl.load(wanted_ptr + row + rows * (PASS - 1))
    if PASS > 0:
        before_ptr = bins_ptr + (row + rows * (PASS - 1)).to(tl.int64) * _BINS
        if IS_SUM and PASS == 1:
            total = tl.sum(tl.load(before_ptr + tl.arange(0, _BINS)), axis=0)
            share = total.to(tl.float64) * tl.load(setting_ptr + row * stride).to(tl.float64)
            wanted = tl.maximum(share.to(tl.int64), 1)
        prefix, wanted = _choose_digit(before_ptr, prefix, wanted, SHIFT)
    return prefix, wanted


@triton.jit(do_not_specialize=["rows"])
def _digits_kernel(
    logits_ptr, maxima_ptr, temperature_ptr, setting_ptr, least_ptr, bins_ptr, prefixes_ptr, wanted_ptr,
    vocab, pieces, row_stride, stride, rows,
    PASS: tl.constexpr, BEFORE: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr, IS_SUM: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if _asks(setting_ptr, temperature_ptr, row, vocab, stride, IS_SUM):
        prefix, wanted = _begin_pass(
            bins_ptr, prefixes_ptr, wanted_ptr, setting_ptr, row, rows, stride, PASS, BEFORE, IS_SUM
        )
        if tl.program_id(1) == 0:
            tl.store(prefixes_ptr + row + rows * PASS, prefix)
            tl.store(wanted_ptr + row + rows * PASS, wanted)
        args = (logits_ptr, maxima_ptr, temperature_ptr, row, tl.program_id(1), vocab, pieces, row_stride, stride)
        weights = _weights(*args, BLOCK, PIECES)
        bits = weights.to(tl.int32, bitcast=True)
        inside = weights >= tl.load(least_ptr + row)
        if PASS > 0:
            inside = inside & ((bits >> BEFORE) == (prefix >> BEFORE))
        digit = (bits >> SHIFT) & MASK
        own_ptr = bins_ptr + (row + rows * PASS).to(tl.int64) * _BINS
        if IS_SUM:
            tl.atomic_add(own_ptr + digit, (weights * _SCALE).to(tl.int64), mask=inside, sem="relaxed")
        else:
            counts = tl.histogram(digit, _BINS, mask=inside)
            tl.atomic_add(own_ptr + tl.arange(0, _BINS), counts.to(tl.int64), mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def _threshold_kernel(
    temperature_ptr, setting_ptr, bins_ptr, prefixes_ptr, wanted_ptr, least_ptr, vocab, stride, rows,
    BEFORE: tl.constexpr, IS_SUM: tl.constexpr,
):  # fmt: skip
    """What the last pass leaves becomes the least weight, if it is more than it was."""
    row = tl.program_id(0)
    if _asks(setting_ptr, temperature_ptr, row, vocab, stride, IS_SUM):
        bits, _ = _begin_pass(
            bins_ptr, prefixes_ptr, wanted_ptr, setting_ptr, row, rows, stride, _PASSES, BEFORE, IS_SUM
        )
        least = tl.load(least_ptr + row)
        tl.store(least_ptr + row, tl.maximum(least, bits.to(tl.float32, bitcast=True)))


@triton.jit
def _least_kernel(temperature_ptr, min_p_ptr, least_ptr, stride):
    """The least weight before anything is looked for: the largest one where the choice is greedy."""
    row = tl.program_id(0)
    least = tl.full((), 0.0, tl.float32)
    if min_p_ptr is not None:
        least = tl.load(min_p_ptr + row * stride)
    tl.store(least_ptr + row, tl.where(tl.load(temperature_ptr + row * stride) > 0.0, least, 1.0))


@triton.jit
def _kept_integers(weights, least):
    return tl.where((weights >= least) & (weights >= 0.0), weights * _SCALE, 0.0).to(tl.int64)


@triton.jit
def _kept_kernel(
    logits_ptr, maxima_ptr, temperature_ptr, least_ptr, sums_ptr, vocab, pieces, row_stride, stride,
    BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    args = (logits_ptr, maxima_ptr, temperature_ptr, row, tl.program_id(1), vocab, pieces, row_stride, stride)
    weights = _weights(*args, BLOCK, PIECES)
    kept = _kept_integers(weights, tl.load(least_ptr + row))
    tl.store(sums_ptr + row * pieces + tl.program_id(1), tl.sum(kept, axis=0))


@triton.jit
def _draw_kernel(
    logits_ptr, maxima_ptr, temperature_ptr, least_ptr, sums_ptr, draws_ptr, tokens_ptr,
    vocab, pieces, row_stride, stride, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    piece = tl.arange(0, PIECES)
    sums = tl.load(sums_ptr + row * pieces + piece, mask=piece < pieces, other=0)
    total = tl.sum(sums, axis=0)
    draw = tl.load(draws_ptr + row)
    draw = tl.where(tl.load(temperature_ptr + row * stride) > 0.0, draw, 0)
    low = total & _LOW_BITS
    target = (total >> _DRAW_BITS) * draw + ((low * draw) >> _DRAW_BITS)
    ends = tl.cumsum(sums, axis=0)
    chosen = tl.sum((ends <= target).to(tl.int32), axis=0)
    target -= tl.sum(tl.where(piece < chosen, sums, 0), axis=0)
    args = (logits_ptr, maxima_ptr, temperature_ptr, row, chosen, vocab, pieces, row_stride, stride)
    kept = _kept_integers(_weights(*args, BLOCK, PIECES), tl.load(least_ptr + row))
    before = tl.sum((tl.cumsum(kept, axis=0) <= target).to(tl.int32), axis=0)
    tl.store(tokens_ptr + row, (chosen * BLOCK + before).to(tl.int64))


def greedy(logits_SV: Tensor, num_nan: Tensor | None = None) -> Tensor:
    rows, pieces = len(logits_SV), triton.cdiv(logits_SV.shape[1], _block(logits_SV))
    indices = torch.empty(rows, pieces, dtype=torch.int32, device=logits_SV.device)
    tokens_S = torch.empty(rows, dtype=torch.int64, device=logits_SV.device)
    args = (_maxima(logits_SV, indices, num_nan), indices, tokens_S, pieces)
    launch(_best_kernel, (rows,), *args, options=Options(1, 1), BLOCK=triton.next_power_of_2(pieces))
    return tokens_S


def sample_top_k_top_p(
    logits_SV: Tensor,
    draws_S: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor | None = None,
    top_p_S: Tensor | None = None,
    min_p_S: Tensor | None = None,
    num_nan: Tensor | None = None,
) -> Tensor:
    """One token for each row, int64 [S]; see the reference. Settings are apart by equal strides, 0 of equal ones."""
    (rows, vocab), device, stride, block = logits_SV.shape, logits_SV.device, temperature_S.stride(0), _block(logits_SV)
    pieces = triton.cdiv(vocab, block)
    grid, small = (rows, pieces), Options(1, 1)
    sizes = {"BLOCK": block, "PIECES": triton.next_power_of_2(pieces)}
    least_S = torch.empty(rows, dtype=torch.float32, device=device)
    maxima = _maxima(logits_SV, None, num_nan)
    launch(_least_kernel, (rows,), temperature_S, min_p_S, least_S, stride, options=small)
    whole = (vocab, pieces, logits_SV.stride(0), stride)
    for is_sum, setting_S in ((False, top_k_S), (True, top_p_S)):
        if setting_S is None:
            continue
        bins = torch.zeros(len(_DIGITS), rows, _BINS.value, dtype=torch.int64, device=device)
        prefixes = torch.empty(len(_DIGITS), rows, dtype=torch.int32, device=device)
        wanted = torch.empty(len(_DIGITS), rows, dtype=torch.int64, device=device)
        args = (logits_SV, maxima, temperature_S, setting_S, least_S, bins, prefixes, wanted, *whole, rows)
        before = 0
        for number, (shift, mask) in enumerate(_DIGITS):
            digit = {"PASS": number, "BEFORE": before, "SHIFT": shift, "MASK": mask, "IS_SUM": is_sum}
            launch(_digits_kernel, grid, *args, options=Options(4, 1), **digit, **sizes)
            before = shift
        threshold = (temperature_S, setting_S, bins, prefixes, wanted, least_S, vocab, stride, rows)
        launch(_threshold_kernel, (rows,), *threshold, options=small, BEFORE=before, IS_SUM=is_sum)
    sums = torch.empty(rows, pieces, dtype=torch.int64, device=device)
    tokens_S = torch.empty(rows, dtype=torch.int64, device=device)
    kept = (logits_SV, maxima, temperature_S, least_S, sums)
    launch(_kept_kernel, grid, *kept, *whole, options=Options(4, 1), **sizes)
    launch(_draw_kernel, (rows,), *kept, draws_S, tokens_S, *whole, options=Options(8, 1), **sizes)
    return tokens_S


def _block(logits_SV: Tensor) -> int:
    return min(_PIECE, int(triton.next_power_of_2(logits_SV.shape[1])))


def _maxima(logits_SV: Tensor, indices: Tensor | None, num_nan: Tensor | None) -> Tensor:
    (rows, vocab), block = logits_SV.shape, _block(logits_SV)
    pieces = triton.cdiv(vocab, block)
    values = torch.empty(rows, pieces, dtype=torch.float32, device=logits_SV.device)
    args = (logits_SV, values, indices, num_nan, vocab, pieces, logits_SV.stride(0))
    launch(_best_of_pieces_kernel, (rows, pieces), *args, options=Options(4, 1), BLOCK=block)
    return values


@triton.jit
def _verify_greedy_kernel(
    tokens_ptr, parents_ptr, depths_ptr, chosen_ptr, num_nodes_ptr, last_ptr, NODES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    drafted = NODES
    if num_nodes_ptr is not None:
        drafted = tl.load(num_nodes_ptr + row).to(tl.int32)
    kept = tl.full((), 1, tl.int64)  # a bit for each node
    last, deepest = 0, 1
    for node in range(1, NODES):
        parent = tl.load(parents_ptr + node)
        is_right = tl.load(tokens_ptr + row * NODES + node) == tl.load(chosen_ptr + row * NODES + parent)
        is_kept = is_right & (node < drafted) & ((kept >> parent.to(tl.int64)) & 1 == 1)
        kept |= is_kept.to(tl.int64) << node
        depth = tl.load(depths_ptr + node)
        is_deeper = is_kept & (depth > deepest)
        last, deepest = tl.where(is_deeper, node, last), tl.where(is_deeper, depth, deepest)
    tl.store(last_ptr + row, last)


@lru_cache(maxsize=256)
def _tree(parents: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Parents and depths of nodes; node 0 is at depth 1."""
    depths = [1]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    parents_N, depths_N = (torch.tensor(values, dtype=torch.int32, device=device) for values in (parents, depths))
    return parents_N, depths_N


def verify_greedy(
    tokens_RN: Tensor, parents: Sequence[int], chosen_RN: Tensor, num_nodes_R: Tensor | None = None
) -> Tensor:
    """The last node kept of each sequence, int64 [R]; tokens, parents, chosen, num_nodes: as in torch's definition,
    which takes trees of more than 63 nodes."""
    rows, nodes = tokens_RN.shape
    if nodes > _MAX_NODES:
        return reference.verify_greedy(tokens_RN, parents, chosen_RN, num_nodes_R)
    last_R = torch.empty(rows, dtype=torch.int64, device=tokens_RN.device)
    tree = _tree(tuple(parents), tokens_RN.device)
    args = (tokens_RN.contiguous(), *tree, chosen_RN.contiguous(), num_nodes_R, last_R)
    launch(_verify_greedy_kernel, (rows,), *args, options=Options(num_warps=1, num_stages=1), NODES=nodes)
    return last_R

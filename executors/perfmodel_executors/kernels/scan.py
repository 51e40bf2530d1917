"""Scans in torch, in fp32: one update for a new token, chunks of matrix products for prompts. Inputs have the names of
linear attention: Mamba-2's C, B, x and dt are q, k, v and beta. Mamba-2: Dao and Gu 2024, listing 1. The gated delta
rule: Yang et al. 2025, in the WY form: a triangular system for what each token writes once what those before it in the
chunk have written is taken away. Problems: sizes of Mamba-2 2.7B and Qwen3-Next, and odd ones."""

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.ops.recurrent import StateShape, chunked_delta_rule, chunked_ssd, state_update
from perfmodel_executors.kernels.kv_pages import NAMES
from perfmodel_executors.kernels.problem import Inputs, Problem


class ScanInputs(NamedTuple):
    """The inputs of T tokens and H heads, which share G groups of queries and keys:

        S_t = a_t S_{t-1} + k_t w_t^T,    o_t = S_t^T q_t + skip v_t
        w_t = b_t v_t  (Mamba-2),    w_t = b_t (v_t - a_t S_{t-1}^T k_t)  (the gated delta rule)

    log_decay: natural logarithms of a, in fp32, as are beta b and skip
    erases:    the delta rule: what a key holds goes when something new is written to it
    chunk:     tokens that the definition takes at once; kernels have tiles of their own
    """

    q_TGK: Tensor
    k_TGK: Tensor
    v_THV: Tensor
    log_decay_TH: Tensor
    beta_TH: Tensor
    skip_H: Tensor | None
    erases: bool
    chunk: int

    def tokens(self, which: slice) -> "ScanInputs":
        q_TGK, k_TGK, v_THV, log_decay_TH, beta_TH = (part[which] for part in self[:5])
        return ScanInputs(q_TGK, k_TGK, v_THV, log_decay_TH, beta_TH, *self[5:])


def scan_decode(inputs: ScanInputs, rows_D: Tensor, states_RHKV: Tensor) -> Tensor:
    """One new token per sequence, [D, H, V] in the dtype of the values; the states of `rows` take it in."""
    q_DHK, k_DHK, v_DHV = _per_head(inputs)
    state_DHKV = states_RHKV[rows_D].float() * inputs.log_decay_TH.exp()[..., None, None]
    written_DHV = v_DHV
    if inputs.erases:
        written_DHV = v_DHV - torch.einsum("dhk,dhkv->dhv", k_DHK, state_DHKV)
    state_DHKV = state_DHKV + k_DHK[..., None] * (written_DHV * inputs.beta_TH[..., None])[:, :, None]
    states_RHKV[rows_D] = state_DHKV.to(states_RHKV.dtype)
    out_DHV = torch.einsum("dhk,dhkv->dhv", q_DHK, state_DHKV)
    return _with_skip(out_DHV, v_DHV, inputs)


def scan_prefill(inputs: ScanInputs, rows_G: Tensor, starts_G: Tensor, states_RHKV: Tensor) -> Tensor:
    """Chunks of sequences behind one another, [T, H, V]; chunk g has the tokens starts[g] : starts[g + 1]."""
    spans = zip(rows_G.tolist(), pairwise(starts_G.tolist()), strict=True)
    return torch.cat([_sequence(inputs.tokens(slice(*span)), states_RHKV[row]) for row, span in spans])


def _sequence(inputs: ScanInputs, state_of_row: Tensor) -> Tensor:
    """The new tokens of one sequence, [T, H, V], whose state is changed in place. With g the summed log decays of a
    chunk, a token takes of what token s wrote exp(g_t - g_s). Delta rule: W = b k e^g and U = b v solve (I + L) [W | U]
    = [w | u], L_ts = b_t k_t . k_s e^(g_t - g_s) for s < t; tokens then write U - W S, of the state S before."""
    q_THK, k_THK, v_THV = _per_head(inputs)
    state_HKV, parts = state_of_row.float(), []
    for begin in range(0, len(q_THK), inputs.chunk):
        rows = slice(begin, begin + inputs.chunk)
        q_HTK, k_HTK, v_HTV = (part[rows].transpose(0, 1) for part in (q_THK, k_THK, v_THV))
        beta_HT1, sums_HT = inputs.beta_TH[rows].T[..., None], inputs.log_decay_TH[rows].T.cumsum(dim=1)
        between_HTS = torch.exp((sums_HT[:, :, None] - sums_HT[:, None]).tril()).tril()
        written_HTV = beta_HT1 * v_HTV
        if inputs.erases:
            mixed_HTS = (beta_HT1 * k_HTK @ k_HTK.transpose(1, 2) * between_HTS).tril(-1)
            right = torch.cat((beta_HT1 * k_HTK * sums_HT.exp()[..., None], written_HTV), dim=-1)
            eye = torch.eye(right.shape[1], device=right.device)
            solved = torch.linalg.solve_triangular(mixed_HTS + eye, right, upper=False, unitriangular=True)
            w_HTK, u_HTV = torch.split(solved, [k_HTK.shape[2], v_HTV.shape[2]], dim=-1)
            written_HTV = u_HTV - w_HTK @ state_HKV
        past_HTV = (q_HTK * sums_HT.exp()[..., None]) @ state_HKV
        parts.append((past_HTV + (q_HTK @ k_HTK.transpose(1, 2) * between_HTS) @ written_HTV).transpose(0, 1))
        to_end_HT1 = torch.exp(sums_HT[:, -1:] - sums_HT)[..., None]
        state_HKV = state_HKV * sums_HT[:, -1].exp()[:, None, None] + (k_HTK * to_end_HT1).transpose(1, 2) @ written_HTV
    state_of_row.copy_(state_HKV)
    return _with_skip(torch.cat(parts), v_THV, inputs)


def _per_head(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    shared = inputs.v_THV.shape[1] // inputs.q_TGK.shape[1]
    q_THK, k_THK = (part.float().repeat_interleave(shared, 1) for part in (inputs.q_TGK, inputs.k_TGK))
    return q_THK, k_THK, inputs.v_THV.float()


def _with_skip(out_THV: Tensor, v_THV: Tensor, inputs: ScanInputs) -> Tensor:
    if inputs.skip_H is not None:
        out_THV = out_THV + inputs.skip_H[:, None] * v_THV
    return out_THV.to(inputs.v_THV.dtype)


_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


class _Sizes(NamedTuple):
    heads: int
    groups: int
    keys: int
    values: int
    erases: bool


_QWEN = _Sizes(32, 16, 128, 128, True)
_MAMBA = _Sizes(80, 1, 128, 64, False)


def tiny(dtype: torch.dtype) -> list[Problem]:
    delta, mamba = _Sizes(4, 2, 20, 24, True), _Sizes(4, 1, 16, 40, False)
    decodes = [_problem("decode", [1] * 3, delta, dtype), _problem("decode", [1] * 2, mamba, dtype, torch.float16)]
    sizes = (delta, delta._replace(values=16), mamba, mamba._replace(groups=4, keys=9))
    prompts = zip(([70, 1, 130], [64], [5, 140], [65]), sizes, strict=True)
    return [*decodes, *(_problem("prefill", lengths, own, dtype) for lengths, own in prompts)]


def serving() -> list[Problem]:
    bf16 = torch.bfloat16
    listed = {"prefill": ([8192], [1024] * 8), "decode": ([1], [1] * 64, [1] * 256)}
    both = ((kind, lengths) for kind, lists in listed.items() for lengths in lists)
    return [_problem(*own, sizes, bf16) for own in both for sizes in (_QWEN, _MAMBA)]


def _problem(
    kind: str, lengths: list[int], sizes: _Sizes, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32
) -> Problem:
    heads, groups, keys, values, erases = sizes
    count, is_decode = len(lengths), kind == "decode"

    def make(inputs: Inputs) -> tuple[Any, ...]:
        rows, states_shape = inputs.permutation(count + 2)[:count], (count + 2, heads, keys, values)
        if is_decode:
            tokens = _tokens(inputs, count, sizes, dtype)
            return tokens, rows, inputs.normal(*states_shape, dtype=state_dtype)
        states = inputs.normal(*states_shape, dtype=state_dtype)
        starts = inputs.of(list(accumulate(lengths, initial=0)), torch.int64)
        return _tokens(inputs, sum(lengths), sizes, dtype), rows, starts, states

    elements = 2 * groups * keys + 2 * heads * values
    shape = StateShape(heads, keys, values, groups, elements, NAMES[dtype], dtype.itemsize, state_dtype.itemsize)
    spans, work = [(length, 0) for length in lengths], state_update(count, shape)
    if not is_decode:
        work = chunked_delta_rule(spans, shape) if erases else chunked_ssd(spans, shape, 64)
    named = {"batch_size": count, **({} if is_decode else {"isl": max(lengths)}),
             "kind": "delta" if erases else "mamba2", "num_heads": heads, "num_groups": groups, "state_rows": keys,
             "state_columns": values, "dtype": NAMES[dtype]}  # fmt: skip
    tolerance = max(_TOLERANCE[dtype], _TOLERANCE[state_dtype])  # what is read of a state is as exact as that is
    return Problem(f"scan_{kind}", named, make, work, tolerance)


def _tokens(inputs: Inputs, num_tokens: int, sizes: _Sizes, dtype: torch.dtype) -> ScanInputs:
    """Keys of length one, decays of 0.5 to 1 a token, weights of what is written of 0 to 1."""
    heads, groups, keys, values, erases = sizes
    q, k = (functional.normalize(inputs.normal(num_tokens, groups, keys, dtype=torch.float32), dim=2) for _ in "qk")
    v = inputs.normal(num_tokens, heads * values + 16, dtype=dtype)[:, : heads * values]  # beside others in memory
    decay, beta = (inputs.normal(num_tokens, heads, dtype=torch.float32).sigmoid() for _ in "ab")
    skip = None if erases else inputs.normal(heads, dtype=torch.float32)
    v = v.view(num_tokens, heads, values)
    return ScanInputs(q.to(dtype), k.to(dtype), v, -0.7 * decay, beta, skip, erases, 64)

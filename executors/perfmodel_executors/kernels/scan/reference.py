"""Scans in torch, in fp32: one update for a new token, chunks of matrix products for prompts.

Mamba-2: Dao and Gu 2024, listing 1. The gated delta rule: Yang et al. 2025, in the WY form: a triangular system for
what each token writes once what those before it in the chunk have written is taken away.
"""

__all__ = ["scan_decode", "scan_prefill"]

import torch
from torch import Tensor

from perfmodel_executors.kernels.scan.inputs import ScanInputs


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
    """Chunks of sequences behind one another, [T, H, V]; `rows` as those of the decode.

    starts: [G + 1]; chunk g has the tokens starts[g] : starts[g + 1]
    """
    starts: list[int] = starts_G.tolist()
    parts = [
        _sequence(inputs.tokens(slice(begin, end)), states_RHKV[row])
        for row, begin, end in zip(rows_G.tolist(), starts, starts[1:], strict=False)
    ]
    return torch.cat(parts)


def _sequence(inputs: ScanInputs, state_of_row: Tensor) -> Tensor:
    """The new tokens of one sequence, [T, H, V], whose state is changed in place.

    With g the summed log decays of a chunk, a token takes of what token s wrote exp(g_t - g_s). With the delta rule,
    W = b k e^g and U = b v solve (I + L) [W | U] = [w | u], where L_ts = b_t k_t . k_s e^(g_t - g_s) for s < t; then
    what tokens write is U - W S, of the state S before the chunk.
    """
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
    """Queries, keys and values [T, H, ...] in fp32."""
    shared = inputs.v_THV.shape[1] // inputs.q_TGK.shape[1]
    q_THK, k_THK = (part.float().repeat_interleave(shared, 1) for part in (inputs.q_TGK, inputs.k_TGK))
    return q_THK, k_THK, inputs.v_THV.float()


def _with_skip(out_THV: Tensor, v_THV: Tensor, inputs: ScanInputs) -> Tensor:
    if inputs.skip_H is not None:
        out_THV = out_THV + inputs.skip_H[:, None] * v_THV
    return out_THV.to(inputs.v_THV.dtype)

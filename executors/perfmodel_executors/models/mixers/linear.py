"""Attention with a state that does not grow: Performer's random features, Linformer's projected keys and values.

    Performer   S_t = S_{t-1} + f(k) [v | 1]^T, o = f(q)^T S / f(q)^T z       f(x) = exp(w x - |x|^2 / 2) / sqrt(m)
    Linformer   [K | V]_t = [K | V]_{t-1} + e_t [k | v]^T, o = softmax(q K^T / sqrt(H)) V

with x over H^(1/4), m orthogonal random rows w, and e_t a column of the projection, whose columns come round again
after r tokens, since a decoder cannot see a whole context ahead. Query heads of a group share the state of their KV
head, so its features, too.

Source: Choromanski et al. 2020, lemma 1 and section 3.1 (FAVOR+); Wang et al. 2020, eq. 7; the recurrent form:
Katharopoulos et al. 2020, eq. 18 to 20.
"""

import math

import torch
from torch import Tensor

from perfmodel.models.architecture import LinearAttention
from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.models.states import LayerState, MixerStep
from perfmodel_executors.models.weights import LinearAttentionWeights

_CHUNK = 128


def linear_attention(
    step: MixerStep, x_TC: Tensor, mixer: LinearAttention, weights: LinearAttentionWeights, layer: LayerState
) -> Tensor:
    """What the block adds, [T, C]; the sequences' states take all T tokens in."""
    batch, kv_heads, (decodes, of_chunk) = step.batch, mixer.num_kv_heads, _KINDS[mixer.kind]
    sizes = [mixer.num_heads * mixer.head_dim, kv_heads * mixer.head_dim, kv_heads * mixer.v_head_dim]
    parts = torch.split(apply_linear(step.kernels, x_TC, weights.qkv, weights.qkv_bias), sizes, dim=-1)
    q_TNH, k_TKH = (part.view(len(x_TC), -1, mixer.head_dim) for part in parts[:2])
    q_TNH, k_TKH = step.rotated(mixer, q_TNH, k_TKH)
    q_TKGH = q_TNH.float().reshape(len(x_TC), kv_heads, -1, mixer.head_dim)
    k_TKH, v_TKV = k_TKH.float(), parts[2].float().view(len(x_TC), kv_heads, mixer.v_head_dim)
    projection, columns_T = weights.projection_KRD.float(), batch.positions_T % mixer.size
    split, result = batch.num_decodes, []
    if split:
        rows, own = step.state_rows.decodes, slice(0, split)
        tokens = (q_TKGH[own], k_TKH[own], v_TKV[own], projection, columns_T[own])
        out_DKGV, layer.state[rows] = decodes(*tokens, layer.state[rows])
        result.append(out_DKGV)
    rows_G = step.state_rows.chunks
    # Decodes alone do not ask the host.
    for row, chunk in zip(rows_G.tolist(), step.chunk_rows, strict=True) if len(rows_G) else ():
        for first in range(chunk.start, chunk.stop, _CHUNK):
            own = slice(first, min(first + _CHUNK, chunk.stop))
            inputs = (q_TKGH[own].permute(1, 2, 0, 3), k_TKH[own].transpose(0, 1), v_TKV[own].transpose(0, 1))
            out_KGTV, layer.state[row] = of_chunk(*inputs, projection, columns_T[own], layer.state[row])
            result.append(out_KGTV.permute(2, 0, 1, 3))
    out_TD = torch.cat(result).flatten(1).to(x_TC.dtype)
    return apply_linear(step.kernels, out_TD, weights.out, weights.out_bias)


def _features(x: Tensor, rows_RH: Tensor) -> Tensor:
    """Positive features [..., R] of queries or keys [..., H], whose products are exp(q k / sqrt(H)) in the mean."""
    x = x * x.shape[-1] ** -0.25
    return torch.exp(x @ rows_RH.mT - x.square().sum(dim=-1, keepdim=True) / 2) / math.sqrt(rows_RH.shape[-2])


def _with_ones(v: Tensor) -> Tensor:
    return torch.cat((v, v.new_ones(*v.shape[:-1], 1)), dim=-1)


def _performer_decodes(
    q_DKGH: Tensor, k_DKH: Tensor, v_DKV: Tensor, rows_KRH: Tensor, _: Tensor, state_DKRC: Tensor
) -> tuple[Tensor, Tensor]:
    keys_DKR = _features(k_DKH[:, :, None], rows_KRH)[:, :, 0]
    state_DKRC = state_DKRC + keys_DKR[..., None] * _with_ones(v_DKV)[:, :, None]
    sums_DKGC = _features(q_DKGH, rows_KRH) @ state_DKRC
    return sums_DKGC[..., :-1] / sums_DKGC[..., -1:], state_DKRC


def _performer_chunk(
    q_KGTH: Tensor, k_KTH: Tensor, v_KTV: Tensor, rows_KRH: Tensor, _: Tensor, state_KRC: Tensor
) -> tuple[Tensor, Tensor]:
    keys_KTR, values_KTC = _features(k_KTH, rows_KRH), _with_ones(v_KTV)
    queries_KGTR = _features(q_KGTH, rows_KRH[:, None])
    inside_KGTC = (queries_KGTR @ keys_KTR[:, None].mT).tril() @ values_KTC[:, None]
    sums_KGTC = inside_KGTC + queries_KGTR @ state_KRC[:, None]
    return sums_KGTC[..., :-1] / sums_KGTC[..., -1:], state_KRC + keys_KTR.mT @ values_KTC


def _linformer_decodes(
    q_DKGH: Tensor, k_DKH: Tensor, v_DKV: Tensor, columns_KRR: Tensor, columns_D: Tensor, state_DKRC: Tensor
) -> tuple[Tensor, Tensor]:
    own_DKR = columns_KRR[:, :, columns_D].permute(2, 0, 1)
    state_DKRC = state_DKRC + own_DKR[..., None] * torch.cat((k_DKH, v_DKV), dim=-1)[:, :, None]
    keys, values = torch.split(state_DKRC, [k_DKH.shape[-1], v_DKV.shape[-1]], dim=-1)
    return torch.softmax(q_DKGH @ keys.mT / math.sqrt(k_DKH.shape[-1]), dim=-1) @ values, state_DKRC


def _linformer_chunk(
    q_KGTH: Tensor, k_KTH: Tensor, v_KTV: Tensor, columns_KRR: Tensor, columns_T: Tensor, state_KRC: Tensor
) -> tuple[Tensor, Tensor]:
    """A token's keys are those projected before the chunk and, of the chunk, up to its own: both are products."""
    own_KTR = columns_KRR[:, :, columns_T].mT
    keys, values = torch.split(state_KRC[:, None], [k_KTH.shape[-1], v_KTV.shape[-1]], dim=-1)
    scores_KGTR = q_KGTH @ keys.mT + (q_KGTH @ k_KTH[:, None].mT).tril() @ own_KTR[:, None]
    shares_KGTR = torch.softmax(scores_KGTR / math.sqrt(k_KTH.shape[-1]), dim=-1)
    out_KGTV = shares_KGTR @ values + (shares_KGTR @ own_KTR[:, None].mT).tril() @ v_KTV[:, None]
    return out_KGTV, state_KRC + own_KTR.mT @ torch.cat((k_KTH, v_KTV), dim=-1)


# What one token of each sequence does, and what some of one sequence do: (queries [..., K, G, H] or [K, G, T, H], keys,
# values, projection, columns of it, states) -> (outputs like the queries, states).
_KINDS = {"performer": (_performer_decodes, _performer_chunk), "linformer": (_linformer_decodes, _linformer_chunk)}

"""The gated delta rule (Yang et al. 2025): S_t = a_t (I - b k k^T) S_{t-1} + b k v^T, o = S^T q.

Prompts go in chunks of 64 (the WY form: a triangular system for what each token writes once those before it in the
chunk are taken away), decodes update the state once. States are [heads, key, value].
"""

__all__ = ["gated_delta_net"]

import math

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.models.architecture import GatedDeltaNet
from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.models.mixers.convolution import convolved_chunk, convolved_decodes
from perfmodel_executors.models.mixers.step import MixerStep
from perfmodel_executors.models.states import LayerState
from perfmodel_executors.models.weights import DeltaWeights

_CHUNK = 64
_NORM_EPS = 1e-6  # of the length of queries and keys


def gated_delta_net(
    step: MixerStep, x_TC: Tensor, mixer: GatedDeltaNet, weights: DeltaWeights, layer: LayerState
) -> Tensor:
    """What the block adds, [T, C]; the sequences' states take all T tokens in."""
    heads, values = mixer.num_value_heads, mixer.num_value_heads * mixer.value_head_dim
    width = 2 * mixer.num_key_heads * mixer.key_head_dim + values
    projected = apply_linear(step.kernels, x_TC, weights.input)
    x_TK, gate_TV, b_TH, a_TH = torch.split(projected, [width, values, heads, heads], dim=-1)
    beta_TH = torch.sigmoid(b_TH.float())
    log_decay_TH = -weights.a_log.float().exp() * functional.softplus(a_TH.float() + weights.dt_bias.float())
    rows, batch, parts, split = step.state_rows, step.batch, [], step.batch.num_decodes
    conv = (layer, weights.conv, None)
    if split:
        q_DHK, k_DHK, v_DHV = _heads(convolved_decodes(x_TK[:split], rows.decodes, *conv), mixer)
        state_DHKV = layer.state[rows.decodes].float() * log_decay_TH[:split].exp()[..., None, None]
        v_DHV = (v_DHV - torch.einsum("dhk,dhkv->dhv", k_DHK, state_DHKV)) * beta_TH[:split, :, None]
        state_DHKV = state_DHKV + k_DHK[..., None] * v_DHV[:, :, None]
        layer.state[rows.decodes] = state_DHKV.to(layer.state.dtype)
        parts.append(torch.einsum("dhk,dhkv->dhv", q_DHK, state_DHKV))
    starts: list[int] = (batch.starts_G + split).tolist()
    for row, begin, end in zip(rows.chunks, starts, starts[1:], strict=False):
        parts_THD = _heads(convolved_chunk(x_TK[begin:end], row, *conv), mixer)
        parts.append(_chunk(*parts_THD, beta_TH[begin:end], log_decay_TH[begin:end], row, layer))
    out_THV = torch.cat(parts).to(x_TC.dtype)
    normed_THV = step.kernels.rms_norm(out_THV, weights.norm, step.norm_eps)
    gated_TV = normed_THV.flatten(1) * functional.silu(gate_TV.float()).to(x_TC.dtype)
    return apply_linear(step.kernels, gated_TV, weights.out)


def _heads(u_TK: Tensor, mixer: GatedDeltaNet) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of unit length, and values, of each value head, [T, H, ...] in fp32; queries / sqrt(K)."""
    keys = mixer.num_key_heads * mixer.key_head_dim
    q_TD, k_TD, v_TD = torch.split(u_TK.float(), [keys, keys, u_TK.shape[1] - 2 * keys], dim=-1)
    shared = mixer.num_value_heads // mixer.num_key_heads
    unit = (part.reshape(len(part), mixer.num_key_heads, -1) for part in (q_TD, k_TD))
    unit = (part * torch.rsqrt(part.square().sum(dim=-1, keepdim=True) + _NORM_EPS) for part in unit)
    q_THK, k_THK = (part.repeat_interleave(shared, 1) for part in unit)
    return q_THK / math.sqrt(mixer.key_head_dim), k_THK, v_TD.reshape(len(v_TD), mixer.num_value_heads, -1)


def _chunk(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    beta_TH: Tensor,
    log_decay_TH: Tensor,
    row: int,
    layer: LayerState,
) -> Tensor:
    """The new tokens of one sequence, [T, H, V].

    With g the summed log decays of a chunk, w = b k e^g and u = b v solve (I + L) [W | U] = [w | u], where
    L_ts = b_t k_t . k_s e^(g_t - g_s) for s < t; then what tokens write is U - W S, of the state S before the chunk.
    """
    state_HKV, parts = layer.state[row].float(), []
    for begin in range(0, len(q_THK), _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        q_HTK, k_HTK, v_HTV = (part[rows].transpose(0, 1) for part in (q_THK, k_THK, v_THV))
        beta_HT1, sums_HT = beta_TH[rows].T[..., None], log_decay_TH[rows].T.cumsum(dim=1)
        between_HTS = torch.exp((sums_HT[:, :, None] - sums_HT[:, None]).tril()).tril()
        mixed_HTS = (beta_HT1 * k_HTK @ k_HTK.transpose(1, 2) * between_HTS).tril(-1)
        right = torch.cat((beta_HT1 * k_HTK * sums_HT.exp()[..., None], beta_HT1 * v_HTV), dim=-1)
        eye = torch.eye(right.shape[1], device=right.device)
        solved = torch.linalg.solve_triangular(mixed_HTS + eye, right, upper=False, unitriangular=True)
        w_HTK, u_HTV = torch.split(solved, [k_HTK.shape[2], v_HTV.shape[2]], dim=-1)
        written_HTV = u_HTV - w_HTK @ state_HKV
        past_HTV = (q_HTK * sums_HT.exp()[..., None]) @ state_HKV
        parts.append((past_HTV + (q_HTK @ k_HTK.transpose(1, 2) * between_HTS) @ written_HTV).transpose(0, 1))
        to_end_HT1 = torch.exp(sums_HT[:, -1:] - sums_HT)[..., None]
        state_HKV = state_HKV * sums_HT[:, -1].exp()[:, None, None] + (k_HTK * to_end_HT1).transpose(1, 2) @ written_HTV
    layer.state[row] = state_HKV
    return torch.cat(parts)

"""Mamba-2 (Dao and Gu 2024): h_t = exp(dt A) h_{t-1} + dt B x^T, y = C h + D x, behind a convolution and a gate.

Prompts go in chunks, as matrix products inside a chunk and a recurrence between chunks (listing 1); decodes update the
state once. States are [heads, N, P].
"""

__all__ = ["mamba"]

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.models.architecture import Mamba
from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.models.mixers.convolution import convolved_chunk, convolved_decodes
from perfmodel_executors.models.mixers.step import MixerStep
from perfmodel_executors.models.states import LayerState
from perfmodel_executors.models.weights import MambaWeights


def mamba(step: MixerStep, x_TC: Tensor, mixer: Mamba, weights: MambaWeights, layer: LayerState) -> Tensor:
    """What the block adds, [T, C]; the sequences' states take all T tokens in."""
    inner, groups = mixer.num_heads * mixer.head_dim, mixer.num_groups * mixer.state_size
    projected = apply_linear(step.kernels, x_TC, weights.input, weights.input_bias)
    gate_TI, x_TK, dt_TH = torch.split(projected, [inner, inner + 2 * groups, mixer.num_heads], dim=-1)
    dt_TH = functional.softplus(dt_TH.float() + weights.dt_bias.float()).clamp(mixer.dt_min, mixer.dt_max)
    rows, batch, parts, split = step.state_rows, step.batch, [], step.batch.num_decodes
    conv = (layer, weights.conv, weights.conv_bias)
    if split:
        u_DK = convolved_decodes(x_TK[:split], rows.decodes, *conv)
        parts.append(_decodes(u_DK, dt_TH[:split], rows.decodes, mixer, weights, layer))
    starts: list[int] = (batch.starts_G + split).tolist()
    for row, begin, end in zip(rows.chunks, starts, starts[1:], strict=False):
        u_TK = convolved_chunk(x_TK[begin:end], row, *conv)
        parts.append(_chunk(u_TK, dt_TH[begin:end], row, mixer, weights, layer))
    y_TI = torch.cat(parts).to(x_TC.dtype)
    return apply_linear(
        step.kernels, _gated_norm(y_TI, gate_TI, mixer, weights, step.norm_eps), weights.out, weights.out_bias
    )


def _split(u_TK: Tensor, mixer: Mamba) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H, P], and B and C of each head's group, [T, H, N], in fp32."""
    inner, groups = mixer.num_heads * mixer.head_dim, mixer.num_groups * mixer.state_size
    x_TI, b_TG, c_TG = torch.split(u_TK.float(), [inner, groups, groups], dim=-1)
    shared = mixer.num_heads // mixer.num_groups
    b_THN, c_THN = (g.reshape(len(g), mixer.num_groups, -1).repeat_interleave(shared, 1) for g in (b_TG, c_TG))
    return x_TI.reshape(len(x_TI), mixer.num_heads, -1), b_THN, c_THN


def _decodes(
    u_DK: Tensor, dt_DH: Tensor, rows: Tensor, mixer: Mamba, weights: MambaWeights, layer: LayerState
) -> Tensor:
    x_DHP, b_DHN, c_DHN = _split(u_DK, mixer)
    decay_DH = torch.exp(-dt_DH * weights.a_log.float().exp())
    new_DHNP = (b_DHN * dt_DH[..., None])[..., None] * x_DHP[:, :, None]
    state_DHNP = layer.state[rows].float() * decay_DH[..., None, None] + new_DHNP
    layer.state[rows] = state_DHNP.to(layer.state.dtype)
    y_DHP = torch.einsum("dhn,dhnp->dhp", c_DHN, state_DHNP) + weights.skip.float()[:, None] * x_DHP
    return y_DHP.flatten(1)


def _chunk(u_TK: Tensor, dt_TH: Tensor, row: int, mixer: Mamba, weights: MambaWeights, layer: LayerState) -> Tensor:
    """The new tokens of one sequence, `chunk_size` at a time: within a chunk token t takes of token s what is left of
    it, exp(sum of dt A over s + 1 .. t)."""
    x_THP, b_THN, c_THN = _split(u_TK, mixer)
    log_decay_TH = -dt_TH * weights.a_log.float().exp()
    state_HNP, parts = layer.state[row].float(), []
    for begin in range(0, len(x_THP), mixer.chunk_size):
        rows = slice(begin, begin + mixer.chunk_size)
        x_HTP, b_HTN, c_HTN = (part[rows].transpose(0, 1) for part in (x_THP, b_THN, c_THN))
        left_HT = log_decay_TH[rows].T.cumsum(dim=1)
        x_HTP = x_HTP * dt_TH[rows].T[..., None]
        between_HTS = torch.exp((left_HT[:, :, None] - left_HT[:, None]).tril()).tril()
        y_HTP = (c_HTN @ b_HTN.transpose(1, 2) * between_HTS) @ x_HTP
        parts.append((y_HTP + torch.exp(left_HT)[..., None] * (c_HTN @ state_HNP)).transpose(0, 1))
        to_end_HT = torch.exp(left_HT[:, -1:] - left_HT)
        state_HNP = (
            state_HNP * torch.exp(left_HT[:, -1])[:, None, None]
            + (b_HTN * to_end_HT[..., None]).transpose(1, 2) @ x_HTP
        )
    layer.state[row] = state_HNP
    y_THP = torch.cat(parts) + weights.skip.float()[:, None] * x_THP
    return y_THP.flatten(1)


def _gated_norm(y_TI: Tensor, gate_TI: Tensor, mixer: Mamba, weights: MambaWeights, eps: float) -> Tensor:
    """RMSNorm of y silu(gate), over each group of channels."""
    gated_TGI = (y_TI.float() * functional.silu(gate_TI.float())).view(len(y_TI), mixer.num_groups, -1)
    normed_TGI = functional.rms_norm(gated_TGI, gated_TGI.shape[-1:], None, eps)
    return normed_TGI.flatten(1).to(y_TI.dtype) * weights.norm

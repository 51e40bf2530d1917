"""What recurrent mixers do with the tokens of a step: those of decodes first, each a sequence, then those of chunks.
Mamba-2 (Dao and Gu 2024): h_t = exp(dt A) h_{t-1} + dt B x^T, y = C h + D x, behind a convolution and a gate. States
are [heads, N, P]. Gated DeltaNet (Yang et al. 2025): a convolution, the gated delta rule over unit queries and keys, a
norm and a gate. States are [heads, key, value]."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.models.architecture import GatedDeltaNet, Mamba
from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.kernels.scan import ScanInputs
from perfmodel_executors.models.states import LayerState, MixerStep
from perfmodel_executors.models.weights import DeltaWeights, MambaWeights


def convolved(step: MixerStep, x_TK: Tensor, layer: LayerState, weight_KW: Tensor, bias_K: Tensor | None) -> Tensor:
    """silu(conv(x)) of all tokens, [T, K]; what sequences leave behind is in `layer` then."""
    rows, split, parts = step.state_rows, step.batch.num_decodes, []
    how = (layer.conv, weight_KW, bias_K)
    if split:
        parts.append(step.kernels.causal_conv_decode(x_TK[:split], rows.decodes, *how))
    if len(rows.chunks):
        parts.append(step.kernels.causal_conv_prefill(x_TK[split:], rows.chunks, step.batch.chunks.starts_G, *how))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def scanned(step: MixerStep, inputs: ScanInputs, layer: LayerState) -> Tensor:
    """What queries find in the states, [T, H, V]; the states take all tokens in."""
    rows, split, parts = step.state_rows, step.batch.num_decodes, []
    if split:
        parts.append(step.kernels.scan_decode(inputs.tokens(slice(split)), rows.decodes, layer.state))
    if len(rows.chunks):
        chunks = inputs.tokens(slice(split, None))
        parts.append(step.kernels.scan_prefill(chunks, rows.chunks, step.batch.chunks.starts_G, layer.state))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def mamba(step: MixerStep, x_TC: Tensor, mixer: Mamba, weights: MambaWeights, layer: LayerState) -> Tensor:
    inner, groups = mixer.num_heads * mixer.head_dim, mixer.num_groups * mixer.state_size
    projected = apply_linear(step.kernels, x_TC, weights.input, weights.input_bias)
    gate_TI, x_TK, dt_TH = torch.split(projected, [inner, inner + 2 * groups, mixer.num_heads], dim=-1)
    dt_TH = functional.softplus(dt_TH.float() + weights.dt_bias.float()).clamp(mixer.dt_min, mixer.dt_max)
    u_TK = convolved(step, x_TK, layer, weights.conv, weights.conv_bias)
    x_TI, b_TD, c_TD = torch.split(u_TK, [inner, groups, groups], dim=-1)
    inputs = ScanInputs(
        c_TD.view(-1, mixer.num_groups, mixer.state_size),
        b_TD.view(-1, mixer.num_groups, mixer.state_size),
        x_TI.view(-1, mixer.num_heads, mixer.head_dim),
        -dt_TH * weights.a_log.float().exp(),
        dt_TH,
        weights.skip.float(),
        erases=False,
        chunk=mixer.chunk_size,
    )
    y_TI = scanned(step, inputs, layer).flatten(1)
    # RMSNorm of y silu(gate), over each group of channels.
    gated_TGI = (y_TI.float() * functional.silu(gate_TI.float())).view(len(y_TI), mixer.num_groups, -1)
    normed_TGI = functional.rms_norm(gated_TGI, gated_TGI.shape[-1:], None, step.norm_eps)
    normed_TI = normed_TGI.flatten(1).to(y_TI.dtype) * weights.norm
    return apply_linear(step.kernels, normed_TI, weights.out, weights.out_bias)


_CHUNK = 64
_NORM_EPS = 1e-6  # of the length of queries and keys


def gated_delta_net(
    step: MixerStep, x_TC: Tensor, mixer: GatedDeltaNet, weights: DeltaWeights, layer: LayerState
) -> Tensor:
    heads, values = mixer.num_value_heads, mixer.num_value_heads * mixer.value_head_dim
    keys = mixer.num_key_heads * mixer.key_head_dim
    projected = apply_linear(step.kernels, x_TC, weights.input)
    x_TK, gate_TV, b_TH, a_TH = torch.split(projected, [2 * keys + values, values, heads, heads], dim=-1)
    u_TK = convolved(step, x_TK, layer, weights.conv, None)
    q_TD, k_TD, v_TD = torch.split(u_TK, [keys, keys, values], dim=-1)
    inputs = ScanInputs(
        _unit(q_TD, mixer, 1 / math.sqrt(mixer.key_head_dim)),
        _unit(k_TD, mixer),
        v_TD.view(-1, heads, mixer.value_head_dim),
        -weights.a_log.float().exp() * functional.softplus(a_TH.float() + weights.dt_bias.float()),
        torch.sigmoid(b_TH.float()),
        skip_H=None,
        erases=True,
        chunk=_CHUNK,
    )
    out_THV = scanned(step, inputs, layer)
    normed_THV = step.kernels.rms_norm(out_THV, weights.norm, step.norm_eps)
    gated_TV = normed_THV.flatten(1) * functional.silu(gate_TV.float()).to(x_TC.dtype)
    return apply_linear(step.kernels, gated_TV, weights.out)


def _unit(x_TD: Tensor, mixer: GatedDeltaNet, length: float = 1.0) -> Tensor:
    x_TGK = x_TD.float().view(-1, mixer.num_key_heads, mixer.key_head_dim)
    scale_TG1 = torch.rsqrt(x_TGK.square().sum(dim=-1, keepdim=True) + _NORM_EPS) * length
    return (x_TGK * scale_TG1).to(x_TD.dtype)

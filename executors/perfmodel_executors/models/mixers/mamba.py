"""Mamba-2 (Dao and Gu 2024): h_t = exp(dt A) h_{t-1} + dt B x^T, y = C h + D x, behind a convolution and a gate.

States are [heads, N, P].
"""

__all__ = ["mamba"]

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.models.architecture import Mamba
from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.kernels.scan import ScanInputs
from perfmodel_executors.models.mixers.recurrence import convolved, scanned
from perfmodel_executors.models.mixers.step import MixerStep
from perfmodel_executors.models.states import LayerState
from perfmodel_executors.models.weights import MambaWeights


def mamba(step: MixerStep, x_TC: Tensor, mixer: Mamba, weights: MambaWeights, layer: LayerState) -> Tensor:
    """What the block adds, [T, C]; the sequences' states take all T tokens in."""
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
    return apply_linear(
        step.kernels, _gated_norm(y_TI, gate_TI, mixer, weights, step.norm_eps), weights.out, weights.out_bias
    )


def _gated_norm(y_TI: Tensor, gate_TI: Tensor, mixer: Mamba, weights: MambaWeights, eps: float) -> Tensor:
    """RMSNorm of y silu(gate), over each group of channels."""
    gated_TGI = (y_TI.float() * functional.silu(gate_TI.float())).view(len(y_TI), mixer.num_groups, -1)
    normed_TGI = functional.rms_norm(gated_TGI, gated_TGI.shape[-1:], None, eps)
    return normed_TGI.flatten(1).to(y_TI.dtype) * weights.norm

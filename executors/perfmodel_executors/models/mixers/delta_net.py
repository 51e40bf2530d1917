"""Gated DeltaNet (Yang et al. 2025): a convolution, the gated delta rule over unit queries and keys, a norm and a gate.

States are [heads, key, value].
"""

__all__ = ["gated_delta_net"]

import math

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.models.architecture import GatedDeltaNet
from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.kernels.scan import ScanInputs
from perfmodel_executors.models.mixers.recurrence import convolved, scanned
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
    """Queries or keys of each head, of `length`, [T, G, K]."""
    x_TGK = x_TD.float().view(-1, mixer.num_key_heads, mixer.key_head_dim)
    scale_TG1 = torch.rsqrt(x_TGK.square().sum(dim=-1, keepdim=True) + _NORM_EPS) * length
    return (x_TGK * scale_TG1).to(x_TD.dtype)

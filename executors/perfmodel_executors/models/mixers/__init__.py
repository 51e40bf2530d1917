"""What mixes tokens in a layer, and the one table of it. Each takes (step, inputs behind the layer's norm [T, C], mixer
of this rank, its weights, what the layer keeps of its sequences); returns what the block adds, [T, C], on this rank."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from perfmodel.models.architecture import Attention, GatedDeltaNet, LatentAttention, LinearAttention, Mamba, Mixer
from perfmodel_executors.models.mixers.latent import latent_attention
from perfmodel_executors.models.mixers.linear import linear_attention
from perfmodel_executors.models.mixers.recurrent import gated_delta_net, mamba
from perfmodel_executors.models.mixers.softmax import softmax_attention
from perfmodel_executors.models.states import MixerStep

__all__ = ["MIXERS", "MixerStep"]

MIXERS: Mapping[type[Mixer], Callable[[MixerStep, Tensor, Any, Any, Any], Tensor]] = {
    Attention: softmax_attention,
    LatentAttention: latent_attention,
    LinearAttention: linear_attention,
    GatedDeltaNet: gated_delta_net,
    Mamba: mamba,
}

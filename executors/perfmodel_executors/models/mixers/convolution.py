"""The causal convolution in front of a scan: depthwise over the last tokens, with the inputs that a sequence leaves
behind for its next step."""

__all__ = ["convolved_chunk", "convolved_decodes"]

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.models.states import LayerState


def convolved_decodes(
    x_DK: Tensor, rows: Tensor, layer: LayerState, weight_KW: Tensor, bias_K: Tensor | None
) -> Tensor:
    """silu(conv(x)) of one token per sequence, [D, K], whose states are `rows`; they take the token in."""
    inputs_DKW = torch.cat((layer.conv[rows], x_DK[..., None]), dim=-1)
    layer.conv[rows] = inputs_DKW[..., 1:]
    out_DK = (inputs_DKW * weight_KW).sum(dim=-1)
    return functional.silu(out_DK if bias_K is None else out_DK + bias_K)


def convolved_chunk(x_TK: Tensor, row: int, layer: LayerState, weight_KW: Tensor, bias_K: Tensor | None) -> Tensor:
    """silu(conv(x)) of the new tokens of one sequence, [T, K]."""
    inputs_KT = torch.cat((layer.conv[row], x_TK.T), dim=-1)
    layer.conv[row] = inputs_KT[:, x_TK.shape[0] :]
    out_KT = functional.conv1d(inputs_KT[None], weight_KW[:, None], bias_K, groups=len(weight_KW))[0]
    return functional.silu(out_KT).T

"""What recurrent mixers do with the tokens of a step: those of decodes first, each a sequence, then those of chunks."""

__all__ = ["convolved", "scanned"]

import torch
from torch import Tensor

from perfmodel_executors.kernels.scan import ScanInputs
from perfmodel_executors.models.mixers.step import MixerStep
from perfmodel_executors.models.states import LayerState


def convolved(step: MixerStep, x_TK: Tensor, layer: LayerState, weight_KW: Tensor, bias_K: Tensor | None) -> Tensor:
    """silu(conv(x)) of all tokens, [T, K]; what sequences leave behind is in `layer` then."""
    rows, split, parts = step.state_rows, step.batch.num_decodes, []
    how = (layer.conv, weight_KW, bias_K)
    if split:
        parts.append(step.kernels.causal_conv_decode(x_TK[:split], rows.decodes, *how))
    if len(rows.chunks):
        parts.append(step.kernels.causal_conv_prefill(x_TK[split:], rows.chunks, step.batch.starts_G, *how))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def scanned(step: MixerStep, inputs: ScanInputs, layer: LayerState) -> Tensor:
    """What queries find in the states, [T, H, V]; the states take all tokens in."""
    rows, split, parts = step.state_rows, step.batch.num_decodes, []
    if split:
        parts.append(step.kernels.scan_decode(inputs.tokens(slice(split)), rows.decodes, layer.state))
    if len(rows.chunks):
        chunks = inputs.tokens(slice(split, None))
        parts.append(step.kernels.scan_prefill(chunks, rows.chunks, step.batch.starts_G, layer.state))
    return parts[0] if len(parts) == 1 else torch.cat(parts)

"""silu(conv(x)): depthwise over the last tokens, with the inputs that a sequence leaves behind for its next step."""

__all__ = ["causal_conv_decode", "causal_conv_prefill"]

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv_decode(
    x_DK: Tensor, rows_D: Tensor, inputs_RKW: Tensor, weight_KW: Tensor, bias_K: Tensor | None
) -> Tensor:
    """One new token per sequence, [D, K].

    rows:   of the sequences in `inputs`
    inputs: [R, K, taps - 1], the last ones of each sequence, the newest last; they take the token in
    weight: [K, taps]
    """
    window_DKW = torch.cat((inputs_RKW[rows_D], x_DK[..., None]), dim=-1)
    inputs_RKW[rows_D] = window_DKW[..., 1:]
    out_DK = (window_DKW * weight_KW).sum(dim=-1)
    return functional.silu(out_DK if bias_K is None else out_DK + bias_K)


def causal_conv_prefill(
    x_TK: Tensor, rows_G: Tensor, starts_G: Tensor, inputs_RKW: Tensor, weight_KW: Tensor, bias_K: Tensor | None
) -> Tensor:
    """Chunks of sequences behind one another, [T, K]; chunk g has the tokens starts[g] : starts[g + 1]."""
    starts: list[int] = starts_G.tolist()
    parts = []
    for row, begin, end in zip(rows_G.tolist(), starts, starts[1:], strict=False):
        window_KT = torch.cat((inputs_RKW[row], x_TK[begin:end].T), dim=-1)
        inputs_RKW[row] = window_KT[:, end - begin :]
        parts.append(functional.conv1d(window_KT[None], weight_KW[:, None], bias_K, groups=len(weight_KW))[0].T)
    return functional.silu(torch.cat(parts))

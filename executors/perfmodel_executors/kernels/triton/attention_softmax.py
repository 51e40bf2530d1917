"""Attention with caps and sinks: the kernels of plain attention, which take both as options (`softmax_terms`)."""

from typing import Any

from torch import Tensor

from perfmodel_executors.kernels.triton.attention_decode import attention_decode
from perfmodel_executors.kernels.triton.attention_prefill import attention_prefill


def attention_softmax_decode(*arguments: Any) -> Tensor:
    """One new token per sequence, [D, N, H_v]: the reference's arguments, of which the last are cap and sinks."""
    *plain, cap, sinks_N = arguments
    return attention_decode(*plain, cap=cap, sinks_N=sinks_N)


def attention_softmax_prefill(*arguments: Any) -> Tensor:
    """Prompt chunks, [T, N, H_v]: the reference's arguments, of which the last are cap and sinks."""
    *plain, cap, sinks_N = arguments
    return attention_prefill(*plain, cap=cap, sinks_N=sinks_N)

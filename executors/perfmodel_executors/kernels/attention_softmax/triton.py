"""Attention with caps and sinks: the kernels of plain attention, which take both as options (`softmax_terms`)."""

__all__ = ["attention_softmax_decode", "attention_softmax_prefill"]

from torch import Tensor

from perfmodel_executors.kernels.attention_decode.triton import attention_decode
from perfmodel_executors.kernels.attention_prefill.triton import attention_prefill
from perfmodel_executors.kernels.kv_pages import KVPages


def attention_softmax_decode(
    q_DNH: Tensor,
    pages: KVPages,
    block_tables_DM: Tensor,
    context_lens_D: Tensor,
    window: int | None,
    chunk: int | None,
    cap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """One new token per sequence, [D, N, H_v]; the reference says what the arguments are."""
    return attention_decode(q_DNH, pages, block_tables_DM, context_lens_D, window, chunk, cap=cap, sinks_N=sinks_N)


def attention_softmax_prefill(
    q_TNH: Tensor,
    pages: KVPages,
    block_tables_GM: Tensor,
    query_starts_G: Tensor,
    num_computed_G: Tensor,
    window: int | None,
    chunk: int | None,
    cap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Prompt chunks, [T, N, H_v]; the reference says what the arguments are."""
    where = (block_tables_GM, query_starts_G, num_computed_G)
    return attention_prefill(q_TNH, pages, *where, window, chunk, cap=cap, sinks_N=sinks_N)

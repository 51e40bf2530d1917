"""Scatter of a step's new keys and values into the pages that the engine assigned to them."""

__all__ = ["kv_write"]

import torch
from torch import Tensor

from perfmodel_executors.kernels.kv_pages import FP8, KVPages, packed, quantized


def kv_write(k_TKH: Tensor, v_TKH: Tensor, pages: KVPages, slots_T: Tensor) -> None:
    """Writes row t of k and v to slot `slots[t] = block_id * block_size + offset`, in place, quantised as pages are."""
    if pages.packing is not None:
        k_bytes, v_bytes, k_scales, v_scales = pages.tensors
        for x_TKH, *stored in ((k_TKH, k_bytes, k_scales), (v_TKH, v_bytes, v_scales)):
            for tensor, rows in zip(stored, packed(x_TKH, pages.packing), strict=True):
                tensor.flatten(0, 1).index_copy_(0, slots_T, rows)
        return
    size = pages.block_size
    sides = ((k_TKH, pages.k_BSKH, pages.k_scale_BKS), (v_TKH, pages.v_BSKH, pages.v_scale_BKS))
    for x_TKH, pages_BSKH, scale_BKS in sides:
        if x_TKH.dtype == pages_BSKH.dtype:
            pages_BSKH.flatten(0, 1).index_copy_(0, slots_T, x_TKH)
            continue
        values_TKH, scale_TK = quantized(x_TKH, pages_BSKH.dtype)
        if pages_BSKH.dtype == FP8:  # as bytes: the CPU scatters no fp8
            values_TKH, pages_BSKH = values_TKH.view(torch.uint8), pages_BSKH.view(torch.uint8)
        pages_BSKH.flatten(0, 1).index_copy_(0, slots_T, values_TKH)
        if scale_BKS is not None and scale_TK is not None:
            scale_BKS[slots_T // size, :, slots_T % size] = scale_TK

"""Scatter of a step's new keys and values into the pages that the engine assigned to them."""

__all__ = ["kv_write"]

from torch import Tensor


def kv_write(k_TKH: Tensor, v_TKH: Tensor, k_cache_BSKH: Tensor, v_cache_BSKH: Tensor, slots_T: Tensor) -> None:
    """Writes row t of k and v to slot `slots[t] = block_id * block_size + offset`, in place."""
    k_cache_BSKH.flatten(0, 1).index_copy_(0, slots_T, k_TKH)
    v_cache_BSKH.flatten(0, 1).index_copy_(0, slots_T, v_TKH)

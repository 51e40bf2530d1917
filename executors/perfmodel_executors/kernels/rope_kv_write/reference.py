"""RoPE of queries and keys, and the paged write of keys and values: what comes between the projection and attention."""

__all__ = ["rope_kv_write"]

from torch import Tensor

from perfmodel_executors.kernels.kv_pages import KVPages
from perfmodel_executors.kernels.kv_write.reference import kv_write
from perfmodel_executors.kernels.rope.reference import rope


def rope_kv_write(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cos_sin_TH: Tensor | None,
    pages: KVPages,
    slots_T: Tensor,
) -> Tensor:
    """The rotated queries; rotated keys and values go to their slots of `pages`, quantised as those are.

    cos_sin: the table's row of each token's position (see `rope_table`); None for a layer without RoPE
    slots:   block_id * block_size + offset of each token
    """
    if cos_sin_TH is not None:
        q_TNH, k_TKH = rope(q_TNH, cos_sin_TH), rope(k_TKH, cos_sin_TH)
    kv_write(k_TKH, v_TKH, pages, slots_T)
    return q_TNH

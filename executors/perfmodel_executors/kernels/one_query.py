"""Attention of one new token over what it sees: what the decodes of plain, sparse and windowed attention share."""

__all__ = ["attend_one"]

from torch import Tensor
from torch.nn import functional


def attend_one(q_NH: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(H)) v, [N, H_v], of the N query heads of one token.

    The query heads of a group act as the rows of one query: 4-10 times faster on a CPU than enable_gqa. A group of one
    head is taken twice: torch multiplies a single 16-bit row by a kernel that takes 3-5 times as long as for two rows.
    """
    num_heads, head_dim = q_NH.shape
    num_kv_heads = k_LKH.shape[1]
    group = num_heads // num_kv_heads
    q_KGH = q_NH.view(1, num_kv_heads, group, head_dim)
    if group == 1:
        q_KGH = q_KGH.expand(-1, -1, 2, -1)
    k_KLH, v_KLH = k_LKH.transpose(0, 1), v_LKH.transpose(0, 1)
    out_KGH = functional.scaled_dot_product_attention(q_KGH, k_KLH[None], v_KLH[None])
    return out_KGH[:, :, :group].reshape(num_heads, -1)

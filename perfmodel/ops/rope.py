"""Rotary position embedding of queries and keys."""

__all__ = ["rope"]

from perfmodel.ops.work import Work

_EAGER_KERNELS = 10  # q and k each: negate one half, concatenate the halves, times sin, times cos, sum
_EAGER_PASSES = 10  # (half + half) + 2 + 2 + 2 + 3; the tables stay in cache


def rope(num_tokens: float, num_elements: int, element_bytes: float, *, is_fused: bool = True) -> Work:
    """Rotates `num_elements` elements per token (query and key heads of this device together), in place.

        FLOPs = 3 n e (two products and a sum per element); bytes = 2 n e b; the cos/sin table stays in cache

    `is_fused=False`: PyTorch's expression x cos + rotate_half(x) sin, operator by operator: 10 n e b in 10 kernels. Its
    work goes by another name, since no measured attention kernel contains it. Source: Su et al. 2021, eq. 34; Hugging
    Face's apply_rotary_pos_emb for the operators.
    """
    elements = num_tokens * num_elements
    return Work(
        "rope" if is_fused else "rope_unfused",
        "elementwise",
        flops=3.0 * elements,
        rate="vector",
        activation_bytes=(2 if is_fused else _EAGER_PASSES) * elements * element_bytes,
        num_kernels=1 if is_fused else _EAGER_KERNELS,
    )

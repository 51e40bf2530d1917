"""Rotary position embedding of queries and keys."""

__all__ = ["rope"]

from perfmodel.ops.work import Work

_EAGER_KERNELS = 8  # q and k each: split and negate, concatenate, two products and a sum, partly fused by the library


def rope(num_tokens: float, num_elements: int, element_bytes: float, *, is_fused: bool = True) -> Work:
    """Rotates `num_elements` elements per token (query and key heads of this device together), in place.

        FLOPs = 3 n e (two products and a sum per element); bytes = 2 n e b; the cos/sin table stays in cache

    `is_fused=False`: PyTorch's expression x cos + rotate_half(x) sin, four passes per tensor. Source: Su et al. 2021,
    eq. 34.
    """
    elements = num_tokens * num_elements
    return Work(
        "rope",
        "elementwise",
        flops=3.0 * elements,
        rate="vector",
        activation_bytes=(2 if is_fused else 8) * elements * element_bytes,
        num_kernels=1 if is_fused else _EAGER_KERNELS,
        extent={"tokens": num_tokens, "size": num_elements},
    )

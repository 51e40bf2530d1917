"""RMSNorm, alone or fused with the residual addition before it."""

__all__ = ["residual_add", "rms_norm"]

from perfmodel.ops.work import Work

_EAGER_KERNELS = 5  # square, mean, rsqrt, scale by it, scale by the weight: PyTorch's unfused expression


def rms_norm(
    name: str, num_tokens: float, size: int, element_bytes: float, *, adds_residual: bool = False, is_fused: bool = True
) -> Work:
    """y = x / rms(x) * g over rows of `size` elements.

        FLOPs = 4 n d (square and sum, two scalings); bytes = 2 n d b: x read, y written

    `adds_residual`: the fused kernel of serving engines, which also reads and rewrites the residual stream
    (4 n d b, 5 n d FLOPs). `is_fused=False`: one kernel per arithmetic operation, each reading and writing its tensor.
    Source: identity.
    """
    elements = num_tokens * size
    passes = 2 + 2 * adds_residual if is_fused else 2 * (_EAGER_KERNELS - 1)
    return Work(
        name,
        "elementwise",
        flops=(4.0 + adds_residual) * elements,
        rate="vector",
        weight_bytes=size * element_bytes,
        activation_bytes=passes * elements * element_bytes,
        num_kernels=1 if is_fused else _EAGER_KERNELS,
        extent={"tokens": num_tokens, "size": size},
    )


def residual_add(name: str, num_tokens: float, size: int, element_bytes: float) -> Work:
    """x + y: n d FLOPs, 3 n d b bytes. Source: identity."""
    elements = num_tokens * size
    return Work(
        name,
        "elementwise",
        flops=elements,
        rate="vector",
        activation_bytes=3 * elements * element_bytes,
        extent={"tokens": num_tokens, "size": size},
    )

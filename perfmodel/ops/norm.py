"""RMSNorm, alone or fused with the residual addition before it."""

__all__ = ["FP32_BYTES", "residual_add", "rms_norm"]

from perfmodel.ops.work import Work

FP32_BYTES = 4.0  # in which plain PyTorch modules take norms and softmax
_ARITHMETIC_KERNELS = 6  # square, mean, + epsilon, 1/sqrt, times it, times the weight
_CAST_KERNELS = 2  # to fp32 and back, for narrower models


def rms_norm(
    name: str,
    num_tokens: float,
    size: int,
    element_bytes: float,
    *,
    adds_residual: bool = False,
    is_fused: bool = True,
    num_tensors: int = 1,
) -> Work:
    """y = x / rms(x) * g over rows of `size` elements.

        FLOPs = 4 n d (square and sum, two scalings); bytes = 2 n d b: x read, y written

    `adds_residual`: the fused kernel of serving engines, which also reads and rewrites the residual stream
    (4 n d b, 5 n d FLOPs). `is_fused=False`: one kernel per operator of PyTorch's expression, each reading and writing
    its tensor: n d (2 b + 5 * 4), and n d (2 b + 2 * 4) more for the casts to fp32 and back; the `num_tensors` that
    share the `size` elements one after another. Source: identity; Hugging Face's LlamaRMSNorm for the operators.
    """
    elements = num_tokens * size
    casts = element_bytes != FP32_BYTES
    if is_fused:
        num_kernels, bytes_each = 1, (2 + 2 * adds_residual) * element_bytes
    else:
        num_kernels = num_tensors * (_ARITHMETIC_KERNELS + _CAST_KERNELS * casts)
        bytes_each = (2 + 2 * casts) * element_bytes + (5 + 2 * casts) * FP32_BYTES
    return Work(
        name,
        "elementwise",
        flops=(4.0 + adds_residual) * elements,
        rate="vector",
        weight_bytes=size * element_bytes,
        activation_bytes=bytes_each * elements,
        num_kernels=num_kernels,
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
    )

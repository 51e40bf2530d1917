"""Activation functions between the two halves of a feed-forward block, and sigmoid gates."""

__all__ = ["activation", "gate"]

from perfmodel.ops.work import Work

_FLOPS_PER_ELEMENT = {"relu": 1.0, "relu2": 2.0, "silu": 5.0, "gelu": 8.0}  # an exponential counted as four


def activation(
    num_tokens: float, size: int, element_bytes: float, *, function: str = "silu", is_gated: bool = True, is_fused: bool
) -> Work:
    """act(g) * u (gated, SwiGLU-like) or act(x), over `size` output elements per token.

        bytes: gated and fused 3 n s b (g and u read, product written); gated and unfused 5 n s b in two kernels
               plain 2 n s b; relu2 unfused 4 n s b in two (the square is a kernel of its own)

    FLOPs per element depend on the function and never matter. Source: Shazeer 2020 (GLU variants); identity.
    """
    elements = num_tokens * size
    kernels = 1 if is_fused else 1 + is_gated + (function == "relu2")
    passes = 2 * kernels + is_gated
    return Work(
        f"{function}_and_mul" if is_gated else function,
        "elementwise",
        flops=(_FLOPS_PER_ELEMENT.get(function, 5.0) + is_gated) * elements,
        rate="vector",
        activation_bytes=passes * elements * element_bytes,
        num_kernels=kernels,
    )


def gate(name: str, num_tokens: float, size: int, element_bytes: float, *, is_fused: bool = True) -> Work:
    """x * sigmoid(g) over `size` elements per token: 3 n s b bytes; unfused 5 n s b, 2 kernels. Source: identity."""
    elements = num_tokens * size
    return Work(
        name,
        "elementwise",
        flops=6.0 * elements,
        rate="vector",
        activation_bytes=(3 if is_fused else 5) * elements * element_bytes,
        num_kernels=1 if is_fused else 2,
    )

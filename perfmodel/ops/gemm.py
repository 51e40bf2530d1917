"""Matrix multiplication of activations with weights, in any number format."""

__all__ = ["gemm", "quantize_bytes"]

from perfmodel.ops.extents import GemmExtent
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.work import Work


def quantize_bytes(m: float, k: float, form: LinearFormat) -> float:
    """HBM bytes of the kernel that quantizes an (m, k) input: read at the model's dtype, written at the input's.

    0 for formats that read the model's dtype. Source: identity; the kernel is bandwidth-bound.
    """
    return m * k * (form.output_bytes + form.input_bytes) if form.quantizes_input else 0.0


def gemm(name: str, m: float, n: int, k: int, form: LinearFormat, *, has_bias: bool = False) -> Work:
    """Y (m, n) = X (m, k) W (k, n).

        FLOPs = 2 m n k    bytes = n k w + m k a + m n o  (+ m k (o + a) to quantize X first)

    with w, a, o the bytes of a weight, an input and an output element. Source: identity, each operand moved once.
    Nothing is launched for m = 0.
    """
    if m == 0:
        return Work(name, "gemm", rate=form.rate, num_kernels=0)
    quantized_bytes = quantize_bytes(m, k, form)
    return Work(
        name,
        "gemm",
        flops=2.0 * m * n * k,
        rate=form.rate,
        weight_bytes=n * k * form.weight_bytes + (n * form.output_bytes if has_bias else 0.0),
        activation_bytes=m * k * form.input_bytes + m * n * form.output_bytes + quantized_bytes,
        num_kernels=2 if form.quantizes_input else 1,
        extent=GemmExtent(m, n, k, form.weight_bytes, form.input_bytes, quantized_bytes),
        format=form.name,
    )

"""LLM.int8(): a few input columns with large values are multiplied apart, in 16 bits, and the rest in INT8.

For an (m, k) input, n outputs and b bytes of the model's dtype, beside quantizing the input and the INT8 product:

    find        m k b                       the input read once more, for columns with a magnitude above the threshold
    outliers    2 m n k' FLOPs, k' = share k, in the model's dtype; k' columns of weights, dequantized on the way
    dequantize  8 m n                       32-bit sums written (instead of b bytes), read, and written in b bytes
    add         3 m n b                     both products

Source: Dettmers et al. 2022, section 3.2; bitsandbytes' MatMul8bitLt has these as kernels of their own.
"""

__all__ = ["outlier_nodes"]

from functools import partial
from math import ceil

from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.gemm import gemm
from perfmodel.ops.node import OperatorNode, on_tokens
from perfmodel.ops.work import Work

_SUM_BYTES = 4.0  # of a 32-bit sum of INT8 products


def outlier_nodes(name: str, num_in: int, width: int, form: LinearFormat) -> list[OperatorNode]:
    """What comes beside the product `name` of `width` outputs; nothing without outliers."""
    if not form.outlier_share:
        return []
    size = form.output_bytes
    apart = LinearFormat(form.outlier_rate, form.weight_bytes, size, size)
    columns = max(1, ceil(form.outlier_share * num_in))
    return [
        on_tokens(f"{name}_find", lambda m: _pass(f"{name}_find", m * num_in, m * num_in * size)),
        on_tokens(f"{name}_outliers", partial(gemm, f"{name}_outliers", n=width, k=columns, form=apart)),
        on_tokens(f"{name}_dequantize", lambda m: _pass(f"{name}_dequantize", m * width, 2 * _SUM_BYTES * m * width)),
        on_tokens(f"{name}_add", lambda m: _pass(f"{name}_add", m * width, 3 * size * m * width)),
    ]


def _pass(name: str, elements: float, num_bytes: float) -> Work:
    """A kernel that looks at each element once; nothing is launched for none."""
    kernels = 1 if elements else 0
    return Work(name, "elementwise", flops=elements, rate="vector", activation_bytes=num_bytes, num_kernels=kernels)

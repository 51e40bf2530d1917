"""Linear layers: activations times weights in any number format, products of two thin matrices, outliers apart.

LLM.int8(): the few input columns with outliers are multiplied in 16 bits, the rest in INT8. For an (m, k) input, n
outputs and b bytes of the model's dtype, beside quantizing the input and the INT8 product:

    find        m k b                       the input read once more, for columns with a magnitude above the threshold
    outliers    2 m n k' FLOPs, k' = share k, in the model's dtype; k' columns of weights, dequantized on the way
    dequantize  8 m n                       32-bit sums written (instead of b bytes), read, and written in b bytes
    add         3 m n b                     both products

Source: Dettmers et al. 2022, section 3.2; bitsandbytes' MatMul8bitLt has these as kernels of their own."""

from collections.abc import Mapping
from functools import partial
from math import ceil

from perfmodel.ops.elementwise import elementwise
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.node import OperatorNode, on_tokens
from perfmodel.ops.problem_sizes import GemmSize
from perfmodel.ops.work import Work


def gemm(name: str, m: float, n: int, k: int, form: LinearFormat, *, has_bias: bool = False) -> Work:
    """Y (m, n) = X (m, k) W (k, n).

        FLOPs = 2 m n k    bytes = n k w + m k a + m n o  (+ m k (o + a) to quantize X first)

    with w, a, o the bytes of a weight, an input and an output element. m = 0 launches nothing. name: of the operator;
    form: of weights and inputs; has_bias: reads n more. Source: identity, each operand moved once."""
    if m == 0:
        return Work(name, "gemm", rate=form.rate, num_kernels=0)
    # Quantizing X reads it at the model's dtype and writes it at the input's.
    quantized_bytes = m * k * (form.output_bytes + form.input_bytes) if form.quantizes_input else 0.0
    return Work(
        name,
        "gemm",
        flops=2.0 * m * n * k,
        rate=form.rate,
        weight_bytes=n * k * form.weight_bytes + (n * form.output_bytes if has_bias else 0.0),
        activation_bytes=m * k * form.input_bytes + m * n * form.output_bytes + quantized_bytes,
        num_kernels=2 if form.quantizes_input else 1,
        problem=GemmSize(m, n, k, form.weight_bytes, form.input_bytes, quantized_bytes),
        format=form.name,
    )


_SUM_BYTES = 4.0  # of a 32-bit sum of INT8 products


def _outlier_nodes(name: str, num_in: int, width: int, form: LinearFormat) -> list[OperatorNode]:
    """Outlier operators beside the product `name` of `num_in` x `width`; none without outliers."""
    if not form.outlier_share:
        return []
    size = form.output_bytes
    apart = LinearFormat(form.outlier_rate, form.weight_bytes, size, size)
    columns = max(1, ceil(form.outlier_share * num_in))

    def touching(label: str, elements: int, element_bytes: float) -> OperatorNode:
        return on_tokens(label, lambda m: elementwise(label, m * elements, element_bytes * m * elements, int(m > 0)))

    return [
        touching(f"{name}_find", num_in, size),
        on_tokens(f"{name}_outliers", partial(gemm, f"{name}_outliers", n=width, k=columns, form=apart)),
        touching(f"{name}_dequantize", width, 2 * _SUM_BYTES),
        touching(f"{name}_add", width, 3 * size),
    ]


def linear_nodes(
    widths: Mapping[str, int],
    num_in: int,
    form: LinearFormat,
    *,
    rank: int | None = None,
    thin: str = "",
    has_bias: bool = False,
) -> list[OperatorNode]:
    """One GEMM for each of `widths` (name -> outputs), with inputs of `num_in` columns.

    A low `rank` r adds one GEMM to r columns (named `thin`, else after the layer): 2 T r (in + out) FLOPs, r (in + out)
    weights, 2 T r elements written and read. form: of weights and inputs; has_bias: of the last GEMM"""
    nodes = []
    if rank is not None:
        name = thin or f"{next(iter(widths))}_rank"
        nodes.append(on_tokens(name, partial(gemm, name, n=rank, k=num_in, form=form)))
    for name, width in widths.items():
        nodes.append(on_tokens(name, partial(gemm, name, n=width, k=rank or num_in, form=form, has_bias=has_bias)))
        nodes += _outlier_nodes(name, rank or num_in, width, form)
    return nodes

"""Linear layers of a block that read the same input, each a matrix or a product of two thin ones."""

__all__ = ["linear_nodes"]

from collections.abc import Mapping
from functools import partial

from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.gemm import gemm
from perfmodel.ops.node import OperatorNode, on_tokens
from perfmodel.ops.outliers import outlier_nodes


def linear_nodes(
    widths: Mapping[str, int],
    num_in: int,
    form: LinearFormat,
    *,
    rank: int | None = None,
    thin: str = "",
    has_bias: bool = False,
) -> list[OperatorNode]:
    """A multiplication for each of `widths` (name -> outputs), with inputs of `num_in`.

    With a `rank` r the inputs are multiplied once to r columns (named `thin`, else after the layer), and those to each
    output: 2 T r (in + out) FLOPs, r (in + out) weights, one kernel more and 2 T r elements that go out and back in.
    """
    nodes = []
    if rank is not None:
        name = thin or f"{next(iter(widths))}_rank"
        nodes.append(on_tokens(name, partial(gemm, name, n=rank, k=num_in, form=form)))
    for name, width in widths.items():
        nodes.append(on_tokens(name, partial(gemm, name, n=width, k=rank or num_in, form=form, has_bias=has_bias)))
        nodes += outlier_nodes(name, rank or num_in, width, form)
    return nodes

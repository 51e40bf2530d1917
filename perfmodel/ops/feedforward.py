"""The operators of one feed-forward block: dense (sharded by columns, then rows) or mixture of experts."""

__all__ = ["dense_ffn_nodes", "mlp_nodes"]

from functools import partial

from perfmodel.models.architecture import DenseFFN
from perfmodel.ops.elementwise import activation
from perfmodel.ops.linear import linear_nodes
from perfmodel.ops.node import LayerContext, OperatorNode, on_tokens


def dense_ffn_nodes(ffn: DenseFFN, context: LayerContext) -> list[OperatorNode]:
    """Gate and up projection (one GEMM when fused), activation, down projection."""
    return mlp_nodes(
        context.shard.columns(ffn.intermediate_size),
        context,
        component="dense_ffn",
        is_gated=ffn.gated,
        function=ffn.activation,
        has_bias=ffn.bias,
        ranks=(ffn.up_rank, ffn.down_rank),
    )


def mlp_nodes(
    width: int,
    context: LayerContext,
    *,
    component: str,
    is_gated: bool,
    function: str,
    has_bias: bool = False,
    prefix: str = "",
    ranks: tuple[int | None, int | None] = (None, None),
) -> list[OperatorNode]:
    """A dense feed-forward block of `width` intermediate elements on this device; `ranks`: of its two halves.

    context:   of the layer; component: whose number format it has (a name in `COMPONENTS`)
    is_gated, function: as in `activation`; has_bias: of the up projection
    prefix:    of the operators' names
    """
    form, hidden, size = context.format(component), context.hidden, context.element_bytes
    if is_gated:
        ups = {"gate_up_proj": 2 * width} if context.is_fused else {"gate_proj": width, "up_proj": width}
    else:
        ups = {"up_proj": width}
    ups = {prefix + name: columns for name, columns in ups.items()}
    up_rank, down_rank = ranks
    nodes = linear_nodes(ups, hidden, form, rank=up_rank, thin=f"{prefix}up_rank_proj", has_bias=has_bias)
    act = partial(
        activation, size=width, element_bytes=size, function=function, is_gated=is_gated, is_fused=context.is_fused
    )
    nodes.append(on_tokens(prefix + "activation", act))
    return nodes + linear_nodes({prefix + "down_proj": hidden}, width, form, rank=down_rank, has_bias=has_bias)

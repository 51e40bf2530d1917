"""Collective operators. A group of one rank sends nothing: no bytes, no launch.

Payload as in nccl-tests: the whole tensor of an all-reduce, the gathered result of an all-gather, the input of a
reduce-scatter, all that a rank sends in an all-to-all (its own share included), the message of a send. `ranks` is a
group, or a number of neighbours."""

from collections.abc import Callable

from perfmodel.ops.messages import Exchange, Message, RankGroup
from perfmodel.ops.node import LayerContext, OperatorNode, on_tokens
from perfmodel.ops.work import Work

Ranks = int | RankGroup


def _collective(
    name: str, kind: str, payload_bytes: float, ranks: Ranks, format: str = "", exchange: Exchange | None = None
) -> Work:
    num_ranks, group = (ranks, None) if isinstance(ranks, int) else (ranks.num_ranks, ranks)
    if num_ranks <= 1 or payload_bytes == 0:
        return Work(name, "collective", num_kernels=0)
    return Work(name, "collective", message=Message(kind, payload_bytes, num_ranks, group, exchange), format=format)


def all_reduce(payload_bytes: float, ranks: Ranks, name: str = "all_reduce") -> Work:
    """Every rank ends with the sum; at least 2 S (k-1)/k bytes leave each rank (Patarasuk and Yuan 2009)."""
    return _collective(name, "all_reduce", payload_bytes, ranks)


def all_gather(payload_bytes: float, ranks: Ranks, name: str = "all_gather") -> Work:
    """Every rank ends with all S bytes; S (k-1)/k arrive at each."""
    return _collective(name, "all_gather", payload_bytes, ranks)


def reduce_scatter(payload_bytes: float, ranks: Ranks, name: str = "reduce_scatter") -> Work:
    """Every rank ends with the sum of its k-th part; S (k-1)/k leave each."""
    return _collective(name, "reduce_scatter", payload_bytes, ranks)


def all_to_all(
    payload_bytes: float, ranks: Ranks, name: str = "all_to_all", kernel: str = "", exchange: Exchange | None = None
) -> Work:
    """Every rank sends a k-th of its S bytes to each other rank; S (k-1)/k leave each.

    payload_bytes: S per rank; ranks: of the group; name: of the operator; kernel: "dispatch" or "combine", for engines'
    own kernels, which DeepEP has for two routes; exchange: how tokens map to experts"""
    if exchange is not None and exchange.route in ("node", "expert"):
        kernel = f"{kernel}_{exchange.route}"
    return _collective(name, "all_to_all", payload_bytes, ranks, kernel, exchange)


def send_recv(payload_bytes: float, ranks: Ranks = 2) -> Work:
    """One message from a rank to the next."""
    return _collective("send_recv", "send_recv", payload_bytes, ranks)


def tensor_parallel(
    collective: Callable[[float, Ranks, str], Work],
    name: str,
    token_bytes: float,
    context: LayerContext,
    on: Callable[[str, Callable[[int], Work]], OperatorNode] = on_tokens,
) -> list[OperatorNode]:
    """A collective of the tensor-parallel group, `token_bytes` a token; no node without tensor parallelism.

    collective: a function of this module; name: of the operator; context: of the layer
    on: `on_tokens`, or `on_samples` for bytes a sample"""
    group = context.shard.group("tensor")
    return [on(name, lambda n: collective(n * token_bytes, group, name))] if group.tp > 1 else []

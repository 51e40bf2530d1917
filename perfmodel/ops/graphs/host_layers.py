"""Layers that stay with the host's CPU: the same operators, marked so that a form of their own times them.

Engines for a single machine keep the first layers of a model that is too large for the device in the host's memory, and
the table of words always; the last layers, and behind them the head, lie on the device (llama.cpp's n_gpu_layers).
"""

from collections.abc import Iterable
from dataclasses import replace

from perfmodel.ops.node import OperatorNode
from perfmodel.ops.work import BatchShape, Work

HOST = "host"


def host_family(family: str) -> str:
    """The family that calibrations have fits under for operators of `family` on the host."""
    return f"{HOST}_{family}"


def on_host(nodes: Iterable[OperatorNode]) -> list[OperatorNode]:
    """`nodes` as the host computes them, named after it."""
    return [replace(node, name=f"{node.name}@{HOST}", work=_Marked(node)) for node in nodes]


class _Marked:
    """The work of a node under the family of the host's."""

    def __init__(self, node: OperatorNode) -> None:
        self._node = node

    def __call__(self, shape: BatchShape) -> Work:
        work = self._node.work(shape)
        return replace(work, family=host_family(work.family))

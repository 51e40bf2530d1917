"""What an operator does: FLOPs, bytes per memory level, messages. Pure functions of sizes; nothing here knows time."""

__all__ = [
    "BatchShape",
    "Depends",
    "Message",
    "OperatorNode",
    "Sharding",
    "StepGraph",
    "Work",
    "build_graph",
    "decode_shape",
    "served_model",
    "windowed_contexts",
]

from perfmodel.ops.formats import served_model
from perfmodel.ops.graph import StepGraph, build_graph
from perfmodel.ops.node import OperatorNode
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import BatchShape, Depends, Message, Work, decode_shape, windowed_contexts
